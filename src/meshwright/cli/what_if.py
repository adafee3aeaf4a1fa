"""`meshwright what-if`: a plan with other choices, beside itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.core.errors import InputError
from meshwright.core.values import writing

if TYPE_CHECKING:
    from meshwright.planner.what_if import Priced
    from meshwright.report.tables import Comparison


def what_if_command(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of the strategy or job, as in tp=4 or zero=3.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the changed plan here.")] = None,
) -> None:
    """Change some choices of a plan, and see memory, traffic and time side by side."""
    from meshwright.cli import serving
    from meshwright.cli.drawing import check_outputs
    from meshwright.core.plan import Plan
    from meshwright.core.serving import ServingPlan, is_serving
    from meshwright.planner.what_if import changed, parse_changes, priced
    from meshwright.report.tables import changes_table, report_console

    if not change:
        raise InputError("nothing to change; give --set FIELD=VALUE, for example --set tp=4 --set zero=3")
    check_outputs({"--out": out})
    if is_serving(file):
        serving.what_if(ServingPlan.load(file), change, out)
        return
    plan = Plan.load(file)
    now, then = priced(plan), priced(changed(plan, parse_changes(change)))
    if out:
        with writing(out):
            then.plan.save(out)
    console = report_console()
    for name, each in (("now", now), ("what if", then)):
        verdict = "fits" if each.forecast.fits else "does not fit"
        console.print(f"{name}: {each.plan.strategy.describe()}: {verdict}, {each.forecast.limit}", highlight=False)
    for title, rows in (
        ("Memory of the fullest rank", _memory(now, then)),
        ("What that rank sends in a step", _traffic(now, then)),
        ("Step time", _time(now, then)),
    ):
        console.print(changes_table(rows, ("now", "what if", "change"), title))
    if out:
        console.print(f"plan written to {out}", soft_wrap=True)


def _memory(now: Priced, then: Priced) -> list[Comparison]:
    from meshwright.report.tables import compare_memory

    rows = compare_memory(now.forecast.memory, then.forecast.memory)
    return [replace(row, name=row.name.removeprefix("memory, ")) for row in rows]


def _traffic(now: Priced, then: Priced) -> list[Comparison]:
    """Wire bytes, row by row, and their sum."""
    from meshwright.report.tables import Comparison, compare_traffic

    sent = [each.forecast.traffic for each in (now, then)]
    rows = [replace(row, name=row.name.removesuffix(", wire")) for row in compare_traffic(*sent) if row.unit == "bytes"]
    return [*rows, Comparison("all", sent[0].wire_bytes, sent[1].wire_bytes, "bytes")]


def _time(now: Priced, then: Priced) -> list[Comparison]:
    """Term by term; then the step, its bubble, and how long a token takes."""
    from meshwright.report.tables import Comparison

    terms = [{term.name: term.seconds for term in each.terms} for each in (now, then)]
    steps = [each.forecast.step_time for each in (now, then)]
    tokens = [each.plan.job.tokens_per_step for each in (now, then)]
    return [
        *(Comparison(name, terms[0].get(name, 0), terms[1].get(name, 0), "seconds") for name in terms[0] | terms[1]),
        Comparison("step", steps[0].total_s, steps[1].total_s, "seconds"),
        Comparison("bubble", steps[0].bubble_fraction, steps[1].bubble_fraction, "fraction"),
        Comparison("tokens per second", tokens[0] / steps[0].total_s, tokens[1] / steps[1].total_s, "calls"),
    ]
