"""`meshwright verify`: forecast beside measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.run.folder import RunFolder


def verify_command(run: Annotated[Path, typer.Argument(help="The folder of a training run.")]) -> None:
    """Lay forecast and measurement side by side; exit status 1 where traffic or memory differs."""
    if not print_verification(RunFolder(run)):
        raise typer.Exit(1)


def print_verification(run: RunFolder) -> bool:
    """Print the comparison of a run. True where every rank sent and held what was forecast."""
    from meshwright.core.record import RankRecord
    from meshwright.cost.memory import memory
    from meshwright.cost.traffic import traffic
    from meshwright.planner.price import price
    from meshwright.rehearse.verify import ACTIVATION_TOLERANCE, differences, measured_bubble
    from meshwright.report.tables import (
        compare_memory,
        compare_step_time,
        compare_traffic,
        compare_waits,
        comparison_table,
        report_console,
    )

    plan, records = run.plan(), RankRecord.load_all(run.measured)
    wrong = differences(plan, records)
    full = max(records, key=lambda r: r.memory.total_bytes)
    model, job, strategy = plan.model, plan.job, plan.strategy
    step = price(model, plan.cluster, job, strategy).step_time
    rows = [
        *compare_memory(memory(model, job, strategy, full.coordinates), full.memory),
        *compare_traffic(traffic(model, job, strategy, full.coordinates), full.traffic),
        *compare_step_time(step, max(r.step_time_s for r in records) or None, measured_bubble(records)),
        *compare_waits(step, min((r.waited_s for r in records), key=lambda waited_s: sum(waited_s.values()))),
    ]
    console = report_console()
    console.print(comparison_table(rows, f"Forecast beside measured, rank {full.rank} (the fullest)"))
    for difference in wrong:
        console.print(f"differs: {difference}", highlight=False)
    if not wrong:
        who = f"all {len(records)} ranks" if len(records) > 1 else "the one rank"
        console.print(
            f"{who}: traffic equal to the byte; parameters, gradients, optimizer and buffers exact; "
            f"activations within {ACTIVATION_TOLERANCE:.0%}",
            highlight=False,
        )
    return not wrong
