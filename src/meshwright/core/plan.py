"""Plan: model × cluster × job × strategy, one file that every command reads."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationInfo, field_validator, model_validator

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.expert_rules import check_imbalance
from meshwright.core.job import Job
from meshwright.core.legal import check
from meshwright.core.model import ModelSpec
from meshwright.core.schedule import FILE_SUFFIX
from meshwright.core.strategy import Strategy
from meshwright.core.values import Value, read_plan, write_text


class Plan(Value):
    """What is run. Cannot be built around an illegal strategy (raises RuleError)."""

    model: ModelSpec
    """What is trained."""
    cluster: ClusterSpec
    """On what."""
    job: Job
    """On how much at once."""
    strategy: Strategy
    """How it is split."""
    why: str = ""
    """The planner's explanation, in words."""

    @field_validator("strategy")
    @classmethod
    def _placed(cls, strategy: Strategy, info: ValidationInfo) -> Strategy:
        cluster = info.data.get("cluster")
        return strategy if cluster is None else strategy.on(cluster)

    @model_validator(mode="after")
    def _legal(self) -> Plan:
        check_imbalance(self.model, self.job)
        check(self.strategy, self.model, self.cluster, self.job)
        return self

    def with_schedule(self, schedule: str) -> Plan:
        """The same plan, with the same timetable under another name: that of a copy of its file."""
        return self.model_copy(update={"strategy": self.strategy.model_copy(update={"schedule": schedule})})

    def save(self, path: Path | str) -> None:
        """Write as TOML, whole or not at all. The file of a table of one's own is named relative to the plan's."""
        file = self.strategy.schedule_file
        if file is None or file.is_absolute():
            return write_text(path, self.to_toml())
        write_text(path, self.with_schedule(os.path.relpath(file, Path(path).parent)).to_toml())

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read a plan file. A table that it names by a relative path is looked for beside it.

        Raises InputError or RuleError.
        """
        data = read_plan(path)
        if "requests" in data and "job" not in data:
            raise InputError(
                f"{path}: a plan for serving, which `serve --plan`, `show`, `what-if` and `emit --to vllm` take; plan "
                "a training without --serve"
            )
        strategy = data.get("strategy")
        if isinstance(strategy, dict) and str(strategy.get("schedule")).endswith(FILE_SUFFIX):
            strategy["schedule"] = str(Path(path).parent / str(strategy["schedule"]))
        return cls.parse(data, str(path))
