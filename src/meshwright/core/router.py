"""RouterSpec: how a layer of experts decides which token goes to which expert, and what keeps experts evenly loaded.

    logits = x · Wᵀ [T, E] ─▶ scores (softmax or sigmoid) ─▶ k experts of each token ─▶ weights ─▶ capacity

A *group* of tokens is one sequence: capacities and the balance loss over sequences are counted within it. So neither
depends on micro-batches, ranks or stages.

Sources: Shazeer et al. 2017 (noisy top-k), Lepikhin et al. 2020 (GShard), Fedus et al. 2021 (Switch), Zhou et al. 2022
(expert choice), Zoph et al. 2022 (ST-MoE, z-loss), Wang et al. 2024 (bias instead of a loss), DeepSeek-AI 2024 (V2 and
V3).
"""

from __future__ import annotations

from math import ceil
from typing import Literal

from pydantic import Field, model_validator

from meshwright.core.values import MAX_SIZE, Value


class RouterSpec(Value):
    """The gate of every layer of experts."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Of all experts' logits, before the choice."""
    renormalise: Literal["none", "before_drop", "after_drop"] = "none"
    """Whether the weights of a token's experts are divided by their sum: of all that it has chosen, or of those that
    had room for it."""
    scale: float = Field(default=1.0, gt=0)
    """What the weights are multiplied by at last."""
    num_groups: int = Field(default=1, gt=0, le=MAX_SIZE)
    """Groups of neighbouring experts; a token chooses among those of its best groups only."""
    groups_per_token: int = Field(default=1, gt=0, le=MAX_SIZE)
    bias: bool = False
    """A bias of each expert that counts in the choice and not in the weight. It is moved after every step against the
    load, by `bias_rate` (balance without a loss); no gradient reaches it."""
    bias_rate: float = Field(default=1e-3, ge=0)
    chooses: Literal["tokens", "experts"] = "tokens"
    """`experts`: each expert takes the tokens of a sequence that score highest, as many as its capacity. It looks at
    later tokens of the sequence, so a decoder trained with it cannot be trusted to predict them."""
    noise: Literal["none", "jitter", "gaussian"] = "none"
    """In training only. `jitter`: the router's input is multiplied by 1 ± `jitter`; `gaussian`: a learned standard
    deviation of each logit."""
    jitter: float = Field(default=1e-2, gt=0, lt=1)
    capacity_factor: float | None = Field(default=None, ge=0)
    """An expert takes at most factor · k·s/E tokens of a sequence of s, rounded up; None: all that come."""
    drop: Literal["position", "score"] = "position"
    """Which of too many tokens an expert keeps: the first ones, or those that score highest. First choices go before
    second ones in either case, so that with several choices later tokens can take the room of earlier ones."""
    balance_loss: float = Field(default=0.0, ge=0)
    """Coefficient of E · Σ f·p: the share of choices that an expert gets, times its mean score."""
    balance_over: Literal["sequence", "batch"] = "sequence"
    """Where f and p are taken: in each sequence, and the losses are averaged; or over all tokens of a step."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the mean squared log-sum-exp of the logits."""

    @model_validator(mode="after")
    def _consistent(self) -> RouterSpec:
        if self.groups_per_token > self.num_groups:
            raise ValueError(f"groups_per_token {self.groups_per_token} is more than num_groups {self.num_groups}")
        if self.chooses == "experts":
            for name, is_set in (
                ("balance_loss", self.balance_loss > 0),
                ("bias", self.bias),
                ("num_groups", self.num_groups > 1),
            ):
                if is_set:
                    raise ValueError(f"chooses=experts with {name}: experts that choose are evenly loaded already")
        return self

    @property
    def in_use(self) -> RouterSpec:
        """The same router without what matters in training only."""
        in_training = ("bias_rate", "noise", "jitter", "balance_loss", "balance_over", "z_loss")
        fields = type(self).model_fields
        return self.model_copy(update={name: fields[name].default for name in in_training})

    @property
    def has_capacity(self) -> bool:
        """Whether the choice of a token depends on others of its sequence."""
        return self.capacity_factor is not None or self.chooses == "experts"

    @property
    def balances_sequences(self) -> bool:
        """Whether there is a balance loss of each sequence."""
        return self.balance_loss > 0 and self.balance_over == "sequence"

    @property
    def has_losses(self) -> bool:
        return self.balance_loss > 0 or self.z_loss > 0

    def capacity(self, num_tokens: int, num_experts: int, experts_per_token: int) -> int:
        """Tokens that an expert takes at most of a sequence of `num_tokens`.

        Source: Fedus et al. 2021, eq. 3, with k tokens for each (Lepikhin et al. 2020).
        """
        factor = self.capacity_factor
        if factor is None:
            factor = 1.0 if self.chooses == "experts" else float(num_experts)
        return min(num_tokens, ceil(round(factor * experts_per_token * num_tokens / num_experts, 9)))
