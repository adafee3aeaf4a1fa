"""Seconds of forward and backward of all micro-batches, with what waits for them, and is not hidden by them.

    mean rank     works as long as all ranks together, over pp: the busiest works no less
    each rank     begins when the first micro-batch has come to it, works on all of them, and is followed by the
                  backward of the stages before it: the pipeline ends no sooner
    first rank    reduces its gradients too, of which its last backward hides no more than its own length

A layer counts as what one takes at least, so that a stage takes no less than its layers.
"""

from __future__ import annotations

from meshwright.core.cluster import ClusterSpec
from meshwright.core.strategy import Strategy
from meshwright.planner.bounds.cuts import Order, dot
from meshwright.planner.bounds.sent import Sent
from meshwright.planner.bounds.work import Work


class Pipeline:
    """For models of so many layers on one cluster."""

    def __init__(self, num_layers: int, cluster: ClusterSpec) -> None:
        self._num_layers = num_layers
        profile = cluster.device.profile
        self._slowdown = profile.overlap_slowdown if profile else 1.0

    def seconds(self, s: Strategy, order: Order, sent: Sent, work: Work) -> float:
        """Of a strategy of whose fields those that `order` decides are not looked at."""
        return self._alone_s(s, sent, work) if order.cut is None else self._ranks_s(s, order, sent, work)

    def _alone_s(self, s: Strategy, sent: Sent, work: Work) -> float:
        """Without a pipeline: micro-batches one after the other, gathering and reducing beside them. Of the blocks that
        are gathered ahead only the first is waited for, and the others slow down what they run beside."""
        m, gathers_s = s.num_micro_batches, [0.0, 0.0]
        gather_s, num_blocks = sent.phases.get("gather", 0.0) / (2 * m), self._num_layers + 1
        if gather_s and not s.keeps_gathered and s.offload.parameters == "none":
            for at, way_s in enumerate((work.forward_s, work.backward_s)):
                beside_s = min(gather_s, way_s) * (1 - 1 / num_blocks) if s.prefetch else 0.0
                first_s = gather_s / num_blocks if s.prefetch else gather_s
                gathers_s[at] = max(gather_s - beside_s, first_s + (self._slowdown - 1) * beside_s)
        times = m if s.reduces_each else 1
        window_s = work.backward_s + gathers_s[1]
        exposed_s = times * self._exposed_s(sent.phases.get("gradients", 0.0) / times, window_s)
        return m * (work.forward_s + work.backward_s + sum(gathers_s)) + exposed_s

    def _ranks_s(self, s: Strategy, order: Order, sent: Sent, work: Work) -> float:
        """The mean rank's work, or the longest rank's with its ways, or the first rank's with its reduction."""
        cut, m = order.cut, s.num_micro_batches
        assert cut is not None
        backward_s = work.backward_s if s.recompute_layers is None else work.plain_s + dot(cut.again, work.again_s)
        compute_s = m * (work.forward_s + backward_s) / s.pp
        if not order.has_ways:
            return compute_s
        each_s, ends_s, first_end_s = work.layer_s, 0.0, 0.0
        for way in cut.ways:
            own_s = dot(way.own, each_s) + dot(way.own_again, work.again_s) + way.has_head * work.head_s
            end_s = dot(way.before, work.layer_forward_s) + m * own_s
            if order.has_tails:
                tail_s = dot(way.before, work.layer_backward_s) + dot(way.before_again, work.again_s)
                first_end_s = max(first_end_s, end_s + tail_s)
            elif way.is_first:
                first_end_s = max(first_end_s, end_s)
            ends_s = max(ends_s, end_s)
        exposed_s = self._exposed_s(sent.first_s, (cut.first + 1) * work.gradients_s + work.host_s)
        return max(compute_s, ends_s, first_end_s + exposed_s)

    def _exposed_s(self, reduction_s: float, window_s: float) -> float:
        """What a reduction adds to a backward of at most `window_s`: what is longer than that, and what slows it."""
        seen_s = max(0.0, reduction_s - window_s)
        return seen_s + (min(self._slowdown, 2.0) - 1) * (reduction_s - seen_s)
