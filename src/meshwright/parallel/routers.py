"""Routers of a rank's layers in training: what their losses are multiplied by, their statistics over all ranks, biases.

What it divides: nothing. Each rank counts the tokens that it routes; once per step the counts are summed over all ranks
that train on other tokens:

    forward, each micro-batch ─▶ statistics [layers, 3·E + 4] ──all_reduce──▶ of the whole step ─▶ losses, loads, biases

A loss over the batch needs the shares f of all tokens before the first backward: there the sum comes then, and every
forward of the step before it (rule `balance`). The others need no communication of their own.
What it costs: an all-reduce of the statistics per step; phase `router` in `cost.traffic`; `cost.experts`.

Where a sequence's tokens lie on several ranks (context parallelism, Megatron's sequence parallelism), routing is by
token as ever. What is of a whole sequence comes from all of its ranks:

    balance loss over sequences    f [b, E] ──all_reduce──▶ of whole sequences
    capacity, expert choice        logits [b, n, E] ──all_gather──▶ [b, s, E] ─▶ choice ─▶ own tokens of it

Sources: Qiu et al. 2025 (balance over the batch), Wang et al. 2024 (biases).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from meshwright.comm.collectives import all_gather, all_reduce
from meshwright.comm.mesh import Axis
from meshwright.core.layouts import Balance
from meshwright.core.model import ModelSpec
from meshwright.core.tokens import positions


@dataclass(slots=True)
class Scales:
    """What the losses of all routers are multiplied by in backward."""

    scale: torch.Tensor | float = 1.0
    """What the backward of the whole loss starts with: 1, or the loss scale."""
    num_tokens: torch.Tensor | float = 1.0
    num_sequences: torch.Tensor | float = 1.0


@dataclass(frozen=True, slots=True)
class RouterReport:
    """What the routers of a rank's layers did in a step, over all ranks."""

    layers: tuple[int, ...]
    chosen: torch.Tensor
    """[layers, E]: choices of each expert."""
    taken: torch.Tensor
    """[layers, E]: tokens that it took."""
    balance: torch.Tensor
    """[layers]: E · Σ f·p as the gate takes it, without its coefficient; over the batch where it takes none."""
    z: torch.Tensor
    """[layers]: mean squared log-sum-exp."""

    @property
    def dropped(self) -> torch.Tensor:
        """[layers]: choices that no expert had room for."""
        return self.chosen.sum(1) - self.taken.sum(1)

    @property
    def imbalance(self) -> torch.Tensor:
        """[layers]: the largest load over the mean load; 1 where they are even."""
        return self.chosen.amax(1) / self.chosen.mean(1).clamp(min=1)


class CutSequences:
    """Sequences whose tokens lie on the ranks of `cp`, and each of these shares on those of `tp`.

    Args:
        cp: the axis of context parallelism.
        balance: which tokens each of its ranks has.
        tp: the axis over which a share is cut in turn, neighbours together; None: it is not.
    """

    def __init__(self, cp: Axis, balance: Balance, tp: Axis | None) -> None:
        self._cp, self._balance, self._tp = cp, balance, tp
        self._axes = [axis for axis in (tp, cp) if axis is not None and axis.size > 1]
        self.num_parts = prod(axis.size for axis in self._axes)
        self._tables: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] over all parts, in place."""
        for axis in self._axes:
            all_reduce(x, axis)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, n, ...] of one part as [b, s, ...] of whole sequences, in their order."""
        for axis in self._axes:
            parts = all_gather(x.new_empty((axis.size, *x.shape)), x.contiguous().unsqueeze(0), axis)
            x = parts.movedim(0, 1).flatten(1, 2)
        return x.index_select(1, self._table(x.shape[1], x.device)[0])

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        return x.index_select(1, self._table(x.shape[1], x.device)[1])

    def _table(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(where in the parts, one behind the other, each token of a sequence stands [s]; own positions [n])."""
        if (length, device) not in self._tables:
            cp, tp = self._cp, self._tp
            by_rank = [torch.tensor(positions(self._balance, length, cp.size, rank)) for rank in range(cp.size)]
            own = by_rank[cp.index] if tp is None else by_rank[cp.index].chunk(tp.size)[tp.index]
            self._tables[length, device] = torch.cat(by_rank).argsort().to(device), own.to(device)
        return self._tables[length, device]


class Router(Protocol):
    """What is set of a layer's router; `models.experts.Router` says what it means."""

    bias: torch.Tensor | None
    statistics: torch.Tensor | None
    scales: Any
    counts: bool
    sequences: Any


class Routers:
    """The routers of some layers.

    Args:
        routers: layer → its router, whose attributes are set.
        spec: the model.
        sum_up: sums a tensor over all ranks whose tokens differ, in place.
        counts_once: whether this rank is the one of those with the same layers that reports their losses (but for tp).
        sequences: where the other tokens of a sequence are; None: there are none.
        sum_stages: sums a tensor over the pipeline ranks, in place; None: all layers are here.
        is_twin: whether another pipeline rank has the same layers, and reports them.
    """

    def __init__(
        self,
        routers: Mapping[int, Router],
        spec: ModelSpec,
        device: torch.device,
        sum_up: Callable[[torch.Tensor], object] = lambda x: None,
        *,
        counts_once: bool = True,
        sequences: CutSequences | None = None,
        sum_stages: Callable[[torch.Tensor], object] | None = None,
        is_twin: bool = False,
    ) -> None:
        self._routers, self._spec, self._sum_up = dict(routers), spec, sum_up
        self.counts_once = counts_once
        self._sum_stages, self._is_twin = sum_stages, is_twin
        self.scales = Scales()
        self.statistics = torch.zeros(len(routers), 3 * spec.num_experts + 4, dtype=torch.float64, device=device)
        self._is_summed = False
        for router in self._routers.values():
            if sequences is not None:
                router.sequences = sequences
            if router.bias is not None:
                router.bias = torch.zeros_like(router.bias, device=device) if router.bias.is_meta else router.bias

    @property
    def biases(self) -> dict[str, torch.Tensor]:
        """Name of each layer's router bias → its values [E], fp32; none where the gate has none."""
        has = {layer: router.bias for layer, router in self._routers.items() if router.bias is not None}
        return {f"layers.{layer}.mlp.router.bias": bias for layer, bias in has.items()}

    @property
    def bytes(self) -> int:
        """Of statistics and biases."""
        return self.statistics.nbytes + sum(bias.nbytes for bias in self.biases.values())

    def start_step(self) -> None:
        """Nothing is counted yet."""
        self.statistics.zero_()
        self._is_summed = False

    @contextmanager
    def training(self, totals: torch.Tensor, scale: torch.Tensor | float) -> Iterator[None]:
        """Around the forwards and backwards of a step: they are counted, and losses are added.

        Args:
            totals: (tokens, sequences) of the whole step, over all ranks.
            scale: of the loss.
        """
        self.scales.num_tokens, self.scales.num_sequences = totals
        self.scales.scale = scale
        for place, router in enumerate(self._routers.values()):
            router.statistics = self.statistics[place]
            router.scales = self.scales if self._spec.gate.has_losses else None
        try:
            yield
        finally:
            for router in self._routers.values():
                router.statistics, router.scales = None, None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a forward that is run again: its tokens were counted."""
        for router in self._routers.values():
            router.counts = False
        try:
            yield
        finally:
            for router in self._routers.values():
                router.counts = True

    def before_backward(self) -> None:
        """Where a loss over the batch needs it: the statistics of all ranks."""
        if self._spec.gate.balance_loss and self._spec.gate.balance_over == "batch":
            self.sum_statistics()

    @torch.no_grad()
    def sum_statistics(self) -> None:
        """Sum the step's statistics over all ranks, once."""
        if not self._is_summed:
            self._is_summed = True
            if self.statistics.numel():
                self._sum_up(self.statistics)

    @torch.no_grad()
    def report(self) -> RouterReport:
        """Of the last step, after :meth:`sum_statistics`."""
        num, gate = self._spec.num_experts, self._spec.gate
        chosen, taken, scores, sums = self.statistics.clone().split([num, num, num, 4], dim=1)
        balance, z, sequences, tokens = sums.unbind(1)
        if not gate.balances_sequences:
            mean = scores / tokens.clamp(min=1).unsqueeze(1)
            balance = num * (chosen / chosen.sum(1, keepdim=True).clamp(min=1) * mean).sum(1)
        else:
            balance = balance / sequences.clamp(min=1)
        return RouterReport(tuple(self._routers), chosen, taken, balance, z / tokens.clamp(min=1))

    @torch.no_grad()
    def whole_report(self) -> RouterReport:
        """Of the last step, of all layers of the model."""
        own = self.report()
        if self._sum_stages is None:
            return own
        layers = [layer for layer in range(self._spec.num_layers) if self._spec.is_sparse(layer)]
        num = self._spec.num_experts
        found = self.statistics.new_zeros(len(layers), 2 * num + 2)
        if own.layers and not self._is_twin:
            values = torch.cat([own.chosen, own.taken, own.balance.unsqueeze(1), own.z.unsqueeze(1)], dim=1)
            found[[layers.index(layer) for layer in own.layers]] = values
        self._sum_stages(found)
        chosen, taken, sums = found.split([num, num, 2], dim=1)
        return RouterReport(tuple(layers), chosen, taken, *sums.unbind(1))

    @torch.no_grad()
    def loss(self) -> torch.Tensor:
        """This rank's share of the losses of all layers (float64 scalar)."""
        if not self.counts_once or not self.statistics.numel():
            return torch.zeros((), dtype=torch.float64, device=self.statistics.device)
        report, gate = self.report(), self._spec.gate
        return gate.balance_loss * report.balance.sum() + gate.z_loss * report.z.sum()

    @torch.no_grad()
    def update_biases(self, skipped: torch.Tensor) -> None:
        """Raise the bias of experts that got less than the mean load, lower the others', unless the step is skipped."""
        rate = torch.where(skipped, 0.0, self._spec.gate.bias_rate)
        for place, router in enumerate(self._routers.values()):
            if router.bias is not None:
                loads = self.statistics[place, : self._spec.num_experts]
                router.bias += (rate * (loads.mean() - loads).sign()).to(router.bias.dtype)
