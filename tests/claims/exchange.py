"""Claims about batches and about what is sent: 6 to 9, 27, 28, 38, 41 to 43, 46 to 49."""

from __future__ import annotations

from meshwright.core.job import Job
from meshwright.core.measures import Traffic, wire_bytes
from meshwright.core.rules import violations
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.cost.traffic import micro_batch_traffic, step_traffic
from meshwright.cost.zero import STAGES, zero_traffic
from meshwright.planner.enumerate import strategies
from tests.claims.claim import Answer, Claim
from tests.claims.states import FIRST, SIXTEEN, N

LLAMA = load_model("llama-2-70b")
JOB = Job(seq_length=4096, global_batch_size=64)
S = 2**30


def local_batch() -> Answer:
    """The rules that a batch of 64 breaks over 8 and over 6 ranks."""

    def verdict(p: int) -> str:
        split = Strategy(dp=p, micro_batch_size=64 // p)
        return ", ".join(v.rule.id for v in violations(split, LLAMA, load_cluster(f"{p}xh100"), JOB)) or "legal"

    return {f"64 over {p}": verdict(p) for p in (8, 6)}


def sent_per_byte(primitive: str, size: int) -> float:
    return wire_bytes(primitive, S, size) / S


def all_reduce_volume(measured: Answer) -> Answer:
    forecast = {f"p={p}": sent_per_byte("all_reduce", p) for p in (2, 4, 8, 64)}
    return {**forecast, "measured, p=4": measured["all_reduce sent / S"]}


def zero_3() -> Answer:
    """In units of the parameters' bytes."""
    rows = zero_traffic(N, 64, 3, SIXTEEN).rows
    ours = {f"{primitive}, {phase}": row.wire_bytes / (2 * N) for (primitive, _, phase), row in rows.items()}
    kept = zero_traffic(N, 64, 3, SIXTEEN, gather_again=False)
    return {**ours, "total": sum(ours.values()), "total if kept": kept.wire_bytes / (2 * N)}


def against_dp() -> Answer:
    sent = [zero_traffic(N, 64, stage, SIXTEEN).wire_bytes for stage in STAGES]
    return {f"ZeRO-{stage} / DP": sent[stage] / sent[0] for stage in STAGES[1:]}


def with_pipeline() -> Answer:
    """Gradient bytes per step with 16 micro-batches, against one reduction."""

    def gradients(stage: int) -> int:
        sent = zero_traffic(N // 8, 8, stage, SIXTEEN, num_micro_batches=16).rows
        return sum(row.wire_bytes for (_, _, phase), row in sent.items() if phase == "gradients")

    legal = strategies(LLAMA, load_cluster("8x8xh100"), JOB, {"dp": 8, "tp": 4, "pp": 2}).legal
    return {
        "ZeRO-2 / ZeRO-1": gradients(2) / gradients(1),
        "offered unasked": tuple(sorted({strategy.zero for strategy in legal})),
    }


def middle_stage(recompute: str = "none", num_micro_batches: int = 1) -> Traffic:
    """What a stage without embedding and head sends for its 20 layers."""
    strategy = Strategy.model_validate(
        {"tp": 8, "pp": 4, "precision": "bf16", "recompute": recompute, "num_micro_batches": num_micro_batches}
    )
    return micro_batch_traffic(LLAMA, JOB, strategy, 1)


def tensor_traffic() -> Answer:
    rows = middle_stage("full").rows
    calls = {phase: rows["all_reduce", "tp", phase].calls // 20 for phase in ("forward", "backward", "recompute")}
    per_layer = sum(row.wire_bytes for (_, axis, _), row in middle_stage().rows.items() if axis == "tp") / 20
    return {**calls, "MB per layer": per_layer / 1e6}


def pipeline_traffic() -> Answer:
    rows = middle_stage(num_micro_batches=16).rows
    return {
        f"{phase}: calls, MB each": (rows["send", "pp", phase].calls, rows["send", "pp", phase].wire_bytes / 16 / 1e6)
        for phase in ("forward", "backward")
    }


def zero_primitives() -> Answer:
    def sent(zero: int) -> dict[str, tuple[str, int]]:
        strategy = Strategy.model_validate({"dp": 8, "tp": 8, "zero": zero, "precision": "bf16-16"})
        rows = step_traffic(LLAMA, strategy, FIRST).rows
        phases = ("gradients", "parameters")
        return {f: (p, row.wire_bytes) for (p, _, f), row in rows.items() if f in phases}

    sharded, replicated = sent(1), sent(0)
    return {
        "gradients": sharded["gradients"][0],
        "parameters": sharded["parameters"][0],
        "bytes / DP": sum(num for _, num in sharded.values()) / sum(num for _, num in replicated.values()),
    }


CLAIMS = [
    Claim(
        6, "each rank takes B/p sequences", ("core.rules.violations",), lambda _: local_batch(),
        {"64 over 8": "legal", "64 over 6": "batch"},
        "holds where D × micro-batches × their size is B; another batch is refused, by rule `batch`",
    ),
    Claim(
        7, "g = (1/p)·Σ gᵢ", ("parallelize",),
        lambda measured: {name: same for name, same in measured.items() if " tokens: " in name},
        {
            "equal tokens: mean of means": True, "equal tokens: one process": True,
            "unequal tokens: mean of means": False, "unequal tokens: one process": True,
        },
        "exact only where all ranks count equally many tokens; ours is the gradient of the global mean, always",
        on_ranks=True,
    ),
    Claim(
        8, "a ring all-reduce sends 2(p−1)/p·S per rank", ("core.measures.wire_bytes", "comm.ledger.Ledger"),
        all_reduce_volume,
        {"p=2": 1.0, "p=4": 1.5, "p=8": 1.75, "p=64": 1.96875, "measured, p=4": 1.5},
        "holds for bytes sent; as many are received",
        on_ranks=True,
    ),
    Claim(
        9, "which is about 2S for large p", ("core.measures.wire_bytes",),
        lambda _: {f"p={p:,}": sent_per_byte("all_reduce", p) for p in (1024, 2**20)},
        {"p=1,024": 2.0, "p=1,048,576": 2.0},
        "holds", tolerance=1e-3,
    ),
    Claim(
        27, "ZeRO-3 gathers parameters before forward and scatters gradients in backward",
        ("cost.zero.zero_traffic",), lambda _: zero_3(),
        {
            "reduce_scatter, gradients": 0.984375, "all_gather, forward": 0.984375, "all_gather, backward": 0.984375,
            "total": 2.953125, "total if kept": 1.96875,
        },
        "**omits the second gather**, for backward, unless parameters are kept in between",
    ),
    Claim(
        28, "ZeRO-3 communicates more", ("cost.zero.zero_traffic",), lambda _: against_dp(),
        {"ZeRO-1 / DP": 1.0, "ZeRO-2 / DP": 1.0, "ZeRO-3 / DP": 1.5}, "1.5 times data parallel; stages 1 and 2 no more",
    ),
    Claim(
        38, "GPUs = D·T·P; 8·4·2 = 64", ("core.strategy.Strategy", "core.sources.load_cluster"),
        lambda _: {
            "ranks": Strategy(dp=8, tp=4, pp=2).world_size, "8 nodes of 8": load_cluster("8x8xh100").num_devices,
        },
        {"ranks": 64, "8 nodes of 8": 64}, "holds; another product is refused, by rule `world`",
    ),
    Claim(
        41, "all-reduce gives every rank Σ xⱼ", ("comm.collectives.all_reduce",),
        lambda measured: {"on 4 ranks": measured["all_reduce is the sum"]}, {"on 4 ranks": True}, "holds",
        on_ranks=True,
    ),
    Claim(
        42, "reduce-scatter is all-reduce, then a split", ("comm.collectives.reduce_scatter", "comm.ledger.Ledger"),
        lambda measured: {
            "same values": measured["reduce_scatter is the own block of all_reduce"],
            "sent / all-reduce": measured["reduce_scatter sent / S"] / measured["all_reduce sent / S"],
        },
        {"same values": True, "sent / all-reduce": 0.5}, "in its values only: it costs half",
        on_ranks=True,
    ),
    Claim(
        43, "in all-to-all each rank sends other data to every rank",
        ("comm.collectives.all_to_all", "comm.ledger.Ledger"),
        lambda measured: {
            "on 4 ranks": measured["all_to_all brings each peer's own block"],
            "sent / S": measured["all_to_all sent / S"],
            "all-reduce sends / S": measured["all_reduce sent / S"],
        },
        {"on 4 ranks": True, "sent / S": 0.75, "all-reduce sends / S": 1.5},
        "holds; it sends less than all-reduce: what hurts is topology and imbalance",
        on_ranks=True,
    ),
    Claim(
        46, "with P=2, use ZeRO-1 or ZeRO-2", ("cost.zero.zero_traffic", "core.strategy.Strategy"),
        lambda _: with_pipeline(), {"ZeRO-2 / ZeRO-1": 16.0, "offered unasked": (0, 1)},
        "ZeRO-1: beside a pipeline ZeRO-2 reduces gradients once per micro-batch (here 16), or keeps them whole and "
        "is ZeRO-1. ZeRO-2 and 3 run there, but are planned only if asked for",
    ),
    Claim(
        47, "tensor parallelism sends all-reduces or all-gathers", ("cost.traffic.micro_batch_traffic",),
        lambda _: tensor_traffic(), {"forward": 2, "backward": 2, "recompute": 2, "MB per layer": 469.762048},
        "all-reduces: 4 per layer and micro-batch, 6 with recomputation, 2(t−1)/t·β·b·s·h bytes each; all-gathers "
        "belong to sequence parallelism",
    ),
    Claim(
        48, "pipeline parallelism sends activations forward and gradients back", ("cost.traffic.micro_batch_traffic",),
        lambda _: pipeline_traffic(),
        {"forward: calls, MB each": (16, 67.108864), "backward: calls, MB each": (16, 67.108864)},
        "holds: β·b·s·h each way per micro-batch and boundary",
    ),
    Claim(
        49, "ZeRO gathers parameters and scatters gradients", ("cost.traffic.step_traffic",),
        lambda _: zero_primitives(),
        {"gradients": "reduce_scatter", "parameters": "all_gather", "bytes / DP": 1.0}, "holds",
    ),
]  # fmt: skip
