"""Layers per stage so that no stage sets a needlessly slow pace: the head is work that an even split forgets.

Source: Narayanan et al. 2019 (PipeDream) §3.1, for layers of equal cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.layouts import Context, Tensor
from meshwright.core.model import ModelSpec
from meshwright.core.program import COMPUTE_KINDS, Kind
from meshwright.core.strategy import Strategy, inner_stages_first
from meshwright.cost.flops import stage_flops


@dataclass(frozen=True, slots=True)
class Ends:
    """What the ends of the model take besides layers, in layers' time of a forward and a backward."""

    first: float
    """The embedding."""
    last: float
    """Final norm, head and loss."""


def measured_ends(durations_s: Mapping[tuple[Kind, int], float], strategy: Strategy, num_layers: int) -> Ends:
    """The ends of a model, from what actions took in a run.

    A layer takes what it takes in the inner stages, on average. Where there are two stages alone, the embedding counts
    as nothing, since one number cannot be told from the other.

    Args:
        durations_s: (kind, stage) → seconds of one action.
        strategy: of the run.

    Raises:
        InputError: a run of one stage.
    """
    num_parts, layers = strategy.num_parts, strategy.stage_layers(num_layers)
    if num_parts == 1:
        raise InputError(
            "a run whose model is one stage does not say what its ends take; measure one with pp=2 or, better, 3"
        )
    counts = [len(layers[part]) for part in range(num_parts)]
    taken_s = [0.0] * num_parts
    for (kind, stage), seconds in durations_s.items():
        if kind in COMPUTE_KINDS:
            taken_s[stage % num_parts] += seconds / strategy.pipeline_schedule.num_directions
    inner = range(1, num_parts - 1) if num_parts > 2 else range(1)
    layer_s = sum(taken_s[part] for part in inner) / sum(counts[part] for part in inner)
    first, last = (max(0.0, taken_s[part] / layer_s - counts[part]) for part in (0, -1))
    return Ends(first, last)


@lru_cache(maxsize=4096)
def balance(num_layers: int, num_stages: int, ends: Ends) -> tuple[int, ...]:
    """Counts that make the slowest stage fastest, each at least 1.

    Each further layer goes where the result costs least; of equals to an inner stage.
    """
    order = inner_stages_first(num_stages)
    counts = [1] * num_stages
    extra = [0.0] * num_stages
    extra[0] += ends.first
    extra[-1] += ends.last
    for _ in range(num_layers - num_stages):
        counts[min(order, key=lambda stage: counts[stage] + extra[stage])] += 1
    return tuple(counts)


def head_in_layers(model: ModelSpec, job: Job, strategy: Strategy) -> float:
    """Training FLOPs of the head over those of one layer on a rank; recomputation repeats layers only."""
    is_again = strategy.recompute == "full" and not strategy.recompute_layers
    return _head_in_layers(model, job, strategy.tp, strategy.tensor, strategy.context, is_again)


@lru_cache(maxsize=4096)
def _head_in_layers(model: ModelSpec, job: Job, tp: int, tensor: Tensor, context: Context, is_again: bool) -> float:
    """The same for all batches, pipelines and ranks of dp."""
    flops = stage_flops(model, job, Strategy(tp=tp, tensor=tensor, context=context), 0)
    return 3 * flops.head / (flops.layers / model.num_layers * (4 if is_again else 3))


def balanced_by(ends: Ends, strategy: Strategy, num_layers: int) -> Strategy:
    """The same strategy, a pipeline with parts that are balanced by these ends."""
    if strategy.pp == 1 or strategy.layers_per_stage is not None:
        return strategy
    return strategy.model_copy(update={"layers_per_stage": balance(num_layers, strategy.num_parts, ends)})


def balanced(strategies: Iterable[Strategy], model: ModelSpec, job: Job) -> Iterator[Strategy]:
    """The pipelines among `strategies` with balanced instead of even parts, where that is another split."""
    for strategy in strategies:
        if strategy.pp == 1 or strategy.layers_per_stage is not None:
            continue
        counts = balance(model.num_layers, strategy.num_parts, Ends(0.0, head_in_layers(model, job, strategy)))
        even = strategy.stage_layers(model.num_layers)[: strategy.num_parts]
        if counts != tuple(len(layers) for layers in even):
            yield strategy.model_copy(update={"layers_per_stage": counts})
