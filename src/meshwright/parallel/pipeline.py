"""Pipeline parallelism: a stage of the model, and the interpreter that runs one row of any Program.

What it divides: the layers, contiguously (Huang et al. 2019, GPipe).
What it needs: rules `pp-layers`, `pp-layer-list`. What it costs: one hidden state per boundary,
micro-batch and direction; activations by the table's peak of live micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.comm.collectives import Work
from meshwright.comm.mesh import Mesh
from meshwright.comm.p2p import recv_start, send_start
from meshwright.core.axes import PP
from meshwright.core.batch import MicroBatch
from meshwright.core.model import ModelSpec
from meshwright.core.program import Action, Kind
from meshwright.core.strategy import Strategy
from meshwright.parallel.data import GradientReducer
from meshwright.parallel.gather import Gatherer

MAX_SENDS = 2
"""Sends under way per rank before the oldest is waited for."""


def _tag(action: Action) -> int:
    """Distinguishes the messages between two stages within a step."""
    return 2 * action.micro_batch + (action.kind in (Kind.SEND_B, Kind.RECV_B))


def cut(model: nn.Module, spec: ModelSpec, strategy: Strategy, stage: int) -> None:
    """Leave in `model` only what stage `stage` runs, in place."""
    keep = {str(layer) for layer in strategy.stage_layers(spec.num_layers)[stage]}
    for name in list(model.layers):
        if name not in keep:
            del model.layers[name]
    if stage > 0:
        model.embedding = model.positions = None
    if stage < strategy.pp - 1:
        model.final_norm = model.head = None


@dataclass(slots=True)
class _InFlight:
    """What a stage keeps of one micro-batch between its forward and its backward."""

    into: torch.Tensor | None = None
    """Input, a leaf that collects the gradient to send back; None on the first stage."""
    out: torch.Tensor | None = None
    """Output until it is sent, or the loss on the last stage."""
    edge: GradientEdge | None = None
    """Where backward starts; the output's memory is free once it was sent."""
    gradient: torch.Tensor | None = None
    """Gradient of the output, received."""


@dataclass(slots=True)
class _Step:
    """One run over a row: its micro-batches and what is under way."""

    micro_batches: Sequence[MicroBatch]
    loss_gradient: torch.Tensor
    in_flight: dict[int, _InFlight] = field(default_factory=dict)
    sends: deque[Work] = field(default_factory=deque)
    losses: list[torch.Tensor] = field(default_factory=list)


class StageRunner:
    """Runs one rank's row of a Program over one stage of the model.

    Args:
        model: the stage, cut from the model.
        loss: (logits, labels) → sum of the counted tokens' losses; called on the last stage.
        hidden_size, dtype: of the boundary tensors [b, s, h].
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        mesh: Mesh,
        reducer: GradientReducer,
        gatherer: Gatherer,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._loss = loss
        self._mesh = mesh
        self._pp = mesh[PP]
        self._reducer = reducer
        self._gatherer = gatherer
        self.trace: list[tuple[Action, float, float]] | None = None
        """Set to a list to record (action, start, end) in seconds; None records nothing."""
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._do = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
            Kind.ARM: lambda step, action: self._reducer.arm(),
            Kind.REDUCE: lambda step, action: self._reducer.finish(),
        }

    @property
    def is_first(self) -> bool:
        return self._pp.index == 0

    @property
    def is_last(self) -> bool:
        return self._pp.index == self._pp.size - 1

    def run(
        self, row: Sequence[Action], micro_batches: Sequence[MicroBatch], loss_gradient: torch.Tensor
    ) -> torch.Tensor:
        """Carry out `row`. Returns the sum of losses on the last stage, zero elsewhere (float64 scalar).

        Args:
            loss_gradient: what backward of the loss sum starts with: 1 / counted tokens of the step.
        """
        step = _Step(micro_batches, loss_gradient)
        for action in row:
            began_s = perf_counter()
            self._do[action.kind](step, action)
            if self.trace is not None:
                self.trace.append((action, began_s, perf_counter()))
        for work in step.sends:
            work.wait()
        total = torch.zeros((), dtype=torch.float64, device=loss_gradient.device)
        for loss in step.losses:
            total += loss
        return total

    def _boundary(self, step: _Step, micro_batch: int) -> torch.Tensor:
        tokens = step.micro_batches[micro_batch][0]
        return torch.empty((*tokens.shape, self._hidden_size), dtype=self._dtype, device=tokens.device)

    def _forward(self, step: _Step, action: Action) -> None:
        tokens, labels = step.micro_batches[action.micro_batch]
        flight = step.in_flight.setdefault(action.micro_batch, _InFlight())
        with self._mesh.ledger.phase("forward"), self._gatherer.forward():
            out = self._model(tokens if flight.into is None else flight.into)
            if self.is_last:
                out = self._loss(out, labels)
                step.losses.append(out.detach())
        flight.out = out
        if out.requires_grad:
            flight.edge = get_gradient_edge(out)
            flight.gradient = step.loss_gradient.to(out.dtype) if self.is_last else None
        if self.is_last:
            flight.out = None
            if flight.edge is None:
                del step.in_flight[action.micro_batch]  # evaluation: nothing comes back

    def _backward(self, step: _Step, action: Action) -> None:
        flight = step.in_flight[action.micro_batch]
        self._reducer.start_backward()
        with self._mesh.ledger.phase("backward"), self._gatherer.backward():
            torch.autograd.backward(flight.edge, flight.gradient)
        self._reducer.end_backward()
        flight.edge = flight.gradient = None
        if self.is_first:
            del step.in_flight[action.micro_batch]

    def _send_forward(self, step: _Step, action: Action) -> None:
        flight = step.in_flight[action.micro_batch]
        with self._mesh.ledger.phase("forward"):
            self._post(step, send_start(flight.out.detach(), self._pp, self._pp.index + 1, _tag(action)))
        flight.out = None
        if flight.edge is None:
            del step.in_flight[action.micro_batch]  # evaluation: nothing comes back

    def _receive_forward(self, step: _Step, action: Action) -> None:
        into = self._boundary(step, action.micro_batch)
        recv_start(into, self._pp, self._pp.index - 1, _tag(action)).wait()
        step.in_flight[action.micro_batch] = _InFlight(into=into.requires_grad_(torch.is_grad_enabled()))

    def _send_backward(self, step: _Step, action: Action) -> None:
        flight = step.in_flight.pop(action.micro_batch)
        with self._mesh.ledger.phase("backward"):
            self._post(step, send_start(flight.into.grad, self._pp, self._pp.index - 1, _tag(action)))

    def _post(self, step: _Step, send: Work) -> None:
        """Keep a send alive, and few of them, so that sent outputs do not pile up."""
        step.sends.append(send)
        while len(step.sends) > MAX_SENDS:
            step.sends.popleft().wait()

    def _receive_backward(self, step: _Step, action: Action) -> None:
        gradient = self._boundary(step, action.micro_batch)
        recv_start(gradient, self._pp, self._pp.index + 1, _tag(action)).wait()
        step.in_flight[action.micro_batch].gradient = gradient
