"""How a run shows that it moves: a live line on a terminal, a plain line every few steps elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from meshwright.core.units import format_time
from meshwright.train.metrics import StepMetrics


class Progress:
    """Step, loss, tokens/s, gradient norm, learning rate and time left. Use on one rank, as a context.

    Args:
        total_steps: of the whole run.
        start_step: first step of this process (from 0), after resuming.
        every: steps between plain lines where the output is not a terminal; the last step always prints.
        console, clock: for tests.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        every: int = 10,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._start_step = start_step
        self._every = every
        self._console = console or Console()
        self._clock = clock
        self._start_s = clock()
        self._bar = None
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[status]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, status="starting")

    def update(self, row: StepMetrics) -> None:
        """Show a step that has ended."""
        done = row.step + 1
        status = f"{describe(row)}  left {self._time_left(done)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=status)
        elif done % self._every == 0 or done == self._total_steps:
            self._console.print(
                f"step {done}/{self._total_steps}  {status}", highlight=False, markup=False, soft_wrap=True
            )

    def _time_left(self, done: int) -> str:
        per_step_s = (self._clock() - self._start_s) / max(1, done - self._start_step)
        return format_time(per_step_s * max(0, self._total_steps - done))

    def __enter__(self) -> Self:
        self._start_s = self._clock()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(row: StepMetrics) -> str:
    """`loss 3.2145  12,345 tokens/s  grad norm 0.81  lr 3.0e-04`, with the evaluation loss when there."""
    evaluated = "" if row.eval_loss is None else f"  eval {row.eval_loss:.4f}"
    return (
        f"loss {row.loss:.4f}{evaluated}  {row.tokens_per_s:,.0f} tokens/s  "
        f"grad norm {row.grad_norm:.2f}  lr {row.lr:.1e}"
    )
