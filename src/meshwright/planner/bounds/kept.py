"""Bytes that micro-batches keep from forward to backward, on top of what ranks hold all through a step.

    one rank       what the price itself counts: neither cut nor schedule is open
    mean rank      one micro-batch of each of its stages: all of one are behind when the last stage's backward begins
    a cut's rank   as many micro-batches as the schedule makes it hold, each at least of its smallest stage

In a pipeline a layer counts as what one of its kind keeps, by the price's own formula; what backward adds for a moment
is left out.
"""

from __future__ import annotations

from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.cost.in_flight import instants, is_declared
from meshwright.cost.memory import LeastKept, held_activations, least_kept_bytes
from meshwright.planner.bounds.cuts import Cut, Layers, Pair, dot, least
from meshwright.planner.enumerate import MAX_CHUNKS
from meshwright.planner.parts import Key


class Kept:
    """For one model and job."""

    def __init__(self, model: ModelSpec, job: Job, layers: Layers) -> None:
        self.model = model
        self.job = job
        self._layers = layers
        self._known: dict[Key, LeastKept] = {}
        self._alone: dict[Key, int] = {}

    def of(self, s: Strategy, kind: int) -> LeastKept:
        """By each layer and end, of one micro-batch. `kind`: degrees and layouts."""
        key = kind, s.micro_batch_size, s.recompute, s.recompute_group
        if key not in self._known:
            self._known[key] = least_kept_bytes(self.model, self.job, s)
        return self._known[key]

    def mean_bytes(self, s: Strategy, kind: int, kept: LeastKept) -> int:
        """Of the mean rank, whatever the schedule and the cut; 0 where steps run into each other."""
        if s.pipeline_schedule.is_asynchronous:
            return 0
        num = self.model.num_layers
        run_again = s.num_recomputed(num)
        if s.pp == 1 and is_declared(s):
            return self._alone_bytes(s, kind)
        if s.pp == 1:
            again = self._layers.pair(0, run_again)
            rest = self._layers.pair(run_again, num)
            return int(dot(again, kept.again) + dot(rest, kept.whole)) + kept.front + kept.back
        if s.recompute_layers is not None:  # of each stage, of which there may be several on a rank
            run_again = min(num, s.recompute_layers * s.pp * max(MAX_CHUNKS, s.stages_per_rank))
            return (run_again * min(kept.again) + (num - run_again) * min(kept.whole)) // s.pp
        return int(dot(self._layers.all, kept.again if run_again else kept.whole)) // s.pp

    def _alone_bytes(self, s: Strategy, kind: int) -> int:
        """Of a rank without a pipeline, exactly."""
        (fullest,) = instants(s, [0])
        key = kind, s.tile, s.micro_batch_size, s.recompute, s.recompute_layers, s.recompute_group, fullest
        if key not in self._alone:
            self._alone[key] = held_activations(self.model, self.job, s, 0, fullest).device_bytes
        return self._alone[key]

    def fullest_bytes(self, s: Strategy, states: tuple[int, ...], kept: LeastKept, cut: Cut) -> int:
        """Of the fullest rank of a whole strategy, with its states. What layers keep from I to W may be less than what
        they keep from forward to I; where backward is split, the smaller counts."""
        schedule, size, most = s.pipeline_schedule, s.pipeline, 0
        if schedule.num_live is None:
            return max(states)
        declared, again, whole = is_declared(s), kept.again, kept.whole
        if not declared:
            again, whole = _less_of(again, kept.postponed), _less_of(whole, kept.postponed)
        for rank, states_bytes in zip(cut.ranks, states, strict=True):
            live = max(schedule.num_live(size, rank.first), schedule.num_live(size, rank.last))
            of_one = least(rank.stages, again, whole)
            if declared:
                of_one += kept.front * rank.has_front + kept.back * rank.has_back
            most = max(most, states_bytes + live * of_one)
        return most


def _less_of(a: Pair, b: Pair) -> Pair:
    return min(a[0], b[0]), min(a[1], b[1])
