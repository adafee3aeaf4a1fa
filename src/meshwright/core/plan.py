"""Plan: model × cluster × job × strategy, one file that every command reads."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationInfo, field_validator, model_validator

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.rules import check
from meshwright.core.strategy import Strategy
from meshwright.core.values import Value, read_text, write_text


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
        check(self.strategy, self.model, self.cluster, self.job)
        return self

    def save(self, path: Path | str) -> None:
        """Write as TOML, whole or not at all."""
        write_text(path, self.to_toml())

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read a plan file. Raises InputError or RuleError."""
        return cls.from_toml(read_text(path), str(path))
