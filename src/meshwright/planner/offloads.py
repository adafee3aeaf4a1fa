"""What is tried to offload, in the order in which a step misses it least, and whether hosts and devices could hold it.

Sources: Ren et al. 2021 §3 (the optimizer first), Rajbhandari et al. 2021 §5 (gradients and parameters after it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.offload import stored_kinds
from meshwright.core.precision import NUM_MOMENTS, RECIPES
from meshwright.core.strategy import Offload
from meshwright.planner.enumerate import default_precision

STATES = ("optimizer", "gradients", "parameters")
"""Kinds of states."""


def _states_on(tier: str, **more: Any) -> list[Offload]:
    """The first of them, the first two, all three."""
    counts = range(1, len(STATES) + 1)
    return [Offload.model_validate({**dict.fromkeys(STATES[:count], tier), **more}) for count in counts]


TO_HOST = (*_states_on("cpu"), Offload(activations="cpu"), *_states_on("cpu", activations="cpu"))
TO_DISK = tuple(_states_on("disk", path="FOLDER"))


def hosts_may_hold(model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any], offload: Offload) -> bool:
    """False where the states that go to hosts are more than these have, though each is kept once and evenly divided."""
    if cluster.host_memory_bytes is None:
        return True
    recipe = RECIPES[fix.get("precision") or default_precision(cluster)]
    stored = (each for each in stored_kinds(recipe, job.optimizer, offload) if each.tier == "cpu")
    needed_bytes = model.num_parameters * sum(each.element_bytes for each in stored)
    return needed_bytes <= cluster.num_nodes * cluster.host_memory_bytes


def devices_may_hold(model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any]) -> bool:
    """Likewise of the states that stay on devices."""
    recipe, offload = RECIPES[fix.get("precision") or default_precision(cluster)], fix.get("offload", Offload())
    of_optimizer = recipe.master_bytes + NUM_MOMENTS[job.optimizer] * recipe.moment_bytes
    each_bytes = dict(zip(STATES, (of_optimizer, recipe.gradient_bytes, recipe.parameter_bytes), strict=True))
    stay_bytes = sum(each_bytes[kind] for kind in STATES if getattr(offload, kind) == "none")
    return model.num_parameters * stay_bytes <= cluster.num_devices * cluster.usable_memory_bytes
