"""`meshwright parity`: does this layout compute what one process computes?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from meshwright.core.errors import ParityError, UnsupportedError
from meshwright.core.plan import Plan
from meshwright.run.environment import detect
from meshwright.run.launch import enter_ranks, speaks_for_all


def parity_command(
    plan: Annotated[Path, typer.Argument(help="Plan file written by `meshwright plan`.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and inputs.")] = 0,
) -> None:
    """Run the plan's layout on a tiny clone of its model beside one process, number by number."""
    from meshwright.run.set_up import check_runnable
    from meshwright.run.tiny import tiny_plan

    planned = Plan.load(plan)
    if planned.strategy.pipeline_schedule.is_asynchronous:
        raise UnsupportedError(
            f"parity compares with one process whose updates are not delayed, and those of schedule "
            f"`{planned.strategy.schedule}` are; take schedule=1f1b"
        )
    check_runnable(planned)
    clone, notes = tiny_plan(planned)

    def say_what_runs() -> None:
        smaller = f" ({', '.join(notes)})" if notes else ""
        typer.echo(f"{clone.strategy.describe()} on `{clone.model.name}`{smaller}")

    if enter_ranks(sys.argv[1:], clone.strategy.world_size, before=say_what_runs) is not None:
        _compare(clone, seed)
    if speaks_for_all(detect(os.environ)):
        typer.echo(
            "pass: gradients, norms, losses, weights after SGD and clipped AdamW equal one process; "
            "traffic and memory equal the forecast"
        )


def _compare(clone: Plan, seed: int) -> None:
    """In a rank. Raises ParityError with the first number that differs."""
    from meshwright.comm.collectives import barrier
    from meshwright.core.axes import WORLD
    from meshwright.run.engine import make_mesh
    from meshwright.run.parity import find_mismatch
    from meshwright.run.tiny import offloaded_to

    mesh = make_mesh(clone)
    with TemporaryDirectory(prefix="meshwright-parity-") as folder:  # the plan's own may be another machine's
        mismatch = find_mismatch(offloaded_to(clone, folder), mesh, seed)
    if mismatch is not None:
        raise ParityError(str(mismatch))
    barrier(mesh[WORLD])
