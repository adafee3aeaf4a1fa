"""Seconds that one rank of a stage computes for one micro-batch, as named terms, both ways.

With a measured profile of the device the kernels of a layer are priced one by one (:mod:`meshwright.cost.kernels`), and
the host's launches are a floor under them; without one, FLOPs at one share of the peak stand for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.placement import largest_part
from meshwright.core.profile import Profile, Stack
from meshwright.core.strategy import Strategy
from meshwright.cost.context import exposed_s
from meshwright.cost.flops import layer_weights, stage_flops
from meshwright.cost.kernels import Rates, Seconds, head_kernels, layers_kernels, rates
from meshwright.cost.terms import TimeTerm, total_s

REDUCTIONS, MESSAGES = "tensor-parallel reductions", "context-parallel messages"
EXCHANGE = "experts' exchange"
"""Names of terms."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of a micro-batch, by pass."""

    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0

    def times(self, share: float) -> Passes:
        """A share of each."""
        return Passes(share * self.forward, share * self.recompute, share * self.backward)


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds that a stage spends in collectives per micro-batch."""

    reductions: Passes
    """Over tp, and whatever else layers wait for."""
    messages: Passes = Passes()
    """Between the ranks that share a sequence, in attention."""
    exchange: Passes = Passes()
    """Of rows, on their way to experts and back."""

    def times(self, share: float) -> Collectives:
        """A share of all but the messages."""
        return replace(self, reductions=self.reductions.times(share), exchange=self.exchange.times(share))

    def exposed(self, strategy: Strategy, attention: tuple[float, float], *, hides: bool) -> Collectives:
        """With what attention does not hide of its messages.

        Args:
            attention: seconds of it, forward and backward; what is run again takes forward's.
            hides: whether a rank computes while messages travel. CPU ranks copy them by themselves, and do not.
        """
        if not hides:
            return self
        share = 1.0 if self.messages.forward == 0 else self.messages.recompute / self.messages.forward
        seen = Passes(
            exposed_s(strategy, self.messages.forward, attention[0], is_backward=False),
            exposed_s(strategy, self.messages.recompute, share * attention[0], is_backward=False),
            exposed_s(strategy, self.messages.backward, attention[1], is_backward=True),
        )
        return replace(self, messages=seen)

    @property
    def terms(self) -> tuple[tuple[TimeTerm, ...], tuple[TimeTerm, ...]]:
        """Forward and backward, without what is run again; beside the reductions what there is of the others."""
        others = {MESSAGES: self.messages, EXCHANGE: self.exchange}
        shown = {REDUCTIONS: self.reductions, **{name: passes for name, passes in others.items() if passes.backward}}
        return (
            tuple(TimeTerm(name, passes.forward) for name, passes in shown.items()),
            tuple(TimeTerm(name, passes.backward) for name, passes in shown.items()),
        )

    @property
    def again_s(self) -> float:
        """Of what is run again."""
        return self.reductions.recompute + self.messages.recompute + self.exchange.recompute


@dataclass(frozen=True, slots=True)
class Compute:
    """What a stage takes of one micro-batch."""

    forward: tuple[TimeTerm, ...]
    backward: tuple[TimeTerm, ...]
    """With recomputation."""
    weight_gradients_s: float
    """Of backward, what W takes where it is run apart."""


def stage_compute(
    model: ModelSpec,
    job: Job,
    strategy: Strategy,
    cluster: ClusterSpec,
    stage: int,
    collectives: Collectives,
    stack: Stack,
) -> Compute:
    """Price a stage. Raises InputError where the cluster states no peak for the strategy's compute dtype."""
    profile = cluster.device.profile
    if profile is None:
        return _by_flops(model, job, strategy, cluster, stage, collectives)
    speed = _rates(cluster, profile, strategy)
    return _by_kernels(model, job, strategy, speed, stage, collectives, stack, hides=cluster.backend != "gloo")


def peak_flops_per_s(cluster: ClusterSpec, strategy: Strategy) -> float:
    """Of one device in the dtype of the strategy's products."""
    recipe, peaks = strategy.recipe, cluster.device.peak_flops_per_s
    for dtype in (recipe.parameter, recipe.product or recipe.parameter):
        if dtype not in peaks:
            raise InputError(
                f"cluster `{cluster.name}`: device `{cluster.device.name}` states no peak FLOP/s for {dtype}; "
                f"it has {', '.join(sorted(peaks))}"
            )
    return peaks[recipe.product or recipe.parameter]


def flops_per_s(cluster: ClusterSpec, strategy: Strategy) -> float:
    """Matrix-product speed of one device without a profile: peak × efficiency."""
    return peak_flops_per_s(cluster, strategy) * cluster.compute_efficiency


def _by_flops(
    model: ModelSpec, job: Job, strategy: Strategy, cluster: ClusterSpec, stage: int, collectives: Collectives
) -> Compute:
    flops, speed = stage_flops(model, job, strategy, stage), flops_per_s(cluster, strategy)
    again = flops.again(strategy.recompute) * _share_again(model, strategy, stage) / speed
    attention = flops.scores / speed, 2 * flops.scores / speed
    seen = collectives.exposed(strategy, attention, hides=cluster.backend != "gloo")
    return Compute(
        forward=(
            TimeTerm("layers", flops.layers / speed),
            TimeTerm("head", flops.head / speed),
            *seen.terms[0],
        ),
        backward=(
            TimeTerm("layers", 2 * flops.layers / speed),
            TimeTerm("head", 2 * flops.head / speed),
            *seen.terms[1],
            TimeTerm("recomputation", again + seen.again_s),
        ),
        weight_gradients_s=flops.weight_gradients / speed,
    )


def _share_again(model: ModelSpec, strategy: Strategy, stage: int) -> float:
    """Of a stage's layers, that are recomputed."""
    num_layers = len(strategy.stage_layers(model.num_layers)[stage])
    return strategy.num_recomputed(num_layers) / num_layers


def _rates(cluster: ClusterSpec, profile: Profile, strategy: Strategy) -> Rates:
    peak_flops_per_s(cluster, strategy)
    recipe = strategy.recipe
    return rates(cluster.device, profile, recipe.parameter, recipe.parameter_bytes, recipe.product)


def _by_kernels(
    model: ModelSpec,
    job: Job,
    strategy: Strategy,
    speed: Rates,
    stage: int,
    collectives: Collectives,
    stack: Stack,
    *,
    hides: bool,
) -> Compute:
    layers = strategy.stage_layers(model.num_layers)[stage]
    _, is_last = strategy.stage_ends(stage)
    all_of = layers_kernels(model, job, strategy, speed, stack, layers)
    products_of_head = head = Seconds(0.0, 0.0)
    if is_last:
        products_of_head, head = head_kernels(model, job, strategy, speed)
    attention = all_of.attention.forward, all_of.attention.backward
    seen = collectives.times(1 - stack.hidden_tensor_share).exposed(strategy, attention, hides=hides)
    selected_s = all_of.attention.forward
    if stack.selective_share is not None:
        selected_s = stack.selective_share * all_of.products.forward + all_of.streams.forward
    repeated = {"none": 0.0, "full": all_of.total.forward, "selective": selected_s}[strategy.recompute]
    share = _share_again(model, strategy, stage)
    again_s, repeats = repeated * share, share * (strategy.recompute == "full")
    forward = (
        TimeTerm("products", all_of.products.forward),
        TimeTerm("attention", all_of.attention.forward),
        TimeTerm("streams", all_of.streams.forward),
        TimeTerm("head", head.forward),
        *seen.terms[0],
    )
    backward = (
        TimeTerm("products", all_of.products.backward),
        TimeTerm("attention", all_of.attention.backward),
        TimeTerm("streams", all_of.streams.backward),
        TimeTerm("head", head.backward),
        *seen.terms[1],
        TimeTerm("recomputation", again_s + seen.again_s),
        *_sums(model, strategy, stage, speed, stack),
    )
    forward_s, backward_s = _floors(stack, len(layers), model.count_layers(layers, True))
    host = speed.profile.host
    own_s = (len(layers) * host.layer_s + host.micro_batch_s) / 3
    again_host_s = 2 * own_s + repeats * len(layers) * host.layer_s / 3
    return Compute(
        forward=(*forward, _launches(forward, forward_s, own_s)),
        backward=(*backward, _launches(backward, backward_s + repeats * forward_s, again_host_s)),
        weight_gradients_s=(all_of.products + products_of_head).backward / 2,
    )


def _sums(model: ModelSpec, strategy: Strategy, stage: int, speed: Rates, stack: Stack) -> tuple[TimeTerm, ...]:
    """What a micro-batch's gradients take to be added to those before it, in kernels of their own."""
    num_bytes = stack.gradient_sum_bytes.get(strategy.recipe.parameter)
    if not num_bytes:
        return ()
    layers = strategy.stage_layers(model.num_layers)[stage]
    ends = sum(strategy.stage_ends(stage)) * largest_part(model, "vocab", model.vocab_size, strategy.tp)
    num_weights = sum(layer_weights(model, strategy, layer) for layer in layers) + ends * model.hidden_size
    return (TimeTerm("gradient sums", num_weights * num_bytes / speed.bytes_per_s),)


def _floors(stack: Stack, num_layers: int, num_sparse: int) -> tuple[float, float]:
    """Seconds that the host takes to launch a stage's layers, each way."""
    forward_s = num_layers * stack.layer_forward_s + num_sparse * stack.experts_forward_s
    return forward_s, num_layers * stack.layer_backward_s + num_sparse * stack.experts_backward_s


def _launches(terms: tuple[TimeTerm, ...], floor_s: float, own_s: float) -> TimeTerm:
    """What the host takes longer to launch kernels than they take to run, and what it takes beside them."""
    return TimeTerm("launches", max(0.0, floor_s - total_s(terms)) + own_s)
