"""Seconds of training steps on this machine's ranks: for calibration, and to see how far forecasts are off."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch

from meshwright.comm.collectives import all_reduce, barrier
from meshwright.comm.mesh import Axis, Mesh
from meshwright.core.axes import DP, WORLD
from meshwright.core.batch import MicroBatch
from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.rules import violations
from meshwright.core.strategy import Strategy
from meshwright.models.build import build
from meshwright.rehearse.step_fit import TimedStep
from meshwright.run.engine import Engine, parallelize

LEARNING_RATE = 1e-4
WARM_UP = 2
CALIBRATION = (
    (2, 64, 512, 32, 1, 1),
    (8, 64, 512, 32, 1, 1),
    (2, 64, 512, 32, 1, 8),
    (2, 128, 1024, 64, 4, 1),
    (4, 128, 1024, 64, 2, 4),
    (2, 256, 2048, 128, 4, 1),
    (6, 256, 2048, 128, 2, 2),
    (2, 384, 2048, 128, 4, 1),
    (6, 384, 4096, 128, 2, 1),
    (2, 512, 1024, 256, 2, 1),
)
"""(layers, hidden size, vocabulary, tokens, sequences, micro-batches) of short steps that tell a rank's costs apart."""

DIVIDED = ((4, 128, 1024, 64, 4, 2), (2, 256, 2048, 128, 4, 1))
"""Likewise, of models that all ranks divide: in their layers they call each other, which replicas hardly do."""


def llama(num_layers: int, hidden_size: int, vocab_size: int, seq_length: int, name: str = "llama-like") -> ModelSpec:
    """A decoder of heads of 32 or 64."""
    head_dim = 64 if hidden_size >= 256 else 32
    heads = hidden_size // head_dim
    return ModelSpec(
        name=name, family="llama", vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers,
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, ffn_size=-(-hidden_size * 8 // 3 // 64) * 64,
        max_positions=seq_length, norm="rmsnorm", positions="rope", activation="silu", gated_mlp=True,
    )  # fmt: skip


def calibration_plans(cluster: ClusterSpec) -> tuple[Plan, ...]:
    """Small models: replicas over all ranks as dp, and, where so many ranks can divide them, layers over all ranks."""
    num_ranks = cluster.num_devices
    found = [_calibrating(cluster, {"dp": num_ranks}, *sizes) for sizes in CALIBRATION]
    if num_ranks > 1:
        ways = {"tp": num_ranks}, {"tp": num_ranks, "sequence": "megatron"}, {"context": {"degree": num_ranks}}
        found += [_calibrating(cluster, way, *sizes) for way in ways for sizes in DIVIDED]
    return tuple(plan for plan in found if plan is not None)


def _calibrating(
    cluster: ClusterSpec, choice: Mapping[str, Any], layers: int, hidden: int, vocab: int, tokens: int, b: int, m: int
) -> Plan | None:
    """None where the choice does not go with the model's sizes."""
    strategy = Strategy.model_validate({**choice, "micro_batch_size": b, "num_micro_batches": m})
    job = Job(seq_length=tokens, global_batch_size=strategy.dp * b * m)
    model = llama(layers, hidden, vocab, tokens)
    if violations(strategy, model, cluster, job):
        return None
    return Plan(model=model, cluster=cluster, job=job, strategy=strategy)


def time_steps(plans: Sequence[Plan], turns: int, told: Callable[[str], None]) -> tuple[TimedStep, ...]:
    """Median seconds of a step of each plan; plans take turns, so that what else the machine does meets them all. The
    order of a turn is drawn anew: no plan always follows the same one, whose memory is in the way.

    Called by all ranks; memory for all of the plans' models must be there at once.

    Args:
        turns: measured steps of each plan.
        told: gets what is being measured, in words.
    """
    engines = [parallelize(build(plan.model, "meta"), plan) for plan in plans]
    world = Mesh.create({DP: plans[0].strategy.world_size})[WORLD]
    found: list[list[float]] = [[] for _ in plans]
    for turn in range(WARM_UP + turns):
        told(f"training steps, turn {turn + 1} of {WARM_UP + turns}")
        for index in Random(turn).sample(range(len(plans)), len(plans)):
            seconds = _one_step(engines[index], _batch(plans[index], turn, engines[index]), world)
            if turn >= WARM_UP:
                found[index].append(seconds)
    return tuple(TimedStep(plan, statistics.median(each), tuple(each)) for plan, each in zip(plans, found, strict=True))


def _batch(plan: Plan, turn: int, engine: Engine) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(turn)
    strategy, tokens = plan.strategy, plan.job.seq_length
    rows = torch.randint(
        plan.model.vocab_size, (strategy.num_micro_batches, strategy.micro_batch_size, tokens + 1), generator=generator
    ).to(engine.parallel.mesh.device)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def _one_step(engine: Engine, batch: Sequence[MicroBatch], world: Axis) -> float:
    """Mean over the ranks, which begin together."""
    barrier(world)
    began_s = time.perf_counter()
    engine.step(batch, LEARNING_RATE)
    barrier(world)
    total = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64, device=engine.parallel.mesh.device)
    return float(all_reduce(total, world)) / world.size
