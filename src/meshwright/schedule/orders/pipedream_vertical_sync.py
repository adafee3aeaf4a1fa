"""PipeDream with vertical sync: a micro-batch uses weights of the same version at all stages.

Source: Narayanan et al. 2019 (SOSP), section 3.3.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.program import Action
from meshwright.core.schedule import PipelineSize
from meshwright.schedule.orders import pipedream


def version(size: PipelineSize, action: Action) -> int:
    """The latest of the first stage when the micro-batch enters there."""
    return pipedream.version(size, replace(action, stage=0))


SCHEDULE = replace(
    pipedream.SCHEDULE,
    name="pipedream-vertical-sync",
    version=version,
    num_versions=lambda size, rank: size.num_ranks,
)
