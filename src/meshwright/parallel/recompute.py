"""Recomputation: keep little in forward, run it again in backward.

What it divides: time, not space.

    full        keeps a layer's input, or that of several in a row, and runs them again, tensor-parallel sums included
                (Chen et al. 2016)
    selective   keeps q, k and v, and runs attention's core again; its output, which is o's input, and the log-sum-exp
                are not kept. No product with weights and no sum is repeated (Korthikanti et al. 2022 §5)

Of each stage all layers, or its first ones (`Strategy.recompute_layers`), several together (`recompute_group`).
What it needs: rule `recompute-choice`. What it costs: `cost.activations`, `cost.flops`, phase `recompute` in
`cost.traffic`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.ledger import Ledger
from meshwright.comm.mesh import Mesh
from meshwright.core.axes import PP
from meshwright.core.batch import Places
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.parallel.grids.apply import GridLinear
from meshwright.parallel.layers import part_of
from meshwright.parallel.tensor import RowParallelLinear

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q, k, v) → what attention gives."""
Again = Callable[[], AbstractContextManager[None]]


class _Recompute(torch.autograd.Function):
    """Runs `layers` without a graph; backward runs it again with one. Parameters collect their gradients there.

    `anchor` is any tensor that requires a gradient: an input that does not (behind frozen layers) has a backward too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        layers: nn.Sequential,
        ledger: Ledger,
        again: Again,
        places: Places | None,
    ) -> torch.Tensor:
        ctx.layers, ctx.ledger, ctx.again, ctx.places = layers, ledger, again, places
        ctx.save_for_backward(x)
        with torch.no_grad():
            return _run(layers, x, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad(), ctx.ledger.phase("recompute"), ctx.again():
            y = _run(ctx.layers, x, ctx.places)
        torch.autograd.backward(y, grads[0])
        return x.grad, None, None, None, None, None


def _run(layers: nn.Sequential, x: torch.Tensor, places: Places | None) -> torch.Tensor:
    for layer in layers:
        x = layer(x) if places is None else layer(x, places)
    return x


class Recomputed(nn.Module):
    """Layers in a row that are run again in backward."""

    def __init__(self, layers: list[nn.Module], ledger: Ledger, again: Again) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.ledger = ledger
        self.again = again
        self.anchor = torch.empty(0, requires_grad=True)

    def forward(self, x: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        return self._recomputed(x, places) if torch.is_grad_enabled() else _run(self.layers, x, places)

    def _recomputed(self, x: torch.Tensor, places: Places | None) -> torch.Tensor:
        return _Recompute.apply(x, self.anchor, self.layers, self.ledger, self.again, places)


class _CoreThenRows(torch.autograd.Function):
    """o's product of the core's output; keeps q, k and v, of which backward makes that output again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        weight: torch.Tensor,
        core: Core,
        o: RowParallelLinear,
        ledger: Ledger,
    ) -> torch.Tensor:
        ctx.core, ctx.o, ctx.ledger = core, o, ledger
        ctx.save_for_backward(q, k, v, weight)
        with torch.no_grad():
            return F.linear(_joined(core(q, k, v)), weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *qkv, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        q, k, v = (x.detach().requires_grad_(needed) for x, needed in zip(qkv, needs[:3], strict=True))
        with torch.enable_grad(), ctx.ledger.phase("recompute"):
            inputs = _joined(ctx.core(q, k, v))
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        if needs[3]:
            ctx.o.region.products.add([(ctx.o.sink, rows)], inputs.detach().reshape(-1, inputs.shape[-1]))
        if any(needs[:3]):
            torch.autograd.backward(inputs, (rows @ weight).view_as(inputs))
        return q.grad, k.grad, v.grad, None, None, None, None


def _joined(out: torch.Tensor) -> torch.Tensor:
    """[b, heads, s, d] → [b, s, heads·d]."""
    return out.transpose(1, 2).flatten(2)


class SelectiveAttend(nn.Module):
    """Attention behind its projections, with a core that is run again in backward."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: Core, o: RowParallelLinear | GridLinear
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return o(_joined(core(q, k, v)))
        if isinstance(o, GridLinear):
            return o.after(q, k, v, core, lambda: self.ledger.phase("recompute"))
        return o.collect(_CoreThenRows.apply(q, k, v, o.weight, core, o, self.ledger))


def apply(layers: nn.ModuleDict, spec: ModelSpec, strategy: Strategy, mesh: Mesh, again: Again = nullcontext) -> None:
    """Change the layers of this pipeline rank's stages, in place. Names of parameters change, so states are bound
    before; layers that are run again together stand in the place of the first. `again` is a context around every
    forward of whole layers that is run again."""
    parts = strategy.stage_layers(spec.num_layers)
    for stage in strategy.rank_stages(mesh[PP].index):
        for group in strategy.recompute_groups(parts[stage]):
            names = [str(layer) for layer in group]
            if strategy.recompute == "selective":
                part_of(layers[names[0]], "attention").attend = SelectiveAttend(mesh.ledger)
                continue
            together = [layers[name] for name in names]
            layers[names[0]] = Recomputed(together, mesh.ledger, again)
            for name in names[1:]:
                del layers[name]
