"""Job: what is to be trained, apart from how it is split."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.core.values import MAX_SIZE, Value

OptimizerKind = Literal["adamw", "sgd"]


class Job(Value):
    """One training job. Batch sizes count sequences."""

    seq_length: int = Field(gt=0, le=MAX_SIZE)
    """Tokens of a sequence."""
    global_batch_size: int = Field(gt=0, le=MAX_SIZE)
    """Sequences of a step, over all ranks."""
    optimizer: OptimizerKind = "adamw"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the elements of hidden states that training drops behind the embedding, attention and mlp: the same
    elements in every layout."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the probabilities of attention that training drops: the same ones in every layout. Attention is not one
    fused kernel then."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """ε of the training loss: the target keeps 1 − ε, and ε is spread over the whole vocabulary."""
    label_smoothing_rule: Literal["torch", "megatron"] = "torch"
    """`megatron` spreads ε over the other V − 1 tokens: ε·V/(V − 1) in the formula of `torch`."""
    z_loss: float = Field(default=0.0, ge=0)
    """So many times the squared logarithm of the softmax's denominator is added to each token's training loss."""

    imbalance: float = Field(default=1.0, ge=1, le=MAX_SIZE)
    """Of a mixture whose experts lie on several ranks: rows of the fullest of these ranks over their mean. For
    forecasts alone; where tokens go is known when they go."""

    @property
    def num_loss_sums(self) -> int:
        """Numbers of a token that the tp ranks sum: exponentials, the target's logit, and for smoothing all logits."""
        return 2 + (self.label_smoothing > 0)

    def smoothing(self, vocab_size: int) -> float:
        """ε of the formula of `torch`."""
        scale = vocab_size / max(1, vocab_size - 1) if self.label_smoothing_rule == "megatron" else 1.0
        return self.label_smoothing * scale

    @property
    def tokens_per_step(self) -> int:
        return self.seq_length * self.global_batch_size
