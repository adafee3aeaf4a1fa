"""What the user fixed of a layout, or changes in a serving plan: values of its fields, read from text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.serving import Layout, Requests, ServingPlan
from meshwright.planner.named import NamedFields, checked, types_of

FIXED = NamedFields("--fix", types_of(Layout), "a layout", "tp=2")
CHANGED = NamedFields("--set", types_of(Layout, Requests), "a layout or of its requests", "tp=2")


def parse_layout(texts: Iterable[str]) -> dict[str, Any]:
    """`tp=2`, `step_tokens=1024`, ... to values of a layout. A field may be named once.

    Raises InputError naming the text.
    """
    return {name: checked(Layout, name, value, f"--fix {name}") for name, value in FIXED.read(texts).items()}


def changed(plan: ServingPlan, texts: Iterable[str]) -> ServingPlan:
    """The plan with these fields of its layout or requests. What was not named follows: replicas from the other degrees
    and the devices, a list of layers per stage is given up where pp changes.

    Raises:
        InputError: no such field or value, one that was named twice, or nothing is changed.
        RuleError: the result is illegal.
    """
    named = CHANGED.read(texts)
    of_requests = {name: value for name, value in named.items() if name in Requests.model_fields}
    of_layout = {name: value for name, value in named.items() if name in Layout.model_fields}
    requests = Requests.parse({**plan.requests.model_dump(), **of_requests}, CHANGED.option)
    layout = Layout.parse({**plan.layout.model_dump(), **of_layout}, CHANGED.option)
    follows: dict[str, Any] = {}
    if "replicas" not in named and (layout.tp, layout.pp) != (plan.layout.tp, plan.layout.pp):
        follows["replicas"] = max(1, plan.cluster.num_devices // (layout.tp * layout.pp))
    if "layers_per_stage" not in named and layout.pp != plan.layout.pp:
        follows["layers_per_stage"] = None
    layout = layout.model_copy(update=follows)
    if (requests, layout) == (plan.requests, plan.layout):
        raise InputError("nothing is changed; give --set FIELD=VALUE with another value than the plan's")
    return ServingPlan(model=plan.model, cluster=plan.cluster, requests=requests, layout=layout)
