"""Seconds of one micro-batch on the ranks of one stage that holds the whole model, and of one layer of it.

Read off the real price of a model on one stage, so that no formula is written twice. All pipeline ranks together spend
as much on a micro-batch, since products, streams and calls are counted by layer; and a layer of a stage no less than
the mean layer without what the ends take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.cost.compute import EXCHANGE, REDUCTIONS
from meshwright.cost.terms import TimeTerm, total_s
from meshwright.planner.bounds.cuts import Layers, dot
from meshwright.planner.bounds.holdings import ALONE
from meshwright.planner.parts import Key, Parts

LESS = 1 - 1e-9
"""A bound stays one where sums round otherwise."""
MORE = 1 + 1e-9
"""Likewise, of what is at most so much."""
NUM_OF_KINDS = 4
"""Layers of a model that has one of each kind between its ends."""

OfKinds = tuple[float, float]
"""Seconds of a layer with an MLP, and of one with experts; the same twice where a model has one kind."""


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one micro-batch through the whole model, on the ranks of one stage."""

    forward_s: float
    backward_s: float
    plain_s: float
    """Backward without what is run again."""
    layer_forward_s: OfKinds
    """Of one layer, at least."""
    layer_backward_s: OfKinds
    """Likewise, without what is run again."""
    again_s: OfKinds
    """Of one layer that is run again, at least."""
    head_s: float
    """Forward and backward."""
    gradients_s: float
    """Backward of one layer, at most, without what the host adds."""
    host_s: float
    """What it adds to a backward of all layers."""

    @property
    def layer_s(self) -> OfKinds:
        """Of one layer, forward and backward, without what is run again."""
        (dense, sparse), (dense_back, sparse_back) = self.layer_forward_s, self.layer_backward_s
        return dense + dense_back, sparse + sparse_back


class Works:
    """For one model, cluster and job."""

    def __init__(self, model: ModelSpec, parts: Parts, layers: Layers) -> None:
        self.model = model
        self._parts = parts
        self._layers = layers
        self._plains: dict[Key, float] = {}
        self._works: dict[Key, Work] = {}
        self._kinds: dict[Key, int] = {}
        self._of_kinds: Parts | None = None

    def kind(self, s: Strategy) -> int:
        """What a micro-batch's work depends on, besides its size and what is run again."""
        key = s.tp, s.expert, s.tensor, s.sequence, s.context, s.precision, s.offload
        return self._kinds.setdefault(key, len(self._kinds))

    def plain_s(self, s: Strategy, kind: int, size: int) -> float:
        """Seconds of one micro-batch of `size` through the whole model, without what is run again."""
        key = kind, size
        if key not in self._plains:
            changes = {**ALONE, "recompute": "none", "recompute_group": 1, "dp": s.expert_dp, "micro_batch_size": size}
            _, compute = self._parts.stage(s.model_copy(update=changes), 0)
            self._plains[key] = (total_s(compute.forward) + total_s(compute.backward)) * LESS
        return self._plains[key]

    def of(self, s: Strategy, kind: int) -> Work:
        """Of a strategy whose schedule and cut may be open."""
        key: Key = (
            kind,
            s.micro_batch_size,
            s.recompute,
            s.recompute_group,
            s.recompute_layers and (s.recompute_layers, s.pp),
        )
        if key not in self._works:
            self._works[key] = self._find(s, kind)
        return self._works[key]

    def _find(self, s: Strategy, kind: int) -> Work:
        alone = s.model_copy(update={**ALONE, "dp": s.expert_dp})
        if s.recompute != "none":
            changes = {"recompute": "none", "recompute_layers": None, "recompute_group": 1}
            plain = self.of(s.model_copy(update=changes), kind)
        if s.recompute_layers is not None:
            longest = max(map(len, s.stage_layers(self.model.num_layers)))
            whole = self.of(s.model_copy(update={"recompute_layers": None}), kind)
            more_s = min(1.0, s.recompute_layers / longest) * (whole.backward_s - plain.backward_s)
            if self.model.dense_layers:  # of a pipeline, its cut says it
                more_s = dot(self._layers.priced_again(0, self.model.num_layers, s), whole.again_s) * (s.pp == 1)
            return replace(whole, backward_s=plain.backward_s + more_s)
        _, compute = self._parts.stage(alone, 0)
        passes = [_pass_s(terms, self.model.num_layers) for terms in (compute.forward, compute.backward)]
        layers_s = [(each.layer_s, each.layer_s) for each in passes]
        if self.model.dense_layers:
            layers_s = list(self._by_kind(alone))
        backward_s, is_again = total_s(compute.backward), s.recompute != "none"
        host_s = sum(term.seconds for term in compute.backward if term.name == "launches")
        mean_s = (backward_s - passes[1].head_s - host_s) / self.model.num_layers
        plain_layer_s = plain.layer_backward_s if is_again else layers_s[1]
        again_s = [max(0.0, both - once) for both, once in zip(layers_s[1], plain_layer_s, strict=True)]
        return Work(
            forward_s=total_s(compute.forward),
            backward_s=backward_s,
            plain_s=plain.backward_s if is_again else backward_s,
            layer_forward_s=layers_s[0],
            layer_backward_s=plain_layer_s,
            again_s=(again_s[0], again_s[1]),
            head_s=passes[0].head_s + passes[1].head_s,
            gradients_s=max(layers_s[1]) * MORE if self.model.dense_layers else mean_s,
            host_s=host_s,
        )

    def _by_kind(self, s: Strategy) -> tuple[OfKinds, OfKinds]:
        """Forward, and backward, of a layer without experts and of one with them, without the host's part.

        Of a small model, one layer to a stage, whose second is without and whose third is with them.
        """
        if self._of_kinds is None:
            small = {"num_layers": NUM_OF_KINDS, "dense_layers": (1,)}
            self._of_kinds = self._parts.of(self.model.model_copy(update=small))
        one_each = s.model_copy(update={"pp": NUM_OF_KINDS})
        dense, sparse = (self._of_kinds.stage(one_each, stage)[1] for stage in (1, 2))
        return (
            (_device_s(dense.forward), _device_s(sparse.forward)),
            (_device_s(dense.backward), _device_s(sparse.backward)),
        )


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds of a forward, or a backward: of one layer, at least, and of the head."""

    layer_s: float
    head_s: float


def _pass_s(terms: Iterable[TimeTerm], num_layers: int) -> _Pass:
    """Of all layers' calls of collectives, as many as two layers make are the ends'."""
    seconds = {term.name: term.seconds for term in terms}
    head_s, sent_s = seconds.pop("head", 0.0), sum(seconds.pop(name, 0.0) for name in (REDUCTIONS, EXCHANGE))
    layer_s = sum(seconds.values()) / num_layers + sent_s / (num_layers + 2)
    return _Pass(layer_s * LESS, head_s)


def _device_s(terms: Iterable[TimeTerm]) -> float:
    return sum(term.seconds for term in terms if term.name != "launches") * LESS
