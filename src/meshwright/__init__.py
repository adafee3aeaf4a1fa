"""Plan, run and prove the parallel training of transformers.

The public names, each loaded when it is first used, so that planning never waits for torch:

load_model, load_cluster   names and files → ModelSpec, ClusterSpec
Job, Strategy, Plan        the values a plan is made of
plan                       model × cluster × job → the fastest plan that fits, and why
build, parallelize         a plain model → an engine that steps, evaluates, saves and loads under a plan
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.core.job import Job as Job
    from meshwright.core.plan import Plan as Plan
    from meshwright.core.sources import load_cluster as load_cluster
    from meshwright.core.sources import load_model as load_model
    from meshwright.core.strategy import Strategy as Strategy
    from meshwright.models.build import build as build
    from meshwright.planner.rank import plan as plan
    from meshwright.run.engine import parallelize as parallelize

_HOMES = {
    "Job": "meshwright.core.job",
    "Plan": "meshwright.core.plan",
    "Strategy": "meshwright.core.strategy",
    "build": "meshwright.models.build",
    "load_cluster": "meshwright.core.sources",
    "load_model": "meshwright.core.sources",
    "parallelize": "meshwright.run.engine",
    "plan": "meshwright.planner.rank",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `meshwright` has no name `{name}`; it has {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__name__"]
