"""Experts over ranks: each expert cut over etp, its first products by columns, its last one by rows; and different
experts on different ranks of ep (Lepikhin et al. 2020, GShard; Fedus et al. 2021). Without a choice, etp is tp.

What it divides:

    x [T,h], weights [T,k] ──copy_to──▶ rows · gate, up (columns) ─▶ · down (rows) ─▶ weighed sum ──reduce_from──▶ y
                           AR in backward                                                          AR in forward

All ranks of a tp group route alike: router and weights are whole on each. So a token's output is summed over tp once,
after its experts' outputs were, and the gradient of the weights too. With Megatron's sequence parallelism each routes
its own tokens, and the experts take those of all tp ranks: x, weights and choices are gathered, and y is scattered.
Where etp is not tp, every rank of a stage has tokens of its own: those of a sequence's share, or, where the tp ranks
route alike, a block of all, which they gather again behind the experts. The ranks of an etp group gather theirs, and y
is scattered over etp:

    x [T,h] ──own block──▶ [T/t,h] ──gather, etp──▶ rows · part of an expert ──reduce-scatter, etp──▶ ──gather, tp──▶ y

With ep, rank q holds experts q·E/e to (q+1)·E/e, and tokens travel:

    rows by expert [n,h] ──all-to-all──▶ rows for own experts, of each rank in turn ─▶ experts ─▶ ──all-to-all──▶ [n,h]

How many rows come is known after an all-to-all of counts. Shared experts run while rows travel to the experts, forward,
and while gradients travel back, backward. Rows are copied nowhere but in front and at the end: runs of
one rank after the other are multiplied as they lie. An expert's gradient has summed over the tokens of all ranks of ep,
so that it is summed over edp only.
What it needs: rules `tp-ffn`, `experts`, `expert-degree`. What it costs: as an MLP, and backward k numbers per token
more over tp; over ep two exchanges of k·T rows forward and two backward; over etp what `cut` says; `cost.experts`.
Source of two meshes over the same ranks: Liu et al. 2025 (MoE parallel folding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from meshwright.comm.collectives import all_gather, all_to_all, reduce_scatter
from meshwright.comm.differentiable import (
    all_to_all_first,
    all_to_all_first_start,
    arrived,
    copy_to,
    gather_first,
    gather_first_partial,
    reduce_from,
    reduce_scatter_first,
    scatter_first,
)
from meshwright.comm.mesh import Axis
from meshwright.core.layouts import SequenceKind
from meshwright.core.model import ModelSpec
from meshwright.parallel.layers import part_of

Write = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], Callable[[int], None]]


class ExpertLinear(nn.Module):
    """One matrix of each expert, of which this rank has a part.

    Attributes:
        write: (gradients, inputs, rows of each run) → what takes the weight's products instead of autograd, by run's
            index; `parallel.direct` sets it.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.weight = plain.weight
        self.write: Write | None = None


class Experts(Protocol):
    """A layer's experts, as they are used here."""

    def run(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Rows [n, h] run by run, of the experts in turn."""

    def meanwhile(self) -> None:
        """What can be done while rows travel."""


class Exchange:
    """What computes the rows of a layer's experts where these stand on the ranks of ep: (rows, loads [E]) → rows."""

    def __init__(self, experts: Experts, axis: Axis) -> None:
        self._experts, self._axis = experts, axis
        self.last: tuple[list[int], list[int]] = ([], [])
        """Rows that this rank has sent to each rank last, and that have come from each."""

    def __call__(self, rows: torch.Tensor, loads: torch.Tensor) -> torch.Tensor:
        sent, counts = self._counts(rows, loads)
        num = len(counts) // self._axis.size
        received = [sum(counts[at : at + num]) for at in range(0, len(counts), num)]
        self.last = sent, received
        coming, flight = all_to_all_first_start(rows, self._axis, received, sent)
        self._experts.meanwhile()
        own = arrived(coming, self._axis, received, sent, flight)
        return all_to_all_first(self._experts.run(own, counts), self._axis, sent, received)

    @torch.no_grad()
    def _counts(self, rows: torch.Tensor, loads: torch.Tensor) -> tuple[list[int], list[int]]:
        """(rows for each rank, rows of each run that come: by rank, then by own expert)."""
        coming = all_to_all(torch.empty_like(loads), loads.contiguous(), self._axis)
        if loads.is_meta or is_fake(loads):  # nothing is known: evenly
            by_rank = _even(len(rows), self._axis.size)
            return by_rank, [count for some in by_rank for count in _even(some, len(loads) // self._axis.size)]
        return loads.view(self._axis.size, -1).sum(1).tolist(), coming.tolist()


def _even(total: int, parts: int) -> list[int]:
    base, extra = divmod(total, parts)
    return [base + (index < extra) for index in range(parts)]


def spread(layers: nn.ModuleDict, spec: ModelSpec, axis: Axis) -> dict[int, Exchange]:
    """Let the experts of these layers exchange their rows over ep, in place. Weights are cut by placement."""
    exchanges = {}
    for name, layer in layers.items():
        if spec.is_sparse(int(name)):
            experts = part_of(layer, "mlp.experts")
            exchanges[int(name)] = experts.compute = Exchange(experts, axis)
    return exchanges


class OwnExperts:
    """What computes the rows of a layer's experts where every rank of ep has the tokens of all: those of its own
    experts, and zeros for the others, so that the sum over ep is whole: (rows, loads [E]) → rows. Without gradients."""

    def __init__(self, experts: Experts, axis: Axis) -> None:
        self._run, self._axis = experts.run, axis

    def __call__(self, rows: torch.Tensor, loads: torch.Tensor) -> torch.Tensor:
        counts: list[int] = loads.tolist()
        num = len(counts) // self._axis.size
        first = num * self._axis.index
        own = counts[first : first + num]
        start, out = sum(counts[:first]), torch.zeros_like(rows)
        if count := sum(own):
            out[start : start + count] = self._run(rows[start : start + count], own)
        return out


class Shared:
    """Tokens of the ranks of ep, each of which has its own, as in serving: all go to every rank, which runs those of
    its own experts, and sums go back. Unlike in training numbers of tokens are known beforehand, and may be 0.

        x [T,h] ──all-gather──▶ [ΣT,h] ─ rows of own experts ─▶ weighed sum [ΣT,h] ──reduce-scatter──▶ y [T,h]

    Args:
        axis: ep.

    Attributes:
        counts: tokens of each rank, which whoever runs the model sets before.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self.counts: Sequence[int] = [0] * axis.size

    def attach(self, experts: Any) -> None:
        """Put it around a layer's experts."""
        experts.compute = OwnExperts(experts, self._axis)
        experts.register_forward_pre_hook(lambda _, inputs: self._gathered(*inputs))
        experts.register_forward_hook(lambda _, inputs, out: self._scattered(out))

    def _gathered(self, x: torch.Tensor, weights: torch.Tensor, choice: Any) -> tuple[Any, ...]:
        found = self._gather(choice.experts)
        return self._gather(x), self._gather(weights), replace(choice, experts=found)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ..] of every rank, one after the other."""
        most = max(self.counts)
        padded = x.new_zeros(most, x.shape[1])
        padded[: len(x)] = x
        together = all_gather(x.new_empty(most * self._axis.size, x.shape[1]), padded, self._axis)
        return torch.cat([part[:count] for part, count in zip(together.split(most), self.counts, strict=True)])

    def _scattered(self, out: torch.Tensor) -> torch.Tensor:
        most = max(self.counts)
        padded = out.new_zeros(self._axis.size, most, out.shape[1])
        for block, part in zip(padded, out.split(list(self.counts)), strict=True):
            block[: len(part)] = part
        own = out.new_empty(most, out.shape[1])
        reduce_scatter(own, padded.flatten(0, 1), self._axis)
        return own[: self.counts[self._axis.index]]


def share(layers: nn.ModuleDict, spec: ModelSpec, axis: Axis) -> Shared:
    """Let ranks with tokens of their own, as in serving, run different experts of these layers, in place."""
    shared = Shared(axis)
    for name, layer in layers.items():
        if spec.is_sparse(int(name)):
            shared.attach(part_of(layer, "mlp.experts"))
    return shared


@dataclass(frozen=True, slots=True)
class Width:
    """Over which ranks each expert's width is cut, where they are not those of tp.

    Attributes:
        axis: etp.
        num_sequences: so many times a rank's own sequences have tokens on its ranks.
    """

    axis: Axis
    num_sequences: int = 1


def cut(experts: nn.Module, axis: Axis, sequence: SequenceKind = "none", width: Width | None = None) -> None:
    """Let a layer's experts take and give whole inputs and outputs over tp, or a rank's tokens of them. Weights are cut
    by placement.

    Args:
        axis: tp.
        width: None: it is cut over tp.
    """
    if width is None and sequence == "none":
        experts.register_forward_pre_hook(lambda _, inputs: (*(copy_to(x, axis) for x in inputs[:2]), *inputs[2:]))
        experts.register_forward_hook(lambda _, inputs, out: reduce_from(out, axis))
        return
    over = width or Width(axis)
    if sequence == "none" and axis.size > 1:
        experts.register_forward_pre_hook(lambda _, inputs: _apart(inputs, axis))
    if over.axis.size > 1:
        experts.register_forward_pre_hook(lambda _, inputs: _together(inputs, over))
        experts.register_forward_hook(lambda _, inputs, out: reduce_scatter_first(out, over.axis))
    if sequence == "none" and axis.size > 1:
        experts.register_forward_hook(lambda _, inputs, out: gather_first(out, axis))


Inputs = tuple[torch.Tensor, torch.Tensor, Any]
"""Of a layer's experts: tokens x [T, h], weights, and the choice of experts."""


def _apart(inputs: Inputs, axis: Axis) -> Inputs:
    """This rank's block of what all tp ranks have."""
    x, weights, choice = inputs
    kept = None if choice.kept is None else choice.kept.chunk(axis.size)[axis.index]
    own = replace(choice, experts=choice.experts.chunk(axis.size)[axis.index], kept=kept)
    return scatter_first(x, axis), scatter_first(weights, axis), own


def _together(inputs: Inputs, width: Width) -> Inputs:
    """Tokens, their weights and experts, of all ranks of an axis one after the other."""
    x, weights, choice = inputs
    axis, most = width.axis, choice.most and choice.most * width.num_sequences
    own = choice.experts if choice.kept is None else torch.where(choice.kept, choice.experts, ~choice.experts)
    own = own.to(torch.int32)  # what is not kept is negative
    found = all_gather(own.new_empty((len(own) * axis.size, own.shape[1])), own.contiguous(), axis).long()
    if choice.kept is None:
        chosen = replace(choice, experts=found, most=most)
    else:
        chosen = replace(choice, experts=torch.where(found < 0, ~found, found), kept=found >= 0, most=most)
    return gather_first_partial(x, axis), gather_first_partial(weights, axis), chosen
