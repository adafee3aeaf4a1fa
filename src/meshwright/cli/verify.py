"""`meshwright verify`: forecast, dry run and measurement beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.core.units import counted
from meshwright.run.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from meshwright.core.plan import Plan
    from meshwright.core.record import RankRecord
    from meshwright.report.tables import Comparison


def verify_command(
    run: Annotated[Path, typer.Argument(metavar="RUN|PLAN", help="A training run's folder, or a plan file.")],
) -> None:
    """Lay forecast, dry run and measurement side by side; exit status 1 where traffic or memory differs."""
    if not (print_plan(run) if run.is_file() else print_verification(RunFolder(run), with_dry_run=True)):
        raise typer.Exit(1)


def print_plan(file: Path) -> bool:
    """Print forecast and dry run of a plan. True where every role would send and hold what was forecast."""
    from meshwright.core.plan import Plan
    from meshwright.rehearse.verify import REHEARSED_TOLERANCE, rehearsed_differences
    from meshwright.report.tables import report_console

    plan = Plan.load(file)
    records = _rehearsed(plan)
    full = max(records, key=lambda r: r.memory.total_bytes)
    console = report_console()
    _print_table(console, full.rank, [], list(_compared(plan, full)))
    wrong = rehearsed_differences(plan, records)
    for difference in wrong:
        console.print(f"dry run differs: {difference}", highlight=False)
    if not wrong:
        _print_agreement(console, f"dry run of {counted(len(records), 'role')}", REHEARSED_TOLERANCE)
    console.print(f"nothing was measured: `meshwright train {file} --out RUN`, then `meshwright verify RUN`")
    return not wrong


def print_verification(run: RunFolder, *, with_dry_run: bool = False) -> bool:
    """Print the comparison of a run. True where every rank sent and held what was forecast."""
    from meshwright.core.record import RankRecord
    from meshwright.planner.price import price
    from meshwright.rehearse.verify import (
        ACTIVATION_TOLERANCE,
        REHEARSED_TOLERANCE,
        differences,
        measured_bubble,
        rehearsed_differences,
    )
    from meshwright.report.tables import compare_step_time, compare_waits, report_console

    plan, records = run.plan(), RankRecord.load_all(run.measured)
    wrong = [f"differs: {difference}" for difference in differences(plan, records)]
    full = max(records, key=lambda r: r.memory.total_bytes)
    rehearsed = _rehearsed(plan) if with_dry_run else []
    wrong += [f"dry run differs: {difference}" for difference in rehearsed_differences(plan, rehearsed)]
    step = price(plan.model, plan.cluster, plan.job, plan.strategy).step_time
    rows = [
        *_compared(plan, full),
        *compare_step_time(step, max(r.step_time_s for r in records) or None, measured_bubble(records)),
        *compare_waits(step, min((r.waited_s for r in records), key=lambda waited_s: sum(waited_s.values()))),
    ]
    console = report_console()
    _print_table(console, full.rank, rows, [c for r in _like(plan, full, rehearsed) for c in _compared(plan, r)])
    for line in (*wrong, *imbalance_lines(plan, run)):
        console.print(line, highlight=False)
    if not wrong:
        who = f"all {len(records)} ranks" if len(records) > 1 else "the one rank"
        _print_agreement(console, who, ACTIVATION_TOLERANCE, routed=plan.strategy.ep > 1)
        if rehearsed:
            _print_agreement(console, f"dry run of {counted(len(rehearsed), 'role')}", REHEARSED_TOLERANCE)
    return not wrong


def imbalance_lines(plan: Plan, run: RunFolder) -> Iterator[str]:
    """How unevenly the ranks of experts were loaded in the last step, beside what the forecast takes them to be: what
    the job says, or the most that there can be. Rows that no expert had room for do not count."""
    from meshwright.cost.activations import imbalance_of
    from meshwright.rehearse.verify import measured_imbalance
    from meshwright.train.metrics import METRICS_FILE, read_metrics

    if plan.strategy.ep == 1 or not (run.path / METRICS_FILE).exists():
        return
    last = next((row for row in reversed(read_metrics(run.path)) if row.expert_loads), None)
    if last is None or last.expert_loads is None:
        return
    measured, layer = measured_imbalance(last.expert_taken or last.expert_loads, plan.strategy.ep)
    planned = imbalance_of(plan.job, plan.strategy, plan.model)
    advice = f"; plan with --imbalance {measured:.2f}" if measured > 1.05 * planned else ""
    yield (
        f"imbalance of the {plan.strategy.ep} ranks that share experts: forecast for {planned:.2f}, measured "
        f"{measured:.2f} in step {last.step} (layer {layer}){advice}"
    )


def _rehearsed(plan: Plan) -> list[RankRecord]:
    from meshwright.run.dryrun import dry_run

    return [r.record for r in dry_run(plan)]


def _like(plan: Plan, record: RankRecord, rehearsed: Sequence[RankRecord]) -> list[RankRecord]:
    """The dry run of the role of a rank, if there was one: that with the same forecast, of the same pipeline rank."""
    from meshwright.core.axes import PP
    from meshwright.cost.memory import memory

    def held(of: RankRecord) -> object:
        return of.coordinates[PP], memory(plan.model, plan.job, plan.strategy, of.coordinates)

    return [r for r in rehearsed if held(r) == held(record)][:1]


def _compared(plan: Plan, record: RankRecord) -> Iterator[Comparison]:
    """Forecast of a rank beside its record, measured or rehearsed."""
    from meshwright.cost.memory import memory
    from meshwright.cost.traffic import traffic
    from meshwright.report.tables import compare_memory, compare_traffic

    model, job, strategy, at = plan.model, plan.job, plan.strategy, record.coordinates
    yield from compare_memory(memory(model, job, strategy, at), record.memory)
    yield from compare_traffic(traffic(model, job, strategy, at), record.traffic)


def _print_table(console: Console, rank: int, measured: list[Comparison], rehearsed: list[Comparison]) -> None:
    from meshwright.report.tables import beside_rehearsal, comparison_table

    rows = beside_rehearsal(measured, rehearsed)
    what = "Forecast, dry run and measured" if rehearsed else "Forecast beside measured"
    console.print(comparison_table(rows, f"{what}, rank {rank} (the fullest)"))


def _print_agreement(console: Console, who: str, tolerance: float, *, routed: bool = False) -> None:
    """`routed`: tokens chose what was sent over ep, and what experts kept."""
    traffic, activations = "traffic equal to the byte", f"; activations within {tolerance:.0%}"
    if routed:
        traffic, activations = f"{traffic}, over ep equal in calls (its bytes follow the tokens)", ""
    console.print(f"{who}: {traffic}; parameters, gradients, optimizer and buffers exact{activations}", highlight=False)
