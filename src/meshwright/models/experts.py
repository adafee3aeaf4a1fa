"""A layer of experts in place of an MLP: router, experts that each see their own tokens only, shared experts.

    x [b,s,h] ─ router ─▶ k experts and weights of each token
        └─ permute ─▶ rows by expert [k·T,h] ─ grouped products ─▶ [k·T,h] ─ unpermute, weigh, sum over k ─▶ [b,s,h]
        └─ shared experts (all tokens) ────────────────────────────────────────────────── + ──────────────▲

Nothing is padded and nothing dropped, unless the gate has a capacity. Rows are copied once on each way (`rows`); the
products are one function (`grouped`). What autograd keeps: the rows, what is inside the experts, their output, and a
few numbers per token; the router's own mathematics is done again in backward, from the logits.

Parallelism is applied from outside: `Experts.compute` is replaced where experts stand on other ranks, and
`GroupedLinear.write` takes a weight's gradient to its place.

Source: Shazeer et al. 2017; Gale et al. 2022 (MegaBlocks, dropless).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from meshwright.core.model import ModelSpec
from meshwright.models.functions import LOW_PRECISION
from meshwright.models.gates import (
    Choice,
    balance_loss,
    combine_weights,
    normalised_scores,
    select,
    shares,
    z_loss,
)
from meshwright.models.grouped import Write, grouped_mlp
from meshwright.models.rows import Order, permute, unpermute


def rows_per_expert(loads: torch.Tensor, num_rows: int) -> list[int]:
    """`loads` [E] as numbers of this process. Where no values are kept (meta, fake tensors), rows are spread evenly."""
    if loads.is_meta or is_fake(loads):
        base, extra = divmod(num_rows, len(loads))
        return [base + (index < extra) for index in range(len(loads))]
    return loads.tolist()


class GroupedLinear(nn.Module):
    """One matrix of each expert. Parameter `weight` [E, out, in]; no bias.

    Attributes:
        write: (gradients, inputs, rows of each run) → what takes the weight's products instead of autograd, by run's
            index; `parallel.direct` sets it.
    """

    def __init__(self, num_experts: int, into: int, out: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out, into, device=device, dtype=dtype))
        self.write: Write | None = None


class Experts(nn.Module):
    """All experts of a layer. (x [T, h], weights [T, k], choice) → [T, h].

    Attributes:
        compute: (rows [n, h] by expert, loads [E]) → rows [n, h]; `parallel.experts` puts another one here.
        meanwhile: what `compute` may run while it waits for rows.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts, self.activation = spec.num_experts, spec.activation
        sizes = (spec.num_experts, spec.hidden_size, spec.expert_size, device, dtype)
        self.gate = GroupedLinear(*sizes) if spec.has_gated_experts else None
        self.up = GroupedLinear(*sizes)
        self.down = GroupedLinear(spec.num_experts, spec.expert_size, spec.hidden_size, device, dtype)
        self.compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._compute
        self.meanwhile: Callable[[], object] = _nothing

    def run(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Each run of rows through its expert: [n, h] → [n, h]. Runs as in :func:`grouped_mlp`."""
        gate, up, down = self.gate, self.up, self.down
        own, of_gate = (None, None) if gate is None else (gate.weight, gate.write)
        writes = (of_gate, up.write, down.write)
        return grouped_mlp(rows, own, up.weight, down.weight, counts, self.activation, writes)

    def _compute(self, rows: torch.Tensor, loads: torch.Tensor) -> torch.Tensor:
        return self.run(rows, rows_per_expert(loads, len(rows)))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, choice: Choice) -> torch.Tensor:
        k, is_whole = weights.shape[1], choice.kept is None
        places, loads = choice.experts.flatten(), choice.loads(self.num_experts)
        if choice.kept is not None:
            places = places.masked_fill(~choice.kept.flatten(), self.num_experts)  # behind all others
        order = places.argsort(stable=True)
        if choice.kept is not None:
            order = order[: sum(rows_per_expert(loads, min(choice.most or 0, len(places))))].clone()
        inverse = torch.empty_like(places)
        inverse[order] = torch.arange(len(order), device=x.device)
        of = Order(order, inverse, k, is_whole)
        return unpermute(self.compute(permute(x, of), loads), weights, of)


def _nothing() -> None:
    return


class _Logits(Function):
    """x · Wᵀ in at least fp32, without keeping a wide x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(_wide(x), _wide(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).t() @ _wide(x).flatten(0, -2)
        return (grad @ _wide(weight)).to(x.dtype), grad_weight.to(weight.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in LOW_PRECISION else x


class LossScales:
    """What the losses of all routers of a model are multiplied by in backward; one object for all of them.

    Attributes:
        scale: what the backward of the whole loss starts with, loss scale included.
        num_tokens, num_sequences: of the whole step, over all ranks.
    """

    def __init__(self) -> None:
        self.scale: torch.Tensor | float = 1.0
        self.num_tokens: torch.Tensor | float = 1.0
        self.num_sequences: torch.Tensor | float = 1.0


class Sequences:
    """What a router asks where it has a part of each sequence's tokens; here it has them all.

    Attributes:
        num_parts: equal parts of a sequence, of which it has one.
    """

    num_parts = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] over all parts, in place."""
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, n, ...] of one part as [b, s, ...] of whole sequences, in their order."""
        return x

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        return x


class _Weights(Function):
    """Weights of the chosen experts. Backward adds the gradients of the losses, which are not in the graph."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, choice: Choice, router: Router, share: torch.Tensor | None
    ) -> torch.Tensor:
        further = [x for x in (choice.kept, share) if x is not None]
        ctx.save_for_backward(logits, choice.experts, *further)
        ctx.router, ctx.has_kept, ctx.has_share = router, choice.kept is not None, share is not None
        return combine_weights(logits.flatten(0, 1), choice, router.spec.gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, experts, *further = ctx.saved_tensors
        router, choice = ctx.router, Choice(experts, further[0] if ctx.has_kept else None)
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            total = (combine_weights(leaf.flatten(0, 1), choice, router.spec.gate) * grad).sum()
            if router.scales is not None:
                total = total + router.losses(leaf, choice, further[-1] if ctx.has_share else None)
            (grad_logits,) = torch.autograd.grad(total, leaf)
        return grad_logits, None, None, None


class Router(nn.Module):
    """x [b, s, h] → (weights [T, k], choice). Parameter `weight` [E, h]; buffer `bias` [E], fp32, of a gate with one.

    Attributes:
        scales: set in training where the gate has losses; None: they are left out.
        statistics: [3·E + 4] float64, to which every forward adds while it is set: choices by expert, tokens taken by
            expert, sums of normalised scores by expert; then balance losses, z-losses, sequences and tokens.
        counts: False while a forward is run again, whose tokens `statistics` have already.
        uniform: x [b, s, n] → for each element a number between 0 and 1, of which the gate's noise is made, or None
            where nothing is trained on; None: there is no noise.
        sequences: where the other tokens of the sequences are; `parallel.routers` sets it.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        num = spec.num_experts
        self.weight = nn.Parameter(torch.empty(num, spec.hidden_size, device=device, dtype=dtype))
        self.noise = _Noise(spec, device, dtype) if spec.gate.noise == "gaussian" else None
        self.bias: torch.Tensor | None
        self.register_buffer("bias", torch.zeros(num, device=device) if spec.gate.bias else None, persistent=False)
        self.scales: LossScales | None = None
        self.statistics: torch.Tensor | None = None
        self.counts = True
        self.uniform: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        self.sequences = Sequences()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Choice]:
        logits = self._logits(x)
        choice = self._choose(logits)
        share = self._whole_share(choice, logits.shape[:2])
        if self.statistics is not None and self.counts:
            self._count(logits, choice, share, self.statistics)
        return _Weights.apply(logits, choice, self, share), choice

    def _choose(self, logits: torch.Tensor) -> Choice:
        """The choice of these tokens [b, n, E]. A gate with a capacity looks at the whole sequences."""
        if self.sequences.num_parts == 1 or not self.spec.gate.has_capacity:
            return select(logits, self.bias, self.spec)
        whole = select(self.sequences.gather(logits.detach()), self.bias, self.spec)
        assert whole.kept is not None
        experts, kept = (
            self.sequences.own(x.unflatten(0, (len(logits), -1))).flatten(0, 1) for x in (whole.experts, whole.kept)
        )
        return Choice(experts, kept, whole.most)

    @torch.no_grad()
    def _whole_share(self, choice: Choice, shape: torch.Size) -> torch.Tensor | None:
        """f of each sequence [b, E] over all of its tokens, where a loss needs it and some are elsewhere."""
        if self.sequences.num_parts == 1 or self.scales is None or not self.spec.gate.balances_sequences:
            return None
        own = shares(choice.experts.view(*shape, -1), self.spec.num_experts)
        return self.sequences.sum(own / self.sequences.num_parts)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.uniform is not None and self.noise is None and (drawn := self.uniform(x)) is not None:
            jitter = self.spec.gate.jitter
            spread = drawn.mul_(2 * jitter).add_(1 - jitter).to(_wide(x).dtype)
            return _Logits.apply((x * spread).to(x.dtype), self.weight)
        logits = _Logits.apply(x, self.weight)
        if self.uniform is None or self.noise is None or (drawn := self.uniform(logits)) is None:
            return logits
        return logits + torch.special.ndtri(drawn).to(logits.dtype) * self.noise(x)

    def losses(self, logits: torch.Tensor, choice: Choice, share: torch.Tensor | None) -> torch.Tensor:
        """Sum of this layer's losses over these tokens [b, n, E], times what `scales` says.

        Args:
            share: f of their sequences [b, E]; None: all tokens of these are here.
        """
        gate, scales = self.spec.gate, self.scales
        assert scales is not None
        total = torch.zeros((), dtype=logits.dtype, device=logits.device)
        if gate.balance_loss:
            if gate.balances_sequences:
                if share is None:
                    share = shares(choice.experts.view(*logits.shape[:2], -1), logits.shape[-1])
                num_parts = scales.num_sequences * self.sequences.num_parts
                whole = balance_loss(logits, share, gate).sum() / num_parts
            else:
                whole = balance_loss(logits, self._share(), gate).sum() * logits.shape[1] / scales.num_tokens
            total = total + gate.balance_loss * whole
        if gate.z_loss:
            total = total + gate.z_loss * z_loss(logits).sum() / scales.num_tokens
        return total * scales.scale

    def _share(self) -> torch.Tensor:
        """f of all tokens of the step, as `statistics` have it by the time of backward."""
        assert self.statistics is not None
        chosen = self.statistics[: self.spec.num_experts]
        return chosen / chosen.sum()

    @torch.no_grad()
    def _count(
        self, logits: torch.Tensor, choice: Choice, share: torch.Tensor | None, statistics: torch.Tensor
    ) -> None:
        num, gate, num_parts = self.spec.num_experts, self.spec.gate, self.sequences.num_parts
        own = shares(choice.experts.view(*logits.shape[:2], -1), num)
        statistics[:num] += own.sum(0) * logits.shape[1] * choice.experts.shape[1]
        statistics[num : 2 * num] += choice.loads(num)
        statistics[2 * num : 3 * num] += normalised_scores(logits, gate).sum((0, 1))
        statistics[3 * num] += balance_loss(logits, own if share is None else share, gate).sum() / num_parts
        statistics[3 * num + 1] += z_loss(logits).sum()
        statistics[3 * num + 2] += logits.shape[0] / num_parts
        statistics[3 * num + 3] += logits.shape[0] * logits.shape[1]


class _Noise(nn.Module):
    """Standard deviation of each logit: softplus(x · Wᵀ). Parameter `weight` [E, h].

    Source: Shazeer et al. 2017, §2.1.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.hidden_size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(_Logits.apply(x, self.weight))


class MoE(nn.Module):
    """Router, experts and shared experts. [b, s, h] → [b, s, h].

    Args:
        spec: the model.
        shared: an MLP of `spec.shared_ffn_size`, or None.
        shared_gate: a linear layer to one number, or None.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shared: nn.Module | None,
        shared_gate: nn.Module | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.router = Router(spec, device, dtype)
        self.experts = Experts(spec, device, dtype)
        self.shared = shared
        self.shared_gate = shared_gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, choice = self.router(x)
        if self.shared is None:
            return self.experts(x.flatten(0, 1), weights, choice).view_as(x)
        shared: list[torch.Tensor] = []
        self.experts.meanwhile = lambda: shared.append(self._shared(x))
        out = self.experts(x.flatten(0, 1), weights, choice).view_as(x)
        self.experts.meanwhile = _nothing
        return out + (shared[0] if shared else self._shared(x))

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared is not None
        out: torch.Tensor = self.shared(x)
        return out if self.shared_gate is None else self.shared_gate(x).sigmoid() * out
