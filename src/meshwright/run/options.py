"""TrainOptions: everything about a run that is not in its plan. Written beside the plan, read on resume."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from meshwright.core.values import Value
from meshwright.train.optimizer import OptimizerOptions
from meshwright.train.sources import StandardLibrary, TextSource, as_source


class TrainOptions(Value):
    """One training run."""

    text: str | None = None
    """A file or folder (text, JSONL, Parquet); None: the source of Python's standard library."""
    max_text_bytes: int = Field(default=4_000_000, gt=0)
    """How much of the standard library is read."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer; None: a byte-level BPE is trained on the text."""
    steps: int = Field(default=100, gt=0)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    seed: int = 0
    eval_every: int = Field(default=50, gt=0)
    eval_samples: int = Field(default=64, gt=0)
    save_every: int = Field(default=50, gt=0)
    keep: int = Field(default=2, gt=0)
    """Newest checkpoints that are kept."""
    pretrained: str | None = None
    """A Hugging Face folder to start from; None: fresh weights."""
    activation_census: bool = True
    """Count activation bytes in one early step."""

    @model_validator(mode="after")
    def _warm_up_ends(self) -> TrainOptions:
        if self.warmup_steps >= self.steps:
            return self.model_copy(update={"warmup_steps": max(0, self.steps // 10)})
        return self

    def source(self) -> TextSource:
        """Where the text comes from. Raises InputError."""
        return as_source(self.text) if self.text else StandardLibrary(self.max_text_bytes)

    def optimizer(self, kind: Literal["adamw", "sgd"]) -> OptimizerOptions:
        """Settings of the update."""
        return OptimizerOptions(kind=kind, weight_decay=self.weight_decay, clip_norm=self.clip_norm)
