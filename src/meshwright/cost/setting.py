"""Setting: what is priced, whatever the strategy."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.profile import OWN, Stack


@dataclass(frozen=True, slots=True)
class Setting:
    """A model that is trained, as a job, on a cluster, by a stack."""

    model: ModelSpec
    job: Job
    cluster: ClusterSpec
    stack: Stack = OWN
    """The software that runs it."""
