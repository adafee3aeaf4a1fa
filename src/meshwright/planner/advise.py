"""The rules of thumb of the field as one table: when each holds, what it says, who says so.

`facts` turns model, cluster and job into the few answers that the rules ask for; `advise_on` reads the table.
Advice never refuses: what is legal stands in :mod:`meshwright.core.rules`, and prices decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from meshwright.core.axes import MESH_ORDER
from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.serving import Layout, Requests
from meshwright.core.strategy import Strategy
from meshwright.cost.memory import memory
from meshwright.cost.serving_memory import serving_memory
from meshwright.planner.enumerate import default_precision

FAST_INTRA_BYTES_PER_S = 100e9
"""Per direction and device: above PCIe 5.0 ×16 (64 GB/s), below the first NVLink nodes (150 GB/s)."""
FAST_INTER_BYTES_PER_S = 12.5e9
"""Per device: 100 Gbit/s."""
MANY_LAYERS = 16
HUGE_PARAMETERS = 10_000_000_000
LONG_CONTEXT_SHARE = 0.5
"""Activations of one sequence over the usable memory of a device, above which the context counts as long."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the rules may ask."""

    num_devices: int
    num_nodes: int
    fits_one_device: bool
    """States and activations of one sequence, by the cluster's usual byte recipe."""
    largest_layer_fits: bool
    """States of the largest layer."""
    fits_one_node: bool
    """States divided over the devices of a node."""
    fast_intra: bool
    fast_inter: bool
    many_layers: bool
    long_context: bool
    has_experts: bool
    is_huge: bool
    is_training: bool = True


@dataclass(frozen=True, slots=True)
class AdviceRule:
    """One row."""

    id: str
    holds: Callable[[Facts], bool]
    advice: str
    source: str


_SCALABILITY = "Hugging Face Transformers, Efficient training on multiple GPUs, scalability strategy"
_PTD_P = "Narayanan et al. 2021, §3"


def _one_node(f: Facts) -> bool:
    return f.num_nodes == 1 and f.num_devices > 1


ADVICE_RULES = (
    AdviceRule(
        "S1", lambda f: f.num_devices == 1 and f.fits_one_device, "one device and the model fits: plain training",
        _SCALABILITY,
    ),
    AdviceRule(
        "S2", lambda f: f.num_devices == 1 and not f.fits_one_device,
        "one device and the model does not fit: ZeRO with offload to the CPU, then to NVMe",
        f"{_SCALABILITY}; Ren et al. 2021",
    ),
    AdviceRule(
        "S3", lambda f: f.num_devices == 1 and not f.fits_one_device and not f.largest_layer_fits,
        "not even one layer fits: memory-centric tiling besides offload", "Rajbhandari et al. 2021, §5",
    ),
    AdviceRule(
        "N1", lambda f: _one_node(f) and f.fits_one_device,
        "one node and the model fits a device: replicated data parallel, or ZeRO, which may or may not be faster",
        _SCALABILITY,
    ),
    AdviceRule(
        "N2", lambda f: _one_node(f) and not f.fits_one_device and f.fast_intra,
        "one node with fast links: pipeline, ZeRO and tensor parallel are about equal, so the prices decide",
        _SCALABILITY,
    ),
    AdviceRule(
        "N3", lambda f: _one_node(f) and not f.fits_one_device and not f.fast_intra,
        "one node without fast links: pipeline before tensor parallel or ZeRO", _SCALABILITY,
    ),
    AdviceRule(
        "N4", lambda f: f.num_devices > 1, "tensor parallel size at most the devices of a node",
        f"{_PTD_P}, takeaway 1; {_SCALABILITY}",
    ),
    AdviceRule(
        "M1", lambda f: f.num_nodes > 1 and f.fast_inter,
        "several nodes, fast network: ZeRO (no change of the model), or pipeline + tensor + data (less communication)",
        _SCALABILITY,
    ),
    AdviceRule(
        "M2", lambda f: f.num_nodes > 1 and not f.fast_inter and not f.fits_one_node,
        "several nodes, slow network and short memory: data + pipeline + tensor parallel with ZeRO-1", _SCALABILITY,
    ),
    AdviceRule(
        "G1", lambda f: f.num_devices > 1 and f.fits_one_device, "the model fits one device: data parallel first",
        "Li et al. 2020",
    ),
    AdviceRule(
        "G2", lambda f: not f.fits_one_device and not f.largest_layer_fits,
        "one layer is too large for a device: tensor parallel", "Shoeybi et al. 2019, §3",
    ),
    AdviceRule(
        "G3", lambda f: f.num_devices > 1 and not f.fits_one_device and f.many_layers,
        "the model does not fit and has many layers: pipeline", "Huang et al. 2019, §2",
    ),
    AdviceRule(
        "G4", lambda f: f.is_training,
        "count parameters + gradients + optimizer + activations; ZeRO and recomputation where they do not fit",
        "Rajbhandari et al. 2020, §3",
    ),
    AdviceRule(
        "G5", lambda f: not f.is_training,
        "count parameters + key/value cache + buffers; tensor parallel and batching against latency",
        "Kwon et al. 2023, §3; Pope et al. 2022",
    ),
    AdviceRule(
        "G6", lambda f: f.num_nodes > 1,
        "tensor parallel inside a node, pipeline may cross nodes, data parallel over nodes", f"{_PTD_P}.2",
    ),
    AdviceRule(
        "G7", lambda f: f.long_context,
        "activations of one sequence fill a device: sequence or context parallel",
        "Korthikanti et al. 2022; Liu et al. 2023",
    ),
    AdviceRule(
        "G8", lambda f: f.has_experts, "mixture of experts: expert parallel", "Lepikhin et al. 2020",
    ),
    AdviceRule(
        "P1", lambda f: f.is_huge, "a very large model: bf16 before fp16, which needs loss scaling",
        "Scao et al. 2022 (BLOOM), §3; Zhang et al. 2022 (OPT), §2",
    ),
)  # fmt: skip


def facts(model: ModelSpec, cluster: ClusterSpec, job: Job) -> Facts:
    """Answers for a training job, by the byte recipe that the cluster would train with."""
    alone = Strategy(precision=default_precision(cluster))
    at = dict.fromkeys(MESH_ORDER, 0)
    one = memory(model, job.model_copy(update={"global_batch_size": 1}), alone, at)
    usable = cluster.usable_memory_bytes
    return Facts(
        num_devices=cluster.num_devices,
        num_nodes=cluster.num_nodes,
        fits_one_device=one.total_bytes <= usable,
        largest_layer_fits=_largest_layer(model) * alone.recipe.adamw_total_bytes <= usable,
        fits_one_node=one.states_bytes <= usable * cluster.devices_per_node,
        fast_intra=cluster.intra_link.bandwidth_bytes_per_s >= FAST_INTRA_BYTES_PER_S,
        fast_inter=cluster.inter_link.bandwidth_bytes_per_s >= FAST_INTER_BYTES_PER_S,
        many_layers=model.num_layers >= MANY_LAYERS,
        long_context=one.activations_bytes > LONG_CONTEXT_SHARE * usable,
        has_experts=model.num_experts > 0,
        is_huge=model.num_parameters >= HUGE_PARAMETERS,
    )


OF_SERVING = ("N4", "G1", "G2", "G3", "G5", "G6", "G8")
"""Rules that speak of serving too: replicas are its data parallelism."""


def serving_facts(model: ModelSpec, cluster: ClusterSpec, requests: Requests) -> Facts:
    """Answers for a server: weights, a step and the key/value cache of one request, in the cluster's usual dtype."""
    precision = default_precision(cluster)
    layout = Layout(precision=precision)
    held = serving_memory(model, layout)
    one = held.fixed_bytes + requests.length * held.token_bytes
    usable = cluster.usable_memory_bytes
    return Facts(
        num_devices=cluster.num_devices,
        num_nodes=cluster.num_nodes,
        fits_one_device=one <= usable,
        largest_layer_fits=_largest_layer(model) * layout.replica.recipe.parameter_bytes <= usable,
        fits_one_node=one <= usable * cluster.devices_per_node,
        fast_intra=cluster.intra_link.bandwidth_bytes_per_s >= FAST_INTRA_BYTES_PER_S,
        fast_inter=cluster.inter_link.bandwidth_bytes_per_s >= FAST_INTER_BYTES_PER_S,
        many_layers=model.num_layers >= MANY_LAYERS,
        long_context=False,
        has_experts=model.num_experts > 0,
        is_huge=model.num_parameters >= HUGE_PARAMETERS,
        is_training=False,
    )


def advise_serving(model: ModelSpec, cluster: ClusterSpec, requests: Requests) -> list[tuple[AdviceRule, bool]]:
    """Each rule that speaks of serving, and whether it holds, in table order."""
    known = serving_facts(model, cluster, requests)
    return [(rule, rule.holds(known)) for rule in ADVICE_RULES if rule.id in OF_SERVING]


def _largest_layer(model: ModelSpec) -> int:
    """Parameters of the largest layer; embedding and head count as layers of their own."""
    sizes: dict[object, int] = {}
    for param in model.parameters():
        unit = param.name if param.layer is None else param.layer
        sizes[unit] = sizes.get(unit, 0) + param.numel
    return max(sizes.values())


def advise_on(known: Facts) -> list[AdviceRule]:
    """The rules that hold, in table order."""
    return [rule for rule in ADVICE_RULES if rule.holds(known)]


def advise(model: ModelSpec, cluster: ClusterSpec, job: Job) -> list[tuple[str, str]]:
    """(id, advice) of every rule that holds."""
    return [(rule.id, rule.advice) for rule in advise_on(facts(model, cluster, job))]


def decision_table(model: ModelSpec, cluster: ClusterSpec, job: Job) -> list[tuple[str, bool, str, str]]:
    """(id, whether it holds, advice, source) of every rule, and first the facts that decide, as rows without source."""
    known = facts(model, cluster, job)
    asked = [
        (field.name.removeprefix("is_").replace("_", " "), getattr(known, field.name))
        for field in fields(known)
        if field.name != "is_training"
    ]
    answers = [(f"{name}: {value}" if type(value) is int else name, bool(value), "", "") for name, value in asked]
    return [*answers, *((rule.id, rule.holds(known), rule.advice, rule.source) for rule in ADVICE_RULES)]
