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

_WIDTH_WITH_BAR = 120
"""On a narrower terminal the numbers need the room."""


class Progress:
    """Step, loss, tokens/s, gradient norm, learning rate and time left; in fp16 also the loss scale, and how many steps
    of this process were skipped. Use on one rank, as a context.

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
        self._eval_loss: float | None = None
        self._num_skipped = 0
        self._bar = None
        if self._console.is_terminal:
            step, status = "step {task.completed}/{task.total}", "{task.fields[status]}"
            wide = (TextColumn(step), BarColumn(bar_width=None), TextColumn(status))
            narrow = (TextColumn(f"{step} {status}"),)  # one column, so that only its end is cut
            columns = wide if self._console.width >= _WIDTH_WITH_BAR else narrow
            self._bar = RichProgress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, status="starting")

    def update(self, row: StepMetrics) -> None:
        """Show a step that has ended."""
        done = row.step + 1
        self._eval_loss = self._eval_loss if row.eval_loss is None else row.eval_loss
        self._num_skipped += bool(row.skipped)
        status = self._status(row, self._time_left(done))
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=status)
        elif done % self._every == 0 or done == self._total_steps:
            self._console.print(
                f"step {done}/{self._total_steps}  {status}", highlight=False, markup=False, soft_wrap=True
            )

    def _status(self, row: StepMetrics, time_left: str) -> str:
        """What matters most first, since a narrow terminal cuts the end. The last evaluation stays."""
        evaluated = "" if self._eval_loss is None else f"  eval {self._eval_loss:.4f}"
        scaled = "" if row.loss_scale is None else f"  loss scale {row.loss_scale:,.0f}, {self._num_skipped} skipped"
        return (
            f"loss {row.loss:.4f}{evaluated}  left {time_left}  {row.tokens_per_s:,.0f} tokens/s  "
            f"grad norm {row.grad_norm:.2f}  lr {row.lr:.1e}{scaled}"
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
