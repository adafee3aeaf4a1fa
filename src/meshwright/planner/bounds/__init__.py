"""Lower bounds on a strategy's seconds and bytes, in a few microseconds: what no choice that is still open can beat.

    level      chosen                              seconds                             bytes
    divided    degrees, ZeRO, layouts              the mean rank's work, and `sent`    states of the mean rank
    sized      and micro-batches, recomputation    likewise, of that size              and one of its micro-batches
    waited     and nothing more                    the least of all its `orders`       likewise
    ordered    and schedule, cut into stages       that of its order                   those of each rank

One idea a file: `holdings` (states), `kept` (micro-batches), `work` (of one micro-batch), `sent` (once a step),
`pipeline` (what waits for what), `cuts` (which layers are where). Each says why it can't exceed the price. All are read
off the real prices of one layer, and of one bucket that holds all of a rank, so that no formula is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.cost.memory import LeastKept
from meshwright.planner.bounds.cuts import Layers, Order
from meshwright.planner.bounds.holdings import Holdings, Split
from meshwright.planner.bounds.kept import Kept
from meshwright.planner.bounds.pipeline import Pipeline
from meshwright.planner.bounds.sent import Sends
from meshwright.planner.bounds.work import Work, Works
from meshwright.planner.parts import Parts


@dataclass(frozen=True, slots=True)
class Bound:
    """Of all strategies that a partly chosen one may become."""

    seconds: float
    """0 of what does not fit in any case; infinite where nothing legal can come of it."""
    num_bytes: int
    split: Split
    kind: int
    """Of a micro-batch's work: degrees and layouts."""
    kept: LeastKept | None = None
    work: Work | None = None


class Bounds:
    """For one model, cluster and job. `is_cut`: stages may hold any number of layers."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job, parts: Parts, *, is_cut: bool = False) -> None:
        self.job = job
        self.layers = Layers(model)
        self._holdings = Holdings(model, job, self.layers)
        self._kept = Kept(model, job, self.layers)
        self._works = Works(model, parts, self.layers)
        self._sends = Sends(job, cluster, self._holdings, is_cut=is_cut)
        self._pipeline = Pipeline(model.num_layers, cluster)
        self._usable = cluster.usable_memory_bytes

    def divided(self, s: Strategy, sizes: Sequence[int]) -> Bound:
        """Of a strategy whose micro-batches and recomputation are still open too.

        Args:
            sizes: of the micro-batches that may become of it.
        """
        split, kind = self._holdings.split(s), self._works.kind(s)
        if split.mean_bytes > self._usable or not sizes:
            return Bound(0.0, split.mean_bytes, split, kind)
        per_rank = self.job.global_batch_size // s.dp
        compute_s = min(per_rank // size * self._works.plain_s(s, kind, size) for size in sizes) / s.pp
        after_s = 0.0 if s.reduces_each else self._sends.of(s, split).after_s
        return Bound(compute_s + after_s, split.mean_bytes, split, kind)

    def sized(self, s: Strategy, before: Bound) -> Bound:
        """Of a strategy whose schedule, and cut into stages, are still open: what all ranks compute together, without
        what is run again. `before`: while more was."""
        kept = self._kept.of(s, before.kind)
        num_bytes = before.num_bytes + self._kept.mean_bytes(s, before.kind, kept)
        if num_bytes > self._usable:
            return Bound(0.0, num_bytes, before.split, before.kind, kept)
        split = self._holdings.split(s) if s.reduces_each else before.split
        compute_s = s.num_micro_batches * self._works.plain_s(s, before.kind, s.micro_batch_size) / s.pp
        return Bound(compute_s + self._sends.of(s, split).after_s, num_bytes, split, before.kind, kept)

    def waited(self, s: Strategy, orders: Sequence[Order], before: Bound) -> Bound:
        """Likewise, with what is run again, and what ranks wait for, in the best of its orders."""
        if before.num_bytes > self._usable:
            return before
        work, sent = self._works.of(s, before.kind), self._sends.of(s, before.split)
        seconds = min((self._pipeline.seconds(s, order, sent, work) for order in orders), default=inf) + sent.after_s
        return Bound(seconds, before.num_bytes, before.split, before.kind, before.kept, work)

    def ordered(self, s: Strategy, order: Order, before: Bound) -> Bound:
        """Of a whole strategy. `before`: while its schedule, and its cut into stages, were open."""
        cut, kept, split = order.cut, before.kept, before.split
        if cut is None or kept is None:
            return before
        states = self._holdings.by_rank(s, split, cut)
        num_bytes = max(before.num_bytes, self._kept.fullest_bytes(s, states, kept, cut))
        if before.work is None or num_bytes > self._usable:
            return Bound(0.0, num_bytes, split, before.kind, kept, before.work)
        sent = self._sends.of(s, split)
        seconds = self._pipeline.seconds(s, order, sent, before.work) + sent.after_s
        return Bound(seconds, num_bytes, split, before.kind, kept, before.work)
