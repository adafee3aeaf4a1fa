"""Job: what is to be trained, apart from how it is split."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.core.values import MAX_SIZE, Value


class Job(Value):
    """One training job. Batch sizes count sequences."""

    seq_length: int = Field(gt=0, le=MAX_SIZE)
    """Tokens of a sequence."""
    global_batch_size: int = Field(gt=0, le=MAX_SIZE)
    """Sequences of a step, over all ranks."""
    optimizer: Literal["adamw", "sgd"] = "adamw"

    @property
    def tokens_per_step(self) -> int:
        return self.seq_length * self.global_batch_size
