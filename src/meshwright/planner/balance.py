"""Layers per stage so that no stage sets a needlessly slow pace: the head is work that an even split forgets.

Source: Narayanan et al. 2019 (PipeDream) §3.1, for layers of equal cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy, inner_stages_first
from meshwright.cost.flops import stage_flops


def balance(num_layers: int, num_stages: int, head: float) -> tuple[int, ...]:
    """Counts that make the slowest stage fastest, each at least 1; `head` is the last stage's extra work, in layers.

    Each further layer goes where the result costs least; of equals to an inner stage.
    """
    order = inner_stages_first(num_stages)
    counts = [1] * num_stages
    extra = [0.0] * (num_stages - 1) + [head]
    for _ in range(num_layers - num_stages):
        counts[min(order, key=lambda stage: counts[stage] + extra[stage])] += 1
    return tuple(counts)


def head_in_layers(model: ModelSpec, job: Job, strategy: Strategy) -> float:
    """Training FLOPs of the head over those of one layer on a rank; recomputation repeats layers only."""
    alone = {"pp": 1, "layers_per_stage": None, "schedule": Strategy().schedule, "num_chunks": 1}
    whole = strategy.model_copy(update=alone)
    flops = stage_flops(model, job, whole, 0)
    per_layer = (
        flops.layers / model.num_layers * (4 if strategy.recompute == "full" and not strategy.recompute_layers else 3)
    )
    return 3 * flops.head / per_layer


def balanced(strategies: Iterable[Strategy], model: ModelSpec, job: Job) -> Iterator[Strategy]:
    """The pipelines among `strategies` with balanced instead of even parts, where that is another split."""
    for strategy in strategies:
        if strategy.pp == 1 or strategy.layers_per_stage is not None:
            continue
        counts = balance(model.num_layers, strategy.num_parts, head_in_layers(model, job, strategy))
        even = strategy.stage_layers(model.num_layers)[: strategy.num_parts]
        if counts != tuple(len(layers) for layers in even):
            yield strategy.model_copy(update={"layers_per_stage": counts})
