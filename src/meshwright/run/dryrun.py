"""Dry run: the real training code over ranks that are not there and tensors without values, in one process.

plan ─▶ roles ─▶ per role: fake mesh ─▶ Engine ─▶ one step (or, of an endless table, until it is steady) ─▶ Rehearsal

Model, composition, interpreter, ZeRO, offload and optimizer are those of a run; only the transport, the tensors'
values and the tiers are missing. Where a GPU would take another path through the same layers (norms), the path of CPU
ranks is taken; it keeps as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshwright.comm.fake import META, fake_mesh
from meshwright.comm.mesh import axis_groups
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.models.build import build
from meshwright.rehearse.journal import Entry, Journal
from meshwright.rehearse.roles import Role, roles
from meshwright.rehearse.shapes import shapes_only
from meshwright.run.engine import Engine, default_options, sub_axes
from meshwright.schedule.build import first_steady


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What one rank of a role held and sent in a step."""

    role: Role
    record: RankRecord
    """Without times: nothing was computed."""
    entries: tuple[Entry, ...]
    """Its actions and calls, in order."""


def dry_run(
    plan: Plan,
    watch: Callable[[int, int], None] = lambda done, total: None,
    only: Sequence[Role] | None = None,
) -> tuple[Rehearsal, ...]:
    """One step of every role of a plan, whatever its cluster.

    Args:
        plan: any that can be trained.
        watch: called before each role with (roles done, roles in all).
        only: these roles, or ranks; None: all roles of the plan.

    Raises UnsupportedError for a model or a precision that is for forecasts only.
    """
    plan.strategy.recipe.check_runnable()
    found = roles(plan) if only is None else tuple(only)
    groups = axis_groups(plan.strategy.sizes, **sub_axes(plan))
    rehearsed = []
    with shapes_only():
        for done, role in enumerate(found):
            watch(done, len(found))
            journal = Journal()
            mesh = fake_mesh(role.rank, plan.strategy.sizes, groups, journal)
            engine = Engine(build(plan.model), plan, mesh, default_options(plan))
            rehearsed.append(_rehearse(engine, role, journal))
            engine.close()
    return tuple(rehearsed)


def _rehearse(engine: Engine, role: Role, journal: Journal) -> Rehearsal:
    """The first step, or the first that is like all that follow."""
    strategy, job = engine.plan.strategy, engine.plan.job
    is_endless = strategy.pipeline_schedule.is_asynchronous
    tokens = torch.empty((strategy.micro_batch_size, job.seq_length), dtype=torch.int64, device=META)
    micro_batches = [(tokens, tokens)] * strategy.num_micro_batches
    engine.parallel.runner.watch = journal.begin
    with engine.parallel.census() as census:
        journal.kept_bytes = lambda: census.live_bytes
        for _ in range(first_steady(strategy.pipeline) + 1 if is_endless else 1):
            journal.start()
            engine.step(micro_batches, 0.0)
    record = RankRecord(role.rank, role.coordinates, engine.memory(census.peak_bytes), engine.last_traffic)
    return Rehearsal(role, record, tuple(journal.entries))
