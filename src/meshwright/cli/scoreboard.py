"""`meshwright scoreboard`: the planner beside measurements that others published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.core.errors import InputError

USES = ("check", "fit", "all")


def scoreboard_command(
    tables: Annotated[Path, typer.Argument(help="Folder with the published tables, as JSON files with `rows`.")],
    use: Annotated[str, typer.Option(help="Rows that are judged: check, fit or all.")] = "check",
    only: Annotated[list[str] | None, typer.Option(help="Only tables whose name contains this.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Also each row: strategy, forecast, measured, error.")] = False,
) -> None:
    """Replay published training runs through the planner: how far its forecasts are off."""
    from meshwright.planner.scoreboard.published import read_tables
    from meshwright.planner.scoreboard.score import scoreboard
    from meshwright.report.scoreboard import rows_table, scores_table
    from meshwright.report.tables import report_console

    if use not in USES:
        raise InputError(f"--use {use}: one of {', '.join(USES)}")
    found = [t for t in read_tables(tables) if not only or any(word in t.name for word in only)]
    if not found:
        raise InputError(f"{tables}: no table whose name contains {' or '.join(only or ())}")
    scores = scoreboard(found, use)
    if not scores:
        raise InputError(f"{tables}: no row is marked `{use}`")
    console = report_console()
    console.print(scores_table(scores, use))
    for score in scores:
        reasons = ", ".join(f"{reason} ×{count}" for reason, count in score.not_expressed)
        if reasons:
            console.print(f"{score.name}, not expressed: {reasons}", soft_wrap=True, highlight=False)
    for score in scores if rows else ():
        console.print(rows_table(score))
