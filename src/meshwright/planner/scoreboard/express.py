"""From a published row to what the planner is asked: model, cluster, job, and the strategies that the row may mean.

What a source leaves open (micro-batch size, stages per rank, recompute) is not guessed: every legal value is a
candidate, and the planner's own choice among them is what is judged, as the authors too had tuned it. What the library
cannot express is said, and counted, never approximated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, get_args

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import UnsupportedError
from meshwright.core.job import Job
from meshwright.core.latent import LatentAttention
from meshwright.core.legal import divisors
from meshwright.core.model import ModelSpec
from meshwright.core.profile import Stack
from meshwright.core.rules import violations
from meshwright.core.sources import load_cluster, network_reach, stack_of
from meshwright.core.strategy import Strategy
from meshwright.planner.scoreboard.published import PublishedRow

DEVICES = (
    ("a100-sxm4-40gb", "a100-40gb"),
    ("a100-40gb", "a100-40gb"),
    ("a100", "a100-80gb"),
    ("h100-sxm5-80gb", "h100"),
    ("h100-sxm-9", "h100-96gb"),
    ("h200", "h200"),
    ("b200-180gb", "b200"),
    ("gb200", "gb200"),
    ("gb300", "gb300"),
    ("b300", "b300"),
    ("v100-sxm2-16gb", "v100-16gb"),
    ("v100-32gb", "v100-32gb"),
)
"""What a row calls its device, in lower case → its name in the catalogue; the first that the row's begins with."""

DOMAINS = {"gb200": 64, "gb300": 64}
"""Devices that reach each other as within a node, where that is more than a tray: of an NVLink domain of 72 whole
powers of two are used."""
MAX_OPEN_MICRO_BATCH = 8
"""Largest micro-batch that is tried where the source states none."""
MAX_OPEN_CHUNKS = 8
"""Most stages per rank that are tried likewise."""
KINDS_OF_RECOMPUTE: tuple[str, ...] = get_args(Strategy.model_fields["recompute"].annotation)
"""What strategies have; all are tried where a source states none."""
LATENT_HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Of latent attention, where a source prints its ranks alone: DeepSeek-AI 2024 (V2, V3); Kimi K2 has the same."""
PADDED_TO = 128
"""Rows of the vocabulary per tensor-parallel rank are padded to a multiple of this (Shoeybi et al. 2019, §5)."""

_LINK_SPEED = re.compile(r"(?:(?P<times>\d+)\s*x\s)?(?:[^\d(;,]*?\s)??(?P<gbit>\d+(?:\.\d+)?)\s*[gG]b(?:it)?/s")
_PER_DEVICE = re.compile(r"per (?:GPU|device)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Expressed:
    """What the planner is asked for one row."""

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    stack: Stack
    candidates: tuple[Strategy, ...]
    """Legal, one or more: several where the source leaves a choice open."""


def express(row: PublishedRow) -> Expressed:
    """Raises UnsupportedError with the reason in a few words, or InputError for a value that cannot be."""
    if row.layout_check != "ok":
        raise UnsupportedError("degrees do not multiply out")
    stack, cluster, job = stack_of(row.words), _cluster(row), _job(row)
    model = _model(row, stack)
    open_choices = tuple(_candidates(row, model, stack))
    broken = [violations(s, model, cluster, job) for s in open_choices]
    legal = tuple(s for s, rules in zip(open_choices, broken, strict=True) if not rules)
    if not legal:
        raise UnsupportedError(f"rule {broken[0][0].rule.id}" if broken else "no strategy")
    return Expressed(model, cluster, job, stack, legal)


def _whole(row: PublishedRow, part: str, name: str, default: int | None = None) -> int:
    found = getattr(row, part).get(name, default)
    found = default if found is None else found
    if not isinstance(found, int) or found < 1:
        raise UnsupportedError(f"{name} not stated")
    return found


def _model(row: PublishedRow, stack: Stack) -> ModelSpec:
    """The decoder of the row."""
    m = row.model
    experts = _experts(row)
    if m.get("gated_mlp") is None and not experts:
        raise UnsupportedError("model shape not stated")
    if "fp4" in str(m.get("dtype")).lower():
        raise UnsupportedError("4-bit products")
    hidden, heads, tp = _whole(row, "model", "hidden"), _whole(row, "model", "heads"), _whole(row, "strategy", "tp", 1)
    if hidden < heads:
        raise UnsupportedError(f"{heads} heads of a hidden size of {hidden}")
    latent = _latent(row)
    gated, positions = m.get("gated_mlp") is not False, str(m.get("pos"))
    multiple = PADDED_TO * (1 if stack.sharded_units else tp)
    return ModelSpec(
        name=str(m.get("name", "published")),
        family="llama" if gated else "gpt2",
        vocab_size=-(-_whole(row, "model", "vocab") // multiple) * multiple,
        hidden_size=hidden,
        num_layers=_whole(row, "model", "layers"),
        num_heads=heads,
        num_kv_heads=_whole(row, "model", "kv_heads", heads),
        latent=latent,
        head_dim=latent.head_dim if latent else m.get("head_dim") or _head_dim(hidden, heads),
        ffn_size=_whole(row, "model", "ffn_hidden", 4 * hidden),
        max_positions=_whole(row, "model", "seq_len"),
        norm="rmsnorm" if gated else "layernorm",
        positions="rope" if positions == "rope" or gated else "learned",
        activation="silu" if gated else "gelu",
        gated_mlp=gated,
        qkv_bias=not gated,
        out_bias=not gated,
        mlp_bias=not gated and not experts,
        **experts,
        tied_embeddings=bool(m.get("tied_embeddings")) and not stack.unties_embeddings,
    )


def _experts(row: PublishedRow) -> dict[str, Any]:
    """A mixture's own fields; nothing for a dense model."""
    m = row.model
    if not m.get("experts"):
        return {}
    if row.strategy.get("ep") is None:
        raise UnsupportedError("how experts are divided is not stated")
    width = _whole(row, "model", "moe_ffn_hidden", m.get("ffn_hidden"))
    found: dict[str, Any] = {"num_experts": _whole(row, "model", "experts"), "expert_ffn_size": width}
    found["experts_per_token"] = _whole(row, "model", "top_k")
    if m.get("shared_experts"):
        found["shared_ffn_size"] = width * int(m["shared_experts"])
    if m.get("dense_layers"):
        found["dense_layers"] = tuple(range(int(m["dense_layers"])))
    if (m.get("moe_every") or 1) > 1:
        every = int(m["moe_every"])
        found["dense_layers"] = tuple(i for i in range(_whole(row, "model", "layers")) if i % every != every - 1)
    return found


def _latent(row: PublishedRow) -> LatentAttention | None:
    """Latent attention, with the heads of the only models whose latents are published beside runs."""
    m = row.model
    if not m.get("kv_lora_rank") and "mla" not in str(m.get("attention")).lower():
        return None
    sizes = {name: m.get(name) or size for name, size in LATENT_HEADS.items()}
    return LatentAttention(q_lora_rank=m.get("q_lora_rank"), kv_lora_rank=_whole(row, "model", "kv_lora_rank"), **sizes)


def _head_dim(hidden: int, heads: int) -> int:
    """Hidden size over heads. Where that leaves a rest, the heads that are printed cannot have run; the nearest whole
    fragment of tensor cores is taken."""
    return hidden // heads if hidden % heads == 0 else max(8, round(hidden / heads / 8) * 8)


def _cluster(row: PublishedRow) -> ClusterSpec:
    name = str(row.hardware.get("gpu") or "").lower()
    device = next((known for printed, known in DEVICES if name.startswith(printed)), None)
    if device is None:
        raise UnsupportedError(f"device {row.hardware.get('gpu') or 'not stated'}")
    num_devices = _whole(row, "hardware", "gpus")
    per_node = min(num_devices, _whole(row, "hardware", "gpus_per_node", 8))
    if num_devices % per_node:
        raise UnsupportedError(f"{num_devices} devices on nodes of {per_node}")
    text = str(row.hardware.get("inter_node") or "")
    domain = min(num_devices, DOMAINS.get(device, per_node))
    if num_devices % domain:
        raise UnsupportedError(f"{num_devices} devices in domains of {domain}")
    return _network_of(device, num_devices // domain, domain, text, link_bytes_per_s(text, per_node))


@lru_cache(maxsize=256)
def _network_of(device: str, num_nodes: int, per_node: int, text: str, bytes_per_s: float | None) -> ClusterSpec:
    """The cluster, with the network that the source describes, as in `4x Omni-Path 100 Gb/s per node`."""
    cluster = load_cluster(f"{num_nodes}x{per_node}x{device}")
    if bytes_per_s is None:
        return cluster
    reach = network_reach(text)
    change = {"bandwidth_bytes_per_s": reach.reached * bytes_per_s, "collective_share": reach.collective_share}
    link = cluster.inter_link.model_copy(update={"name": text, **change})
    return cluster.model_copy(update={"inter_link": link})


def link_bytes_per_s(text: str, devices_per_node: int) -> float | None:
    """Bytes per second and device of a network in words; None where they state no speed.

    `8x HDR InfiniBand 200 Gb/s per node` with 8 devices is 25e9; `25 Gb/s Ethernet per node` 0.39e9.
    """
    if "not stated" in text or (found := _LINK_SPEED.search(text)) is None:
        return None
    bytes_per_s = float(found["gbit"]) * 1e9 / 8 * int(found["times"] or 1)
    is_each = found["times"] is None and _PER_DEVICE.search(text[: text.find("(")] if "(" in text else text)
    return bytes_per_s if is_each else bytes_per_s / devices_per_node


def _job(row: PublishedRow) -> Job:
    return Job(seq_length=_whole(row, "model", "seq_len"), global_batch_size=_whole(row, "strategy", "global_batch"))


def _candidates(row: PublishedRow, model: ModelSpec, stack: Stack) -> Iterator[Strategy]:
    """Every strategy that the row may mean."""
    s = row.strategy
    _refuse_unknown(row)
    degrees = {axis: _whole(row, "strategy", axis) for axis in ("dp", "tp", "pp")}
    per_rank, rest = divmod(_whole(row, "strategy", "global_batch"), degrees["dp"])
    if rest:
        raise UnsupportedError("batch not a multiple of dp")
    sizes = [s["micro_batch"]] if s.get("micro_batch") else [b for b in divisors(per_rank) if b <= MAX_OPEN_MICRO_BATCH]
    fixed = {**degrees, **_shared(row), "precision": _precision(row, stack)}
    fixed |= _every_other_layer(row, model)
    ways = product(sizes, _chunks(row, model), _recomputes(row, stack), _sequences(row), _zeros(row))
    for size, chunks, recompute, sequence, zero in ways:
        if per_rank % size:
            raise UnsupportedError(f"batch not a multiple of dp × {size}")
        schedule = {"schedule": "interleaved-1f1b", "num_chunks": chunks} if chunks > 1 else {}
        values: dict[str, Any] = {**fixed, **schedule, "micro_batch_size": size, "num_micro_batches": per_rank // size}
        yield Strategy.model_validate({**values, "recompute": recompute, "sequence": sequence, "zero": zero})


def _refuse_unknown(row: PublishedRow) -> None:
    s = row.strategy
    if row.model.get("task") == "LoRA":
        raise UnsupportedError("adapters alone are trained")
    if "offload" in str(s.get("sharding")).lower():
        raise UnsupportedError("offload of another library")


def _zeros(row: PublishedRow) -> tuple[int, ...]:
    """ZeRO stage: as stated, or none and that of a distributed optimizer."""
    stated = row.strategy.get("zero_stage")
    if stated is not None:
        return (int(stated),)
    return (0, 1) if _whole(row, "strategy", "dp") > 1 else (0,)


def _sequences(row: PublishedRow) -> tuple[str, ...]:
    """Sequence parallelism: as stated, or with and without."""
    stated = row.strategy.get("sequence_parallel")
    if (row.strategy.get("tp") or 1) == 1 or stated is False:
        return ("none",)
    return ("megatron",) if stated else ("none", "megatron")


def _shared(row: PublishedRow) -> dict[str, Any]:
    """Context and expert parallelism."""
    s = row.strategy
    found: dict[str, Any] = {}
    if row.model.get("experts") or (s.get("ep") or 1) > 1:
        found["expert"] = {"degree": s.get("ep") or 1, "tensor": s.get("etp")}
    if (s.get("cp") or 1) > 1:
        found["context"] = {"kind": "ring", "degree": s["cp"], "balance": "zigzag"}
    return found


def _precision(row: PublishedRow, stack: Stack) -> str:
    dtype = str(row.model.get("dtype")).lower()
    if "fp8" in dtype or "float8" in dtype:
        return "bf16-fp8"
    name = "fp16" if "fp16" in dtype else "fp32" if "fp32" in dtype and "bf16" not in dtype else "bf16"
    return stack.precisions.get(name, name)


def _chunks(row: PublishedRow, model: ModelSpec) -> tuple[int, ...]:
    """Stages per rank: as stated; where the source speaks of interleaving but not of how much, what divides evenly."""
    stated, pp = row.strategy.get("vpp"), _whole(row, "strategy", "pp")
    if pp == 1 or (stated is None and "interleaved" not in str(row.strategy.get("schedule")).lower()):
        return (1,) if stated is None or pp == 1 else (int(stated),)
    if stated is not None:
        return (int(stated),)
    even = [v for v in range(2, MAX_OPEN_CHUNKS + 1) if model.num_layers % (pp * v) == 0]
    return tuple(even) or (1,)


def _every_other_layer(row: PublishedRow, model: ModelSpec) -> dict[str, Any]:
    """`selective layer` is full recomputation of every other layer."""
    per_stage = model.num_layers // _whole(row, "strategy", "pp")
    return {"recompute_layers": max(1, per_stage // 2)} if row.strategy.get("recompute") == "selective layer" else {}


def _recomputes(row: PublishedRow, stack: Stack) -> tuple[str, ...]:
    stated = row.strategy.get("recompute") or stack.recompute
    if stated == "selective layer":
        return ("full",)
    if stated is None:
        return KINDS_OF_RECOMPUTE
    kind = str(stated).split()[0]
    if kind not in KINDS_OF_RECOMPUTE:
        raise UnsupportedError(f"{kind} recompute")
    return (kind,)
