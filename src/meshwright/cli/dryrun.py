"""`meshwright dryrun`: the training code over ranks that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.drawing import check_outputs, write_files
from meshwright.core.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.plan import Plan
    from meshwright.run.dryrun import Rehearsal

MAX_ROLES = 16


def dryrun_command(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, and nothing else.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write every action and call here, for ui.perfetto.dev.")] = None,
) -> None:
    """Rehearse a training step: real code, ranks and tensors that are not there."""
    import json

    from rich.console import Console

    from meshwright.core.plan import Plan
    from meshwright.rehearse.trace import trace as traced
    from meshwright.report.tables import report_console
    from meshwright.run.dryrun import dry_run

    plan = Plan.load(file)
    check_outputs({"--trace": trace})
    with Console(stderr=True).status("rehearsing") as status:
        rehearsed = dry_run(plan, lambda done, total: status.update(f"rehearsing role {done + 1} of {total}"))
    console = report_console()
    if as_json:
        typer.echo(json.dumps(_data(plan, rehearsed), indent=1))
    else:
        _print(console, plan, rehearsed)
    content = json.dumps(traced(plan, ((r.role, r.entries) for r in rehearsed))) if trace else ""
    write_files(Console(stderr=True) if as_json else console, [(trace, "trace", lambda: content)])


def _print(console: Console, plan: Plan, rehearsed: tuple[Rehearsal, ...]) -> None:
    """Memory of every role, what one sends, sums over all ranks, and whether the forecast agrees."""
    from meshwright.report.tables import memory_table, traffic_table

    world = plan.strategy.world_size
    console.print(
        f"dry run of {plan.strategy.describe()}: {counted(world, 'rank')}, {counted(len(rehearsed), 'role')}",
        style="bold",
        highlight=False,
    )
    shown = sorted(rehearsed, key=lambda r: -r.record.memory.total_bytes)[:MAX_ROLES]
    held = {_name(r): r.record.memory for r in rehearsed if r in shown}
    hidden = len(rehearsed) - len(shown)
    fullest = f", the {MAX_ROLES} fullest of {len(rehearsed)} roles" if hidden else ""
    console.print(memory_table(held, f"Memory at the peak of a step{fullest}"))
    busiest = max(rehearsed, key=lambda r: r.record.traffic.wire_bytes)
    console.print(traffic_table(busiest.record.traffic, f"What rank {busiest.role.rank} sends in a step"))
    for line in (_sums(rehearsed), _fit(plan, shown[0]), _judgement(plan, rehearsed)):
        console.print(line, highlight=False)


def _name(rehearsal: Rehearsal) -> str:
    """`rank 0, ×32`."""
    role = rehearsal.role
    return f"rank {role.rank}" + (f", ×{role.num_ranks:,}" if role.num_ranks > 1 else "")


def _sums(rehearsed: tuple[Rehearsal, ...]) -> str:
    """Over all ranks of the run."""
    by_axis: dict[str, int] = {}
    calls = 0
    for each in rehearsed:
        calls += each.role.num_ranks * sum(row.calls for row in each.record.traffic.rows.values())
        for axis, sent in each.record.traffic.by_axis().items():
            by_axis[axis] = by_axis.get(axis, 0) + each.role.num_ranks * sent
    listed = ", ".join(f"{axis} {format_bytes(sent)}" for axis, sent in by_axis.items())
    return f"all ranks together send {format_bytes(sum(by_axis.values()))} in {counted(calls, 'call')}" + (
        f": {listed}" if listed else ""
    )


def _fit(plan: Plan, fullest: Rehearsal) -> str:
    memory, cluster = fullest.record.memory, plan.cluster
    needs = memory.total_bytes + memory.host_bytes * cluster.host_is_device
    verdict = "fits" if needs <= cluster.usable_memory_bytes else "does not fit"
    return f"the fullest, rank {fullest.role.rank}, holds {format_bytes(needs)} of " + (
        f"{format_bytes(cluster.usable_memory_bytes)} usable: {verdict}"
    )


def _judgement(plan: Plan, rehearsed: tuple[Rehearsal, ...]) -> str:
    from meshwright.rehearse.verify import REHEARSED_TOLERANCE

    if wrong := _differences(plan, rehearsed):
        return "\n".join(f"differs from the forecast: {difference}" for difference in wrong)
    return (
        f"as forecast: traffic to the byte, parameters, gradients, optimizer and buffers exactly, activations within "
        f"{REHEARSED_TOLERANCE:.0%}"
    )


def _differences(plan: Plan, rehearsed: tuple[Rehearsal, ...]) -> list[str]:
    from meshwright.rehearse.verify import rehearsed_differences

    return [str(difference) for difference in rehearsed_differences(plan, [r.record for r in rehearsed])]


def _data(plan: Plan, rehearsed: tuple[Rehearsal, ...]) -> dict[str, Any]:
    """Plain data."""
    roles = [
        {
            "rank": r.role.rank,
            "coordinates": r.role.coordinates,
            "num_ranks": r.role.num_ranks,
            "memory": r.record.memory.to_dict(),
            "traffic": r.record.traffic.to_list(),
        }
        for r in rehearsed
    ]
    return {
        "strategy": plan.strategy.describe(),
        "num_ranks": plan.strategy.world_size,
        "roles": roles,
        "differs_from_forecast": _differences(plan, rehearsed),
    }
