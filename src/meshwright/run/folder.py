"""A run's folder: what stands where.

RUN/run.toml  plan.toml          what was asked for; the plan is written last
RUN/schedule.csv                 its timetable, where that is a table of one's own
RUN/data/                        tokens and tokenizer
RUN/metrics.jsonl  tensorboard/  what happened, step by step
RUN/checkpoints/                 training state
RUN/measured/rank-N.json         what each rank measured
RUN/loss.html                    the loss curve
RUN/experts.html                 loads of experts, of a mixture
RUN/logs/                        output of the ranks
RUN/lock                         there while a process trains here
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.core.plan import Plan
from meshwright.core.values import read_text, write_text
from meshwright.run.claim import claim
from meshwright.run.options import TrainOptions


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.toml"

    @property
    def options_path(self) -> Path:
        return self.path / "run.toml"

    @property
    def schedule_path(self) -> Path:
        return self.path / "schedule.csv"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def measured(self) -> Path:
        return self.path / "measured"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def claim(self) -> AbstractContextManager[None]:
        """Around training: see :func:`meshwright.run.claim.claim`."""
        return claim(self.path, self.path / "lock")

    def refuse_existing(self) -> None:
        """Raises InputError where a run stands here already."""
        if self.plan_path.exists():
            raise InputError(f"{self.path}: holds a run already; add --resume to continue it, or choose another folder")

    def write(self, plan: Plan, options: TrainOptions) -> None:
        """Write options, then plan; each whole or not at all, since other ranks may be reading."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.options_path, options.to_toml())
        if plan.strategy.schedule_file is not None:
            write_text(self.schedule_path, read_text(plan.strategy.schedule_file))
        self.on_copy(plan).save(self.plan_path)

    def on_copy(self, plan: Plan) -> Plan:
        """The same plan; where the run keeps a copy of its table, one that reads the copy, which nobody edits."""
        file, copy = plan.strategy.schedule_file, self.schedule_path
        is_kept = file is not None and copy.exists() and read_text(copy) == read_text(file)
        return plan.with_schedule(str(copy)) if is_kept else plan

    def plan(self) -> Plan:
        """The run's plan. Raises InputError."""
        if not self.plan_path.exists():
            raise InputError(f"{self.path}: not a run (no plan.toml in it)")
        return Plan.load(self.plan_path)

    def options(self) -> TrainOptions:
        """The run's options. Raises InputError."""
        return TrainOptions.from_toml(read_text(self.options_path), str(self.options_path))
