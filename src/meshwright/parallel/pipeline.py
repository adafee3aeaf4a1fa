"""Pipeline parallelism: the stages of a rank, and the interpreter that runs one row of any Program.

What it divides: the layers, contiguously (Huang et al. 2019, GPipe); a rank runs one part of them, or several
(Narayanan et al. 2021, SC21).

    from another rank   RECV_F ──▶ F ──▶ SEND_F      to another rank
    on the same rank           F ──▶ F               a detached tensor is handed over; each stage has a graph of its own
    backward             B, or I (what the stage before waits for) and later W (the products that I left)

What it needs: rules `pp-layers`, `pp-layer-list`, `pp-chunks`, `pp-timetable`. What it costs: one hidden state per
boundary between ranks, micro-batch and direction; activations by what the table holds at its fullest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.comm.mesh import Mesh
from meshwright.comm.p2p import recv_start, send_start
from meshwright.comm.work import Work
from meshwright.core.axes import PP
from meshwright.core.model import ModelSpec
from meshwright.core.program import Action, Kind
from meshwright.core.strategy import Strategy
from meshwright.parallel.context.share import Share
from meshwright.parallel.data import GradientReducer
from meshwright.parallel.gather import Gatherer
from meshwright.parallel.layers import layers_of
from meshwright.parallel.offload.activations import KeptActivations
from meshwright.parallel.products import Product, Products

FIRST, LAST = ("embedding", "positions"), ("final_norm", "head")
"""What only the first stage, and only the last one, has of a model beside its layers."""

MAX_SENDS = 4
"""Sends under way per rank before the oldest is waited for."""


def cut(model: nn.Module, spec: ModelSpec, strategy: Strategy, rank: int) -> None:
    """Leave in `model` only what the stages of a pipeline rank run, in place."""
    stages = strategy.rank_stages(rank)
    _keep(model, {layer for stage in stages for layer in strategy.stage_layers(spec.num_layers)[stage]})
    _keep_ends(model, *map(any, zip(*map(strategy.stage_ends, stages), strict=True)))


def split(model: nn.Module, spec: ModelSpec, strategy: Strategy, rank: int) -> dict[int, nn.Module]:
    """Stage → its part of a model that was cut for the rank. All modules are the model's own; a single stage is it."""
    stages = strategy.rank_stages(rank)
    if len(stages) == 1:
        return {stages[0]: model}
    parts = {}
    for stage in stages:
        part = parts[stage] = copy(model)
        part._modules = dict(model._modules)
        part.layers = nn.ModuleDict(dict(layers_of(model).items()))
        _keep(part, set(strategy.stage_layers(spec.num_layers)[stage]))
        _keep_ends(part, *strategy.stage_ends(stage))
    return parts


def _keep(model: nn.Module, layers: set[int]) -> None:
    held = layers_of(model)
    for name in list(held):
        if int(name) not in layers:
            del held[name]


def _keep_ends(model: nn.Module, first: bool, last: bool) -> None:
    for name in (*(() if first else FIRST), *(() if last else LAST)):
        setattr(model, name, None)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of this rank, and the pipeline ranks of its neighbours: None beyond the ends."""

    module: nn.Module
    before: int | None
    after: int | None


class _Enter(torch.autograd.Function):
    """x, of which only those who keep it for backward still know; its gradient is left in `into`."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, into: _Input) -> torch.Tensor:
        ctx.into = into
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.into.grad = grads[0]
        return None, None, None


class _Input:
    """A stage's input until it is used, and its gradient from backward on."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x: torch.Tensor | None = x
        self.grad: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """To be called once."""
        x, self._x = self._x, None
        assert x is not None
        if not torch.is_grad_enabled():
            return x
        return _Enter.apply(torch.empty(0, requires_grad=True), x, self)


@dataclass(slots=True)
class _InFlight:
    """What a stage keeps of one micro-batch between its forward and its backward."""

    into: _Input | None = None
    """Input, and the gradient to pass back; None on the first stage."""
    out: torch.Tensor | None = None
    """Output until it is sent."""
    edge: GradientEdge | None = None
    """Where backward starts; the output's memory is free once it was sent. None where nothing is trained."""
    gradient: torch.Tensor | None = None
    """Gradient of the output, received; of the loss, what backward starts with."""
    arrival: Work | None = None
    """Of the input or the gradient, that is on its way from another rank."""

    @property
    def input_gradient(self) -> torch.Tensor | None:
        """What is to be passed back, once backward has run."""
        return None if self.into is None else self.into.grad


@dataclass(slots=True)
class UnderWay:
    """One run over a row, or over parts of one: its micro-batches, and what is under way by (stage, micro-batch)."""

    micro_batches: Mapping[int, Share]
    loss_gradients: Mapping[int, torch.Tensor]
    """What backward of each micro-batch's loss sum starts with."""
    num_tags: int
    """From so many micro-batches on the tags of messages are used again."""
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    products: dict[tuple[int, int], deque[Product]] = field(default_factory=dict)
    """What I has left for W."""
    sends: deque[Work] = field(default_factory=deque)
    losses: list[torch.Tensor] = field(default_factory=list)


class StageRunner:
    """Runs one rank's row of a Program over its stages of the model.

    Args:
        stages: number → module, as :func:`split` returns them.
        loss: (logits, labels) → sum of the counted tokens' losses; called on the last stage.
        products: where linear layers leave their weight gradients.
        activations: where layers leave what they keep for backward; None: it stays on the device.
        hidden_shape: shape [b, n] of this rank's tokens → shape of its part of a boundary tensor.
        dtype: of the boundary tensors.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        loss: nn.Module,
        mesh: Mesh,
        strategy: Strategy,
        reducer: GradientReducer,
        gatherer: Gatherer,
        products: Products,
        activations: KeptActivations | None,
        hidden_shape: Callable[[torch.Size], tuple[int, int, int]],
        dtype: torch.dtype,
    ) -> None:
        self._stages = {stage: _neighbours(module, stage, strategy) for stage, module in stages.items()}
        self._loss = loss
        self._mesh = mesh
        self._pp = mesh[PP]
        self._reducer = reducer
        self._gatherer = gatherer
        self._products = products
        self._activations = activations
        self.trace: list[tuple[Action, float, float]] | None = None
        """Set to a list to record (action, start, end) in seconds; None records nothing."""
        self.before_backward: Callable[[], None] = lambda: None
        """Called before each backward."""
        self.watch: Callable[[Action | None], None] = lambda action: None
        """Called before each action, and with None after the last."""
        self.on_micro_batch: Callable[[int], None] = lambda number: None
        """Called before forward and backward of a micro-batch, with its number."""
        self._hidden_shape = hidden_shape
        self._dtype = dtype
        self._do = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradients,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
            Kind.ARM: lambda step, action: self._reducer.arm(action.stage),
            Kind.REDUCE: lambda step, action: self._reducer.finish(action.stage),
        }

    def run(self, row: Sequence[Action], micro_batches: Sequence[Share], loss_gradient: torch.Tensor) -> torch.Tensor:
        """Carry out `row`. Returns the sum of losses where the last stage stands, zero elsewhere (float64 scalar).

        Args:
            loss_gradient: what backward of the loss sum starts with: 1 / counted tokens of the step.
        """
        numbers = range(len(micro_batches))
        step = UnderWay(dict(enumerate(micro_batches)), dict.fromkeys(numbers, loss_gradient), len(micro_batches))
        for action in row:
            self.act(step, action)
        self.end(step)
        self.watch(None)
        return self.take_losses(step)

    def act(self, step: UnderWay, action: Action, do: Callable[[UnderWay, Action], None] | None = None) -> None:
        """Carry out one action, by `do` if it is one that this runner does not know."""
        self.watch(action)
        self._await(step, action)
        began_s = perf_counter()
        (do or self._do[action.kind])(step, action)
        if self.trace is not None:
            self.trace.append((action, began_s, perf_counter()))

    @staticmethod
    def _await(step: UnderWay, action: Action) -> None:
        """What an action uses of what is on its way; what others will use may still come."""
        flight = None if action.micro_batch is None else step.in_flight.get(action.place)
        if flight is not None and flight.arrival is not None:
            flight.arrival.wait()
            flight.arrival = None

    def end(self, step: UnderWay) -> None:
        """Wait for what was sent."""
        while step.sends:
            step.sends.popleft().wait()

    def take_losses(self, step: UnderWay) -> torch.Tensor:
        """Sum of the losses since it was last taken (float64 scalar)."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for loss in step.losses:
            total += loss
        step.losses.clear()
        return total

    def _boundary(self, step: UnderWay, action: Action) -> torch.Tensor:
        tokens = step.micro_batches[action.place[1]].tokens
        return torch.empty(self._hidden_shape(tokens.shape), dtype=self._dtype, device=tokens.device)

    def _forward(self, step: UnderWay, action: Action) -> None:
        stage, (_, k) = self._stages[action.stage], action.place
        self.on_micro_batch(k)
        share = step.micro_batches[k]
        flight = step.in_flight.setdefault(action.place, _InFlight())
        with self._mesh.ledger.phase("forward"), self._gatherer.forward(action.stage), self._keeping(action, share):
            out = stage.module(share.tokens if flight.into is None else flight.into.take(), *share.further)
            if stage.after is None:
                out = self._loss(out, share.labels)
                step.losses.append(out.detach())
        flight.edge = get_gradient_edge(out) if out.requires_grad else None
        if stage.after is None:
            flight.gradient = step.loss_gradients[k].to(out.dtype)
        elif stage.after == self._pp.index:
            step.in_flight[action.stage + 1, k] = _InFlight(into=_Input(out.detach()))
        else:
            flight.out = out
        if not torch.is_grad_enabled() and flight.out is None:
            del step.in_flight[action.place]  # evaluation: nothing comes back

    def _keeping(self, action: Action, share: Share) -> AbstractContextManager[None]:
        """Around a forward: what its layers keep leaves the device, if that is asked for."""
        if self._activations is None or not torch.is_grad_enabled():
            return nullcontext()
        return self._activations.forward(*action.place, share.tensors)

    def _backward(self, step: UnderWay, action: Action) -> None:
        flight, (stage, k) = step.in_flight[action.place], action.place
        self.before_backward()
        self._reducer.start_backward(stage)
        self.on_micro_batch(k)
        if self._activations is not None:
            self._activations.ask(stage, k)
        with self._mesh.ledger.phase("backward"), self._gatherer.backward(action.stage):
            if flight.edge is not None:
                torch.autograd.backward(flight.edge, flight.gradient)
        self._reducer.end_backward()
        flight.edge = flight.gradient = None
        self._hand_back(step, action)

    def _hand_back(self, step: UnderWay, action: Action) -> None:
        """The gradient of a stage's input, to where it goes; one for another rank waits for its SEND."""
        before, (stage, k) = self._stages[action.stage].before, action.place
        if before == self._pp.index:
            step.in_flight[stage - 1, k].gradient = step.in_flight[stage, k].input_gradient
        if before in (None, self._pp.index):
            del step.in_flight[stage, k]

    def _input_gradient(self, step: UnderWay, action: Action) -> None:
        with self._products.postponed() as left:
            self._backward(step, action)
        step.products[action.place] = left

    def _weight_gradients(self, step: UnderWay, action: Action) -> None:
        left = step.products.pop(action.place)
        self._reducer.start_backward(action.stage, [sink for product in left for sink in product.sinks])
        with self._mesh.ledger.phase("backward"):
            while left:
                left.popleft().write()
        self._reducer.end_backward()

    def _send_forward(self, step: UnderWay, action: Action) -> None:
        flight, to = step.in_flight[action.place], self._stages[action.stage].after
        assert flight.out is not None
        assert to is not None
        with self._mesh.ledger.phase("forward"):
            self._post(step, send_start(flight.out.detach(), self._pp, to, _tag(step, action)))
        flight.out = None
        if not torch.is_grad_enabled():
            del step.in_flight[action.place]  # evaluation: nothing comes back

    def _receive_forward(self, step: UnderWay, action: Action) -> None:
        into, source = self._boundary(step, action), self._stages[action.stage].before
        assert source is not None
        arrival = recv_start(into, self._pp, source, _tag(step, action))
        step.in_flight[action.place] = _InFlight(into=_Input(into), arrival=arrival)

    def _send_backward(self, step: UnderWay, action: Action) -> None:
        flight, to = step.in_flight.pop(action.place), self._stages[action.stage].before
        gradient = flight.input_gradient
        assert gradient is not None
        assert to is not None
        with self._mesh.ledger.phase("backward"):
            self._post(step, send_start(gradient, self._pp, to, _tag(step, action)))

    def _post(self, step: UnderWay, send: Work) -> None:
        """Keep a send alive, and few of them, so that sent outputs do not pile up."""
        step.sends.append(send)
        while len(step.sends) > MAX_SENDS:
            step.sends.popleft().wait()

    def _receive_backward(self, step: UnderWay, action: Action) -> None:
        gradient, source = self._boundary(step, action), self._stages[action.stage].after
        assert source is not None
        flight = step.in_flight[action.place]
        flight.arrival = recv_start(gradient, self._pp, source, _tag(step, action))
        flight.gradient = gradient


def _neighbours(module: nn.Module, stage: int, strategy: Strategy) -> _Stage:
    first, last = strategy.stage_ends(stage)
    ranks = strategy.stage_ranks
    return _Stage(module, None if first else ranks[stage - 1], None if last else ranks[stage + 1])


_PRODUCER = {Kind.SEND_F: 0, Kind.RECV_F: -1, Kind.SEND_B: 0, Kind.RECV_B: 1}
"""Stage that makes what is carried, from the action's own."""


def _tag(step: UnderWay, action: Action) -> int:
    """Distinguishes the messages of a step, of which two ranks may exchange those of several boundaries."""
    stage, k = action.place
    place = (stage + _PRODUCER[action.kind]) * step.num_tags + k % step.num_tags
    return 2 * place + (action.kind in (Kind.SEND_B, Kind.RECV_B))
