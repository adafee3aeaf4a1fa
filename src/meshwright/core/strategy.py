"""Strategy: one point of the search space, a frozen value. Rules that need the model, the cluster or
the job stand in :mod:`meshwright.core.rules`; a :class:`~meshwright.core.plan.Plan` cannot be built
around a strategy that breaks one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.core.axes import DP, PP, TP
from meshwright.core.precision import RECIPES, Recipe
from meshwright.core.values import Value

Precision = Literal["fp32", "fp64", "bf16", "bf16-16", "bf16-20"]
ScheduleName = Literal["naive", "gpipe", "1f1b"]


class Strategy(Value):
    """How a job is split over the ranks."""

    dp: int = Field(default=1, gt=0)
    """Data-parallel ranks: each trains on its own sequences."""
    tp: int = Field(default=1, gt=0)
    """Tensor-parallel ranks: they share every layer."""
    pp: int = Field(default=1, gt=0)
    """Pipeline stages."""
    zero: Literal[0, 1] = 0
    """1 divides the optimizer's state over dp (ZeRO stage 1)."""
    schedule: ScheduleName = "1f1b"
    """Order of forwards and backwards; without a pipeline all are one."""
    micro_batch_size: int = Field(default=1, gt=0)
    """Sequences per micro-batch and data-parallel rank."""
    num_micro_batches: int = Field(default=1, gt=0)
    """Micro-batches per step and data-parallel rank; also gradient accumulation when pp = 1."""
    recompute: Literal["none", "full"] = "none"
    """`full` keeps a layer's input alone and runs the layer again in backward."""
    precision: Precision = "fp32"
    """Byte recipe: the dtype of parameters, gradients and optimizer state."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each pipeline stage; None splits them evenly, extra layers to the inner stages."""
    bucket_bytes: int = Field(default=25 * 2**20, gt=0)
    """Cap of one gradient bucket."""

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis name → size."""
        return {PP: self.pp, DP: self.dp, TP: self.tp}

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.precision]

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """Global layer indices of each stage, in order."""
        counts = self.layers_per_stage or split_layers(num_layers, self.pp)
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))

    def describe(self) -> str:
        """Short name, for tables: `D2 T2 P2 zero1 1f1b m8×b1`."""
        recompute = " recompute" if self.recompute == "full" else ""
        schedule = f" {self.schedule}" if self.pp > 1 else ""
        batch = f" m{self.num_micro_batches}×b{self.micro_batch_size}"
        return f"D{self.dp} T{self.tp} P{self.pp} zero{self.zero}{schedule}{batch}{recompute} {self.precision}"


def inner_stages_first(num_stages: int) -> tuple[int, ...]:
    """Stages in the order in which they take further layers: the ends hold embedding and head already."""
    return tuple(dict.fromkeys((*range(1, num_stages - 1), 0, num_stages - 1)))


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Even split; extra layers go to inner stages first."""
    base, extra = divmod(num_layers, num_stages)
    bonus = set(inner_stages_first(num_stages)[:extra])
    return tuple(base + (stage in bonus) for stage in range(num_stages))
