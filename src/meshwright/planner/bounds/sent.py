"""Seconds of what ranks do once in a step: reductions of gradients, gathers of parameters, the update.

Collectives cost no less in several calls than in one, since their seconds are concave in their bytes; so those of the
mean rank in as few calls as can be are no more than those of the busiest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.cluster import ClusterSpec
from meshwright.core.flat import Bucket
from meshwright.core.job import Job
from meshwright.core.strategy import Strategy
from meshwright.cost.latency import optimizer_s
from meshwright.cost.sending import seconds_by_phase
from meshwright.cost.traffic import step_traffic
from meshwright.planner.bounds.cuts import least_layers
from meshwright.planner.bounds.holdings import Holdings, Split, buckets_of
from meshwright.planner.parts import Key, first_of


@dataclass(frozen=True, slots=True)
class Sent:
    """What such ranks do once a step."""

    phases: dict[str, float]
    """Seconds of a mean rank's collectives in a step, in few calls."""
    first_s: float
    """Of the first rank's reduction of gradients."""
    update_s: float

    @property
    def after_s(self) -> float:
        """What follows the pipeline: nothing hides it."""
        return sum(self.phases.get(phase, 0.0) for phase in ("count", "norm", "parameters")) + self.update_s


class Sends:
    """For one model, cluster and job. `is_cut`: stages may hold any number of layers."""

    def __init__(self, job: Job, cluster: ClusterSpec, holdings: Holdings, *, is_cut: bool) -> None:
        self.job = job
        self.cluster = cluster
        self._holdings = holdings
        self._is_cut = is_cut
        self._known: dict[Key, Sent] = {}

    def of(self, s: Strategy, split: Split) -> Sent:
        """Of a strategy whose schedule and cut may be open."""
        if split.key not in self._known:
            self._known[split.key] = self._find(s)
        return self._known[split.key]

    def _find(self, s: Strategy) -> Sent:
        size, num_layers = self._holdings.size(s), self._holdings.model.num_layers
        fewest, mean = least_layers(s, num_layers, is_cut=self._is_cut), size.mean(s.pp)
        least_of = [min(sizes[at] for sizes in size.layers) for at in (0, 1)]
        first = fewest * least_of[0] + size.front[0], fewest * least_of[1]
        blocks = num_layers if s.pp == 1 and s.zero >= 2 else 1
        phases = self._phases(s, buckets_of(*mean, blocks))
        first_s = self._phases(s, buckets_of(*first, 1)).get("gradients", 0.0) if s.pp > 1 else 0.0
        update_s = s.num_updates * optimizer_s(sum(mean), self.job, s, self.cluster) * (not s.offload.delayed)
        return Sent(phases, first_s, update_s)

    def _phases(self, s: Strategy, buckets: tuple[Bucket, ...]) -> dict[str, float]:
        model = self._holdings.model
        return seconds_by_phase(model, s, self.cluster, step_traffic(model, s, first_of(0), buckets))
