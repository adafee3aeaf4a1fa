"""What a run leaves behind: one JSON object per step in `metrics.jsonl`, and TensorBoard event files.

Safe to append to: a resumed run first drops the rows of the steps that it is about to repeat.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from meshwright.core.errors import InputError
from meshwright.core.values import write_text

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step. `step` counts from 0; a checkpoint named N is followed by step N."""

    step: int
    loss: float
    """Mean over the unmasked tokens of the global batch, nats."""
    grad_norm: float
    """Global, before clipping."""
    lr: float
    tokens: int
    """Unmasked tokens of the step."""
    tokens_per_s: float
    step_time_s: float
    eval_loss: float | None = None
    """Mean over the unmasked tokens of the evaluation set, in steps that evaluate."""
    skipped: bool | None = None
    """Of fp16 training: True where a gradient overflowed and no rank changed anything."""
    loss_scale: float | None = None
    """Of fp16 training: what the loss was multiplied by."""
    router_loss: float | None = None
    """Of a mixture of experts: balance and z-losses of all layers, with their coefficients; not a part of `loss`."""
    expert_imbalance: float | None = None
    """Largest load of an expert over the mean load, in the worst of all layers; 1 where loads are even."""
    dropped_choices: float | None = None
    """Share of choices that no expert had room for, in all layers."""
    expert_exchange_s: float | None = None
    """Seconds that rank 0 stood still for rows on their way to experts of other ranks and back, where experts lie on
    several: what computation did not hide. On CUDA the stream waits, not the host, and this stays near zero."""
    expert_loads: Mapping[str, Sequence[int]] | None = None
    """Layer → how often each of its experts was chosen in the step, by all tokens."""
    expert_taken: Mapping[str, Sequence[int]] | None = None
    """Of a gate with a capacity: layer → tokens that each of its experts had room for."""


class MetricsWriter:
    """Writes the metrics of a run; each row is on disk when :meth:`write` returns.

    Args:
        run_dir: made where missing.
        start_step: first step that will be written; rows from there on are dropped.
        tensorboard: also write event files.
    """

    def __init__(self, run_dir: Path | str, start_step: int = 0, *, tensorboard: bool = True) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        if path.exists():
            _truncate(path, start_step)
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._events = _open_events(run_dir / TENSORBOARD_FOLDER, start_step) if tensorboard else None

    def write(self, row: StepMetrics) -> None:
        """Append one row."""
        data = {name: value for name, value in asdict(row).items() if value is not None}
        self._file.write(json.dumps({name: _to_json(value) for name, value in data.items()}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name in data.keys() - {"step", "expert_loads", "expert_taken"}:
                self._events.add_scalar(f"train/{name}", data[name], row.step)
            for layer, loads in (row.expert_loads or {}).items():
                mean = max(sum(loads) / len(loads), 1.0)
                for expert, load in enumerate(loads):
                    self._events.add_scalar(f"experts/layer_{layer}/expert_{expert}", load / mean, row.step)

    def close(self) -> None:
        """Close the files; calling it twice is harmless."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_metrics(run_dir: Path | str) -> list[StepMetrics]:
    """Rows of `metrics.jsonl` in order; a last line that was cut off by a kill is left out.

    Raises:
        InputError: missing file, or a line that is not a row.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    lines = text.split("\n")[:-1]  # what follows the last line break was cut off
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _loads(value: Any) -> dict[str, list[int]]:
    return {str(layer): [int(load) for load in loads] for layer, loads in value.items()}


_KINDS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "bool | None": bool,
    "Mapping[str, Sequence[int]] | None": _loads,
}
_READERS = {field.name: _KINDS.get(str(field.type), float) for field in fields(StepMetrics)}


def _parse(line: str, where: str) -> StepMetrics:
    try:
        data = json.loads(line)
        return StepMetrics(**{name: _READERS[name](value) for name, value in data.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{where}: not a row of metrics: {error}") from None


def _to_json(value: Any) -> Any:
    """JSON has no numbers for nan and the infinities; they are written as strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _truncate(path: Path, start_step: int) -> None:
    """Keep the rows before `start_step`."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    kept = [line for number, line in enumerate(lines, 1) if _parse(line, f"{path}:{number}").step < start_step]
    write_text(path, "".join(line + "\n" for line in kept))


def _open_events(folder: Path, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # slow to import; only the writing rank needs it

    return SummaryWriter(str(folder), purge_step=start_step)
