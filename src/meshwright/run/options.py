"""TrainOptions: everything about a run that is not in its plan. Written beside the plan, read on resume."""

from __future__ import annotations

from pydantic import Field

from meshwright.core.job import OptimizerKind
from meshwright.core.values import Value
from meshwright.train.loss_scale import LossScaleOptions
from meshwright.train.lr import learning_rate
from meshwright.train.optimizer import OptimizerOptions
from meshwright.train.sources import StandardLibrary, TextSource, as_source


class TrainOptions(Value):
    """One training run."""

    text: str | None = Field(default=None, min_length=1)
    """A file or folder (text, JSONL, Parquet); None: the source of Python's standard library."""
    max_text_bytes: int = Field(default=4_000_000, gt=0)
    """How much of the standard library is read."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """A Hugging Face tokenizer; None: that of `pretrained`, else a byte-level BPE is trained on the text."""
    separate_documents: bool = False
    """Documents that share a sequence don't see each other; otherwise a sequence is one text."""
    steps: int = Field(default=100, gt=0)
    learning_rate: float = Field(default=1e-3, gt=0)
    """At its peak."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """None: ten, or a fifth of a short run."""
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest global gradient norm; None: 1, and no limit under an asynchronous schedule, which cannot clip."""
    loss_scale: LossScaleOptions | None = None
    """Of fp16 training; None: the usual settings."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    eval_every: int = Field(default=50, gt=0)
    eval_samples: int = Field(default=64, gt=0)
    save_every: int = Field(default=50, gt=0)
    keep: int = Field(default=2, gt=0)
    """Newest checkpoints that are kept."""
    pretrained: str | None = Field(default=None, min_length=1)
    """A Hugging Face folder to start from; None: fresh weights."""
    activation_census: bool = True
    """Count activation bytes in one early step."""

    def source(self) -> TextSource:
        """Where the text comes from. Raises InputError."""
        return StandardLibrary(self.max_text_bytes) if self.text is None else as_source(self.text)

    def tokenizer_path(self) -> str | None:
        """The tokenizer that is there already; None: one is trained on the text."""
        return self.tokenizer or self.pretrained

    def text_options(self) -> tuple[str | None, int, str | None]:
        """All that decides what the tokens are, besides the plan."""
        return self.text, self.max_text_bytes, self.tokenizer_path()

    def learning_rate_at(self, step: int) -> float:
        """Of one step. Raises InputError where the warm-up is longer than the run."""
        warmup_steps = min(10, self.steps // 5) if self.warmup_steps is None else self.warmup_steps
        return learning_rate(step, peak=self.learning_rate, warmup_steps=warmup_steps, total_steps=self.steps)

    def optimizer(self, kind: OptimizerKind, *, clips: bool = True) -> OptimizerOptions:
        """Settings of the update. Without `clips` there is only a largest norm that was asked for."""
        clip_norm = OptimizerOptions().clip_norm if clips and self.clip_norm is None else self.clip_norm
        return OptimizerOptions(
            kind=kind,
            weight_decay=self.weight_decay,
            clip_norm=clip_norm,
            seed=self.seed,
            loss_scale=self.loss_scale or LossScaleOptions(),
        )
