"""Named byte recipes: how many bytes each parameter costs, and in which dtype each copy lives.

Sources disagree (16, 18 or 20 bytes per parameter), so a recipe is named, never assumed:
ZeRO paper §3 (16), Megatron-LM with fp32 main gradients (18), ZeRO-Infinity §3 (20).

    parameter   what forward and backward compute with; what ranks gather and stages send
    gradient    what micro-batches accumulate in, and what crosses the ranks when gradients are reduced
    master      what the update adds to; none: the parameter itself, with its own rounding
    moment      what Adam keeps of the gradients
    product     what the products of layers are multiplied in, where that is narrower than the parameters
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import UnsupportedError

Rounding = Literal["nearest", "stochastic"]

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

NUM_MOMENTS = {"adamw": 2, "sgd": 0}
"""Optimizer → tensors of a parameter's size that it keeps from step to step."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Dtypes of the copies of one parameter; `master` None where the parameter is its own master."""

    name: str
    parameter: str
    gradient: str
    master: str | None
    moment: str
    step_gradient: str | None
    """A second, wider copy of every gradient that lives during the optimizer step."""
    runnable: bool
    source: str
    rounding: Rounding = "nearest"
    """How an updated parameter without a master copy is rounded to its dtype."""
    product: str | None = None
    """Dtype of the products of layers; the head and attention's core stay in that of the parameters. None: as those."""

    @property
    def scales_loss(self) -> bool:
        """Whether backward starts with a scaled loss: fp16 has too few exponents for gradients (smallest 6e-8)."""
        return self.parameter == "fp16"

    def check_runnable(self) -> None:
        """Raises UnsupportedError where a recipe can be planned with, but not be trained with."""
        if not self.runnable:
            names = ", ".join(recipe.name for recipe in RECIPES.values() if recipe.runnable)
            raise UnsupportedError(f"precision `{self.name}` is for forecasts only; train with one of {names}")

    @property
    def parameter_bytes(self) -> int:
        return DTYPE_BYTES[self.parameter]

    @property
    def statistic_bytes(self) -> int:
        """Bytes of one statistic (of norms, scores and losses): fp32, or fp64 where everything is."""
        return max(DTYPE_BYTES["fp32"], self.parameter_bytes)

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of one gradient element as it crosses the ranks: without the step copy."""
        return DTYPE_BYTES[self.gradient]

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter held as gradients, the step copy included."""
        return self.sent_gradient_bytes + (DTYPE_BYTES[self.step_gradient] if self.step_gradient else 0)

    @property
    def master_bytes(self) -> int:
        return DTYPE_BYTES[self.master] if self.master else 0

    @property
    def moment_bytes(self) -> int:
        """Bytes of ONE moment; an optimizer keeps NUM_MOMENTS of them."""
        return DTYPE_BYTES[self.moment]

    @property
    def adamw_total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.master_bytes + NUM_MOMENTS["adamw"] * self.moment_bytes


RECIPES = {
    r.name: r
    for r in (
        Recipe("fp32", "fp32", "fp32", None, "fp32", None, True, "pure fp32 Adam: 4 + 4 + 8 = 16 bytes"),
        Recipe("fp64", "fp64", "fp64", None, "fp64", None, True, "tests: 8 + 8 + 16 = 32 bytes"),
        Recipe("bf16", "bf16", "fp32", "fp32", "fp32", None, True, "Megatron-LM: 2 + 4 + 4 + 8 = 18 bytes"),
        Recipe("bf16-16", "bf16", "bf16", "fp32", "fp32", None, True, "ZeRO §3: 2 + 2 + 4 + 8 = 16 bytes"),
        Recipe(
            "bf16-20", "bf16", "bf16", "fp32", "fp32", "fp32", False, "ZeRO-Infinity §3: 2 + 2 + 4 + 8 + 4 = 20 bytes"
        ),
        Recipe(
            "bf16-sr",
            "bf16",
            "bf16",
            None,
            "fp32",
            None,
            True,
            "bf16 without masters, stochastic rounding (Zamirai et al. 2020): 2 + 2 + 8 = 12 bytes",
            "stochastic",
        ),
        Recipe(
            "bf16-fp8",
            "bf16",
            "fp32",
            "fp32",
            "fp32",
            None,
            False,
            "bf16 with products in 8 bits (Micikevicius et al. 2022; Transformer Engine): 18 bytes",
            product="fp8",
        ),
        Recipe("fp16", "fp16", "fp32", "fp32", "fp32", None, True, "Megatron-LM: 2 + 4 + 4 + 8 = 18 bytes"),
        Recipe("fp16-16", "fp16", "fp16", "fp32", "fp32", None, True, "ZeRO §3: 2 + 2 + 4 + 8 = 16 bytes"),
    )
}
