"""The learning rate of a step: linear warm-up, then a cosine down to a fraction of the peak."""

from __future__ import annotations

from math import cos, pi

from meshwright.core.errors import InputError
from meshwright.core.units import counted


def learning_rate(
    step: int, *, peak: float, warmup_steps: int = 0, total_steps: int, final_fraction: float = 0.1
) -> float:
    """Learning rate of step `step` (counted from 0).

        peak                ╭──╮
                          ╱      ╲
        final_fraction  ╱          ╲____   at total_steps - 1 and after
                       0    warmup

    Rises by equal amounts, from ``peak / (warmup_steps + 1)`` at step 0 to `peak` at step
    `warmup_steps`; never zero, so that no step is wasted.

    Raises:
        InputError: where the numbers describe no schedule.

    Source: Loshchilov & Hutter 2017 (SGDR) §3, without restarts.
    """
    if step < 0 or warmup_steps < 0 or total_steps <= 0:
        raise InputError(
            f"learning rate: step {step}, {warmup_steps} warm-up steps of {total_steps} steps; "
            "steps are counted from 0 and there must be at least one"
        )
    if warmup_steps >= total_steps:
        raise InputError(
            f"learning rate: {counted(warmup_steps, 'warm-up step')} leave none of the "
            f"{counted(total_steps, 'step')} at the peak; "
            f"use at most {total_steps - 1}"
        )
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    return peak * (final_fraction + (1 - final_fraction) * (1 + cos(pi * progress)) / 2)
