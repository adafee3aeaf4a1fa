"""Best first: a tree of choices in order of what they can reach at best, of which few are priced in full.

    degrees, ZeRO, ...                  a bound on seconds and bytes; in the queue
    + micro-batches, recomputation      a bound on seconds and bytes; in the queue
                                        a tighter one, of the best of its orders, once it is first there
    + schedule, stages even or          a bound on its bytes too; in the queue again
      balanced                          priced: exact; first in the queue when nothing else can be faster

What leaves the queue priced is the next in the order of time, so that a question for the first of a kind is answered
without pricing the rest, and the answer is that of pricing all. What has been priced is kept for the next question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.planner.balance import Ends, balanced, balanced_by, head_in_layers
from meshwright.planner.bounds import Bound, Bounds
from meshwright.planner.bounds.cuts import Order
from meshwright.planner.enumerate import Choices, Refusal, nothing_legal, open_advice, strategies
from meshwright.planner.fix import in_words
from meshwright.planner.must import Must, broken, kept
from meshwright.planner.parts import Key
from meshwright.planner.price import Forecast, Pricer

DIVIDED, SIZED, WAITED, ORDERED, PRICED = range(5)
"""How far a strategy is chosen."""
ORDER_FIELDS = ("schedule", "num_chunks", "layers_per_stage")
"""What an order decides."""

Admits = Callable[[Strategy], bool]


@dataclass(slots=True)
class _Node:
    """A strategy as far as it is chosen."""

    strategy: Strategy
    level: int
    bound: Bound
    forecast: Forecast | None = None
    children: list[_Node] | None = None
    may_be: tuple[Strategy, ...] = ()
    """Where recomputation is still open, one strategy of each kind of it."""

    def may_be_one(self, admits: Admits) -> bool:
        """Whether something that it may become is admitted, as far as that is known."""
        return any(map(admits, self.may_be)) if self.may_be else admits(self.strategy)


def searched(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: Job,
    fix: Mapping[str, Any],
    musts: tuple[Must, ...] = (),
    ends: Ends | None = None,
    pricer: Pricer | None = None,
) -> Search:
    """All strategies that agree with `fix` (values as from :func:`meshwright.planner.fix.check_fix`) and keep `musts`.

    Args:
        pricer: of the same model, cluster and job, where there is one already.

    Raises RuleError where there is none: as :func:`meshwright.planner.enumerate.strategies`, or with rule `must`.
    """
    pricer = pricer or Pricer(model, cluster, job)
    for advice in (open_advice(fix), ()):
        search = Search(Choices(model, cluster, job, fix, advice), pricer, musts, ends)
        if search.is_any:
            return search
    legal = strategies(model, cluster, job, fix).legal
    kept(musts, legal, in_words(fix))
    raise nothing_legal(model, cluster, job, fix, search.refused)


class Search:
    """Of one space of choices. `priced` are those priced in full, `too_large` those of which a lower bound, the second
    value, says that they do not fit, as far as the tree was walked."""

    def __init__(
        self, choices: Choices, pricer: Pricer, musts: tuple[Must, ...] = (), ends: Ends | None = None
    ) -> None:
        self._choices = choices
        self.pricer = pricer
        self.musts = musts
        self._ends = ends
        self._bounds = Bounds(choices.model, choices.cluster, choices.job, pricer.parts, is_cut=ends is not None)
        self.priced: list[Forecast] = []
        self.too_large: list[tuple[Strategy, int]] = []
        self._early = [must for must in musts if must.field != "num_chunks"]
        self._known_orders: dict[Key, tuple[Order, ...]] = {}
        self._roots: list[_Node] = []
        for divided in choices.splits():
            bound = self._bounds.divided(divided, choices.micro_batch_sizes(divided))
            kinds = {again["recompute"] for again in choices.recomputations(divided)}
            may_be = tuple(divided.model_copy(update={"recompute": kind}) for kind in kinds)
            self._roots.append(_Node(divided, DIVIDED, bound, may_be=may_be))
        self._note_too_large(self._roots)
        self._fitting = [root for root in self._roots if not self._is_too_large(root)]

    @property
    def refused(self) -> list[Refusal]:
        """What rules speak against, as far as the tree was walked."""
        return self._choices.refused

    @property
    def is_any(self) -> bool:
        """Whether anything is legal, and kept."""
        return any(
            self._choices.is_allowed(node.strategy)
            for roots in (self._fitting, self._roots)
            for root in roots
            for node in self._leaves(root)
        )

    def _leaves(self, node: _Node) -> Iterator[_Node]:
        """Whole strategies that it may become."""
        if node.level == ORDERED:
            yield node
            return
        for child in self._children(node):
            yield from self._leaves(child)

    def fastest(self, admits: Admits = lambda strategy: True) -> Iterator[Forecast]:
        """Those that fit, in order of time, of equally fast ones the smaller first.

        Args:
            admits: asked again and again of strategies whose micro-batches and schedule may still be open, and of
                priced ones: what it refuses, with all that may become of it, is left out.
        """
        usable = self.pricer.room.usable_memory_bytes
        return self._walk(
            self._fitting,
            lambda node: (node.bound.seconds, node.bound.num_bytes),
            lambda node: node.bound.num_bytes <= usable and node.may_be_one(admits),
            lambda forecast: forecast.fits,
        )

    def front(self) -> Iterator[Forecast]:
        """Those that fit and need less memory than every faster one, in order of time."""
        most = [self.pricer.room.usable_memory_bytes + 1]
        for forecast in self._walk(
            self._fitting,
            lambda node: (node.bound.seconds, node.bound.num_bytes),
            lambda node: node.bound.num_bytes < most[0],
            lambda forecast: forecast.fits,
        ):
            yield forecast
            most[0] = forecast.device_bytes

    def smallest_fitting(self) -> Forecast | None:
        """The one that needs least of the device's memory, where that is there; the host may still be too small."""
        usable = self.pricer.room.usable_memory_bytes
        found = self._walk(
            self._fitting,
            lambda node: (node.bound.num_bytes, node.bound.seconds),
            lambda node: node.bound.num_bytes <= usable,
            lambda _: True,
        )
        return next(found, None)

    def smallest(self, admits: Admits = lambda strategy: True) -> Iterator[Forecast]:
        """All, in order of their fullest rank's memory, whether they fit or not."""
        return self._walk(
            self._roots,
            lambda node: (node.bound.num_bytes, node.bound.seconds),
            lambda node: node.may_be_one(admits),
            lambda _: True,
        )

    def _walk(
        self,
        roots: Sequence[_Node],
        key: Callable[[_Node], tuple[float, float]],
        admits: Callable[[_Node], bool],
        counts: Callable[[Forecast], bool],
    ) -> Iterator[Forecast]:
        tie = count()
        queue = [(key(node), next(tie), node) for node in roots if admits(node)]
        heapify(queue)
        while queue:
            _, _, node = heappop(queue)
            if not admits(node):
                continue
            if node.forecast is not None:
                yield node.forecast
                continue
            for child in self._children(node):
                if admits(child) and (child.forecast is None or counts(child.forecast)):
                    heappush(queue, (key(child), next(tie), child))

    def _children(self, node: _Node) -> list[_Node]:
        if node.children is None:
            further = {DIVIDED: self._sized, SIZED: self._waited, WAITED: self._ordered, ORDERED: self._priced}
            node.children = list(further[node.level](node))
            if node.level in (DIVIDED, WAITED) and not self._is_too_large(node):
                self._note_too_large(node.children)
        return node.children

    def _note_too_large(self, nodes: list[_Node]) -> None:
        self.too_large += [(node.strategy, node.bound.num_bytes) for node in nodes if self._is_too_large(node)]

    def _is_too_large(self, node: _Node) -> bool:
        return node.bound.num_bytes > self.pricer.room.usable_memory_bytes

    def _sized(self, node: _Node) -> Iterator[_Node]:
        for sized in self._choices.sizes(node.strategy):
            if broken(self._early, sized) is None:
                yield _Node(sized, SIZED, self._bounds.sized(sized, node.bound))

    def _waited(self, node: _Node) -> Iterator[_Node]:
        s = node.strategy
        yield _Node(s, WAITED, self._bounds.waited(s, self._orders(s), node.bound))

    def _ordered(self, node: _Node) -> Iterator[_Node]:
        for order in self._orders(node.strategy):
            strategy = node.strategy.model_copy(update=order.change)
            yield _Node(strategy, ORDERED, self._bounds.ordered(strategy, order, node.bound))

    def _orders(self, s: Strategy) -> tuple[Order, ...]:
        """Schedules, each with its cuts: the same for strategies of which nothing differs that :meth:`Choices.orders`,
        balance and cuts look at. What it must keep of other fields it keeps already."""
        head = head_in_layers(self._choices.model, self._choices.job, s) if s.pp > 1 else 0.0
        key = s.pp, s.num_micro_batches, s.zero >= 2, head, s.recompute != "none", s.recompute_layers
        if key not in self._known_orders:
            self._known_orders[key] = tuple(
                self._bounds.layers.order(cut, {name: getattr(cut, name) for name in ORDER_FIELDS})
                for strategy in self._choices.orders(s)
                if broken(self.musts, strategy) is None
                for cut in self._cuts(strategy)
            )
        return self._known_orders[key]

    def _cuts(self, strategy: Strategy) -> Iterator[Strategy]:
        """Even stages, and those balanced by forecast; or those balanced by what was measured."""
        if self._ends is not None:
            yield balanced_by(self._ends, strategy, self._choices.model.num_layers)
            return
        yield strategy
        yield from balanced([strategy], self._choices.model, self._choices.job)

    def _priced(self, node: _Node) -> Iterator[_Node]:
        if not self._choices.is_legal(node.strategy):
            return
        forecast = self.pricer.forecast(node.strategy)
        self.priced.append(forecast)
        bound = replace(node.bound, seconds=forecast.step_time.total_s, num_bytes=forecast.device_bytes)
        yield _Node(node.strategy, PRICED, bound, forecast)
