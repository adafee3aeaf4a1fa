"""The MLPs of experts over rows that lie expert by expert, as one differentiable function.

    rows [n,h] ─ gate, up ─▶ [n,f] each ─ act(gate) · up ─▶ inner [n,f] ─ down ─▶ [n,h]

Nothing is padded. Autograd keeps the rows, gate, up and inner. On a CPU each run of rows goes all the way before the
next one, so that what is between the products is done in the cache, and in backward an expert's rows and matrices serve
all of its products; elsewhere all runs go together from one step to the next. Backward writes the gradients of gate and
up where these were, so that it runs once.

Source: Gale et al. 2022 (MegaBlocks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from meshwright.models.rows import blocks, in_cache

Take = Callable[[int], None]
"""Called with each run's index once the gradients of its rows are there; with those of empty runs first."""
Write = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], Take]
"""(gradients [n, out], inputs [n, in], rows of each run) → what takes a weight's products, which are not returned."""
Writes = tuple[Write | None, Write | None, Write | None]
"""Of gate, up and down; None: autograd gets the gradient."""
Matrices = Sequence[torch.Tensor]
"""Of each expert [in, out]."""


class Run(NamedTuple):
    """Rows of an expert."""

    place: int
    expert: int
    rows: slice


def grouped_mlp(
    rows: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    counts: Sequence[int],
    activation: str,
    writes: Writes = (None, None, None),
) -> torch.Tensor:
    """Each run of rows through the MLP of its expert: [n, h] → [n, h].

    Args:
        rows: [n, h], run by run.
        gate: [E, f, h]; None: act(up) is what down takes.
        up: [E, f, h].
        down: [E, h, f].
        counts: rows of each run, which add up to n. Run i is of expert i mod E: there may be several runs of an expert.
        activation: `silu`, `gelu` or `gelu_tanh`.
        writes: where the weights' gradients go.
    """
    return _GroupedMLP.apply(rows, gate, up, down, tuple(counts), activation, writes)


def _runs(num_experts: int, counts: Sequence[int]) -> list[Run]:
    """Those that have rows."""
    runs, start = list[Run](), 0
    for index, count in enumerate(counts):
        if count:
            runs.append(Run(index, index % num_experts, slice(start, start + count)))
        start += count
    return runs


def _parts(num_experts: int, counts: Sequence[int], rows: torch.Tensor) -> Iterator[tuple[list[Run], slice]]:
    """Runs that go together, and all of their rows."""
    runs = _runs(num_experts, counts)
    if in_cache(rows):
        yield from (([run], run.rows) for run in runs)
    elif runs:
        yield runs, slice(0, len(rows))


def _multiply(runs: Sequence[Run], x: torch.Tensor, matrices: Matrices, out: torch.Tensor, start: int = 0) -> None:
    """out[run − start] ← x[run] · matrix of its expert."""
    for _, expert, rows in runs:
        torch.mm(x[rows], matrices[expert], out=out[rows.start - start : rows.stop - start])


def _act(kind: str, x: torch.Tensor, out: torch.Tensor) -> None:
    if kind == "silu":
        torch.ops.aten.silu.out(x, out=out)
    else:
        torch.ops.aten.gelu.out(x, approximate="tanh" if kind == "gelu_tanh" else "none", out=out)


def _act_backward(kind: str, grad: torch.Tensor, x: torch.Tensor) -> None:
    """x ← its gradient, from that of act(x)."""
    if kind == "silu":
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=x)
    else:
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=x)


def _activate(kind: str, gate: torch.Tensor | None, up: torch.Tensor, inner: torch.Tensor) -> None:
    """inner [m, f] ← act(gate) · up, or act(up)."""
    for block in blocks(len(up), up):
        own = inner[block]
        _act(kind, up[block] if gate is None else gate[block], own)
        if gate is not None:
            own.mul_(up[block])


def _activate_backward(kind: str, grad: torch.Tensor, gate: torch.Tensor | None, up: torch.Tensor) -> None:
    """gate and up [m, f] ← their gradients, from that of inner, which is used up."""
    for block in blocks(len(up), up):
        of_inner, own = grad[block], up[block]
        if gate is None:
            _act_backward(kind, of_inner, own)
            continue
        activated, own_gate = torch.empty_like(own), gate[block]
        _act(kind, own_gate, activated)
        own.mul_(of_inner)
        _act_backward(kind, own, own_gate)
        torch.mul(activated, of_inner, out=own)


def _adds(out: torch.Tensor, grads: torch.Tensor, inputs: torch.Tensor, counts: Sequence[int]) -> Take:
    """Takes each run's product to a new gradient `out` [E, out, in], that of an expert's first run in its place."""
    starts = list(accumulate(counts, initial=0))

    def take(index: int) -> None:
        run = slice(starts[index], starts[index + 1])
        out[index % len(out)].addmm_(grads[run].t(), inputs[run], beta=0 if index < len(out) else 1)

    return take


def _takes(ctx: Any, saved: Sequence[Any], grad: torch.Tensor) -> tuple[list[Take], list[torch.Tensor | None]]:
    """(what takes each run's products of weights that are trained, gradients that autograd gets).

    Args:
        saved: the saved tensors, as backward has unpacked them.
    """
    rows, *weights, gates, outs, inner = saved
    takes, found = list[Take](), list[torch.Tensor | None]()
    products = zip((gates, outs, grad), (rows, rows, inner), strict=True)
    for is_needed, write, weight, of in zip(ctx.needs_input_grad[1:4], ctx.writes, weights, products, strict=True):
        gradient = torch.empty_like(weight) if is_needed and write is None else None
        found.append(gradient)
        if is_needed:
            write = partial(_adds, gradient) if gradient is not None else write
            takes.append(write(*of, ctx.counts))
    for index, count in enumerate(ctx.counts):
        for take in takes if not count else ():
            take(index)
    return takes, found


def _transposed(weight: torch.Tensor) -> Matrices:
    return weight.transpose(1, 2).unbind()


class _GroupedMLP(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        gate: torch.Tensor | None,
        up: torch.Tensor,
        down: torch.Tensor,
        counts: tuple[int, ...],
        activation: str,
        writes: Writes,
    ) -> torch.Tensor:
        ctx.counts, ctx.activation, ctx.writes = counts, activation, writes
        outs = rows.new_empty(len(rows), up.shape[1])
        gates = None if gate is None else torch.empty_like(outs)
        inner, out = torch.empty_like(outs), rows.new_empty(len(rows), down.shape[1])
        into_up, into_out = _transposed(up), _transposed(down)
        into_gate = None if gate is None else _transposed(gate)
        for runs, own in _parts(len(up), counts, rows):
            if into_gate is not None and gates is not None:
                _multiply(runs, rows, into_gate, gates)
            _multiply(runs, rows, into_up, outs)
            _activate(activation, None if gates is None else gates[own], outs[own], inner[own])
            _multiply(runs, inner, into_out, out)
        ctx.save_for_backward(rows, gate, up, down, gates, outs, inner)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        rows, gate, up, down, gates, outs, _ = saved
        grad, of_rows = grad.contiguous(), ctx.needs_input_grad[0]
        grad_rows = torch.empty_like(rows) if of_rows else None
        takes, found = _takes(ctx, saved, grad)
        out_of_up, out_of_down = up.unbind(), down.unbind()
        out_of_gate = None if gate is None else gate.unbind()
        for runs, own in _parts(len(up), ctx.counts, rows):
            of_inner = outs.new_empty(own.stop - own.start, outs.shape[1])
            _multiply(runs, grad, out_of_down, of_inner, own.start)
            _activate_backward(ctx.activation, of_inner, None if gates is None else gates[own], outs[own])
            if grad_rows is not None:
                _multiply(runs, outs, out_of_up, grad_rows)
            if grad_rows is not None and out_of_gate is not None:
                for run in runs:
                    grad_rows[run.rows].addmm_(gates[run.rows], out_of_gate[run.expert])
            for take, run in product(takes, runs):
                take(run.place)
        return grad_rows, *found, None, None, None
