"""Gates: from a router's logits to the experts of each token, their weights, and the losses that keep them balanced.

    select              which experts, and who has room; no gradient passes
    combine_weights     what their outputs are multiplied by; differentiable in the logits
    balance_loss        E · Σ f·p in each sequence, or with an f that is given
    z_loss              mean squared log-sum-exp

Shapes: b sequences of s tokens, T = b·s, E experts, k experts per token. Logits are fp32 at least.
What an expert lacks room for contributes nothing: its token goes on by the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.core.model import ModelSpec
from meshwright.core.router import RouterSpec

_GROUP_BEST = 2
"""Experts whose scores add up to that of a group, where scores are sigmoids (DeepSeek-AI 2024, V3)."""

_NOISE_BITS = {torch.float32: 11, torch.float64: 21}
"""Last bits of a score in which layouts may differ."""

_FEW = 8
"""Choices up to which a pass for each is quicker than sorting."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts of each token."""

    experts: torch.Tensor
    """[T, k] int64, best first; where experts choose [T, E], all of them."""
    kept: torch.Tensor | None
    """[T, k] bool: whether the expert has taken the token; None: all have."""
    most: int | None = None
    """How many are taken where all experts are full; None: all."""

    def is_kept(self) -> torch.Tensor:
        """`kept`, spelt out."""
        return torch.ones_like(self.experts, dtype=torch.bool) if self.kept is None else self.kept

    def loads(self, num_experts: int) -> torch.Tensor:
        """Tokens that each expert has taken: [E] int64."""
        taken = self.is_kept().flatten().to(torch.int64)
        return taken.new_zeros(num_experts).scatter_add_(0, self.experts.flatten(), taken)


def scores_of(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Softmax over the experts, or the sigmoid of each: [.., E] → [.., E]."""
    return logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()


@torch.no_grad()
def select(logits: torch.Tensor, bias: torch.Tensor | None, model: ModelSpec) -> Choice:
    """The choice of tokens (or of experts) in each sequence; among equals the lowest index wins.

    Args:
        logits: [b, s, E].
        bias: [E], added to the scores for the choice alone.
        model: its number of experts, and its gate.
    """
    spec, k = model.gate, model.experts_per_token
    scores = scores_of(logits, spec)
    if spec.chooses == "experts":
        return _experts_choose(scores, model)
    wanted = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        wanted = _best_groups(wanted, spec)
    experts = _best(wanted, k)
    if spec.capacity_factor is None:
        return Choice(experts.flatten(0, 1).contiguous(), None)
    b, s = logits.shape[:2]
    room = spec.capacity(s, model.num_experts, k)
    kept = _with_room(experts, scores, spec, room).flatten(0, 1)
    return Choice(experts.flatten(0, 1).contiguous(), kept, b * min(s * k, model.num_experts * room))


def _best(wanted: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of the last dim, best first, among equals the lowest index: [.., E] → [.., k].

    `topk` promises no order of equals.
    """
    if k > _FEW:
        return wanted.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    left, found = wanted, [wanted.argmax(-1, keepdim=True)]
    for _ in range(k - 1):
        left = left.scatter(-1, found[-1], float("-inf"))
        found.append(left.argmax(-1, keepdim=True))
    return torch.cat(found, -1)


def _coarse(scores: torch.Tensor) -> torch.Tensor:
    """Scores without the bits that follow the order of sums, in which tokens that are equal may differ from layout to
    layout: among such tokens the first one of the sequence wins everywhere. Rounded as by Veltkamp 1968."""
    shifted = scores * (2 ** _NOISE_BITS[scores.dtype] + 1)
    return shifted - (shifted - scores)


def _experts_choose(scores: torch.Tensor, model: ModelSpec) -> Choice:
    """Each expert takes its best tokens of each sequence (Zhou et al. 2022, §3.2)."""
    room = model.gate.capacity(scores.shape[1], model.num_experts, model.experts_per_token)
    rank = _coarse(scores).sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)  # of each token, by expert
    experts = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    most = scores.shape[0] * model.num_experts * room
    return Choice(experts.flatten(0, 1).contiguous(), (rank < room).flatten(0, 1), most)


def _best_groups(wanted: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Scores, with -inf outside the best groups: those with the best expert, or the best two, of sigmoids."""
    grouped = wanted.unflatten(-1, (spec.num_groups, -1))
    best = 1 if spec.score == "softmax" else min(_GROUP_BEST, grouped.shape[-1])
    of_group = grouped.topk(best, dim=-1).values.sum(-1)
    chosen = of_group.sort(dim=-1, descending=True, stable=True).indices[..., : spec.groups_per_token]
    outside = torch.ones_like(of_group, dtype=torch.bool).scatter_(-1, chosen, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)


def _with_room(experts: torch.Tensor, scores: torch.Tensor, spec: RouterSpec, room: int) -> torch.Tensor:
    """[b, s, k] bool: whether an expert has room; all first choices go before all second ones.

    Within a choice the first tokens of a sequence go first, or those with the highest scores, but for their last bits.
    """
    b, s, k = experts.shape
    if spec.drop == "score":
        own = _coarse(scores.gather(-1, experts))
        order = own.sort(dim=1, descending=True, stable=True).indices.transpose(1, 2)  # [b, k, s]
    else:
        order = torch.arange(s, device=experts.device).expand(b, k, s)
    queue = experts.transpose(1, 2).gather(2, order).reshape(b, k * s)  # choices in the order in which they are served
    hits = torch.nn.functional.one_hot(queue, scores.shape[-1])
    ahead = (hits.cumsum(1) - hits).gather(-1, queue.unsqueeze(-1)).view(b, k, s)
    kept = torch.empty_like(ahead, dtype=torch.bool).scatter_(2, order, ahead < room)
    return kept.transpose(1, 2)


def combine_weights(logits: torch.Tensor, choice: Choice, spec: RouterSpec) -> torch.Tensor:
    """What each chosen expert's output is multiplied by: [T, k], 0 where it had no room.

    Args:
        logits: [T, E].
    """
    weights = scores_of(logits, spec).gather(-1, choice.experts)
    if spec.renormalise == "before_drop":
        weights = weights / weights.sum(-1, keepdim=True)
    if choice.kept is not None:
        weights = weights.masked_fill(~choice.kept, 0.0)
    if spec.renormalise == "after_drop":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return weights * spec.scale


def normalised_scores(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Scores that add up to 1, which the balance loss is taken of: [.., E] → [.., E]."""
    scores = scores_of(logits, spec)
    return scores if spec.score == "softmax" else scores / scores.sum(-1, keepdim=True)


def shares(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """f: the share of choices of each sequence that falls on each expert, dropped ones included: [b, s, k] → [b, E].

    It is counted over k, so that an even load is 1/E whatever k.
    """
    flat = experts.flatten(1)
    ones = torch.ones(flat.shape, dtype=torch.float64, device=flat.device)
    return ones.new_zeros(len(flat), num_experts).scatter_add_(1, flat, ones) / flat.shape[1]


def balance_loss(logits: torch.Tensor, share: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """E · Σ f·p of each sequence: [b, s, E] and f [b, E] (or [E], of all) → [b].

    1 where f or p is even; E where all tokens go to one expert; in between it may be less than 1.

    Source: Fedus et al. 2021, eq. 4; per sequence DeepSeek-AI 2024 (V3), eq. 17.
    """
    mean = normalised_scores(logits, spec).mean(1)
    return logits.shape[-1] * (share.to(mean.dtype) * mean).sum(-1)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Squared log-sum-exp of each token's logits: [.., E] → [..]. Source: Zoph et al. 2022, eq. 5."""
    return logits.logsumexp(-1).square()
