"""What `plan`, `show` and `what-if` do with plans for serving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.core.errors import InputError
from meshwright.core.values import writing

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.cluster import ClusterSpec
    from meshwright.core.model import ModelSpec
    from meshwright.core.serving import Requests, ServingPlan
    from meshwright.planner.serving import ServingResult

OF_TRAINING = (
    "seq", "batch", "optimizer", "zero", "schedule", "recompute", "balance_from", "objective", "tokens", "price",
    "must", "imbalance",
)  # fmt: skip
"""Options of `plan` that say nothing about a server."""
OF_SERVING = ("prompt", "output", "rate", "max_ttft", "max_tpot")
"""Options of `plan` that say nothing about a training."""

REQUESTS = {"prompt_tokens": "--prompt", "output_tokens": "--output", "rate_per_s": "--rate",
            "max_ttft_s": "--max-ttft", "max_tpot_s": "--max-tpot"}  # fmt: skip
"""Field → option of `plan --serve`."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What is printed and written."""

    top: int
    explain_rules: bool
    out: Path | None


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_others(context: typer.Context, serve: bool) -> None:
    """Raises InputError where an option is given that would be ignored."""
    for name in OF_TRAINING if serve else OF_SERVING:
        if is_typed(context, name):
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{option} says how a model is trained; a plan for serving takes --prompt, --output and --rate"
                if serve
                else f"{option} says what a server is asked; add --serve, or leave it out"
            )


@contextmanager
def options_named(names: Mapping[str, str]) -> Iterator[None]:
    """Where a value is refused, name the options that were typed.

    Args:
        names: field → option.
    """
    try:
        yield
    except InputError as error:
        _, _, what = str(error).partition(": ")
        field, _, rest = what.removeprefix("`").partition("`: ")
        raise InputError(f"{names[field]}: {rest}" if field in names else what) from None


def requests(prompt: int, output: int, rate: float, max_ttft: float | None, max_tpot: float | None) -> Requests:
    """As typed. Raises InputError naming the option."""
    from meshwright.core.serving import Requests

    for option, value in (("prompt", prompt), ("output", output), ("rate", rate), ("max-ttft", max_ttft),
                          ("max-tpot", max_tpot)):  # fmt: skip
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{option} {value:g}: a finite number above 0 is needed to plan a server")
    asked = {"prompt_tokens": prompt, "output_tokens": output, "rate_per_s": rate, "max_ttft_s": max_ttft,
             "max_tpot_s": max_tpot}  # fmt: skip
    with options_named(REQUESTS):
        return Requests.parse(asked, "requests")


def plan(spec: ModelSpec, cluster: ClusterSpec, asked: Requests, fix: Sequence[str], shown: Shown) -> None:
    """Find a layout, print it and what loses, write the plan."""
    from meshwright.core.sources import cluster_warning
    from meshwright.planner.explain_serving import explain
    from meshwright.planner.fix_serving import parse_layout
    from meshwright.planner.serving import plan_serving
    from meshwright.report.tables import report_console

    result = plan_serving(spec, cluster, asked, parse_layout(fix), lambda found: explain(spec, cluster, asked, found))
    if shown.out:  # before anything is printed: who reads that may stop reading
        with writing(shown.out):
            result.plan.save(shown.out)
    console = report_console()
    _print(console, result, shown.top)
    if shown.explain_rules:
        _print_rules(console, result.plan)
    for note in filter(None, (cluster_warning(cluster), _not_served(result.plan))):
        console.print(f"note: {note}", soft_wrap=True, highlight=False)
    if shown.out:
        console.print(f"plan written to {shown.out}", soft_wrap=True)


def _not_served(made: ServingPlan) -> str | None:
    """Why `meshwright serve` refuses the plan."""
    from meshwright.core.errors import UnsupportedError
    from meshwright.serve.servable import check_plan

    try:
        check_plan(made)
    except UnsupportedError as error:
        return f"`meshwright serve` does not run this plan: {error}"
    return None


def _print(console: Console, result: ServingResult, top: int) -> None:
    """The layouts, the front, how long decoding takes by tp, what was refused, and the paragraph."""
    from meshwright.core.units import format_time
    from meshwright.planner.explain_serving import decode_curve, sequences_of
    from meshwright.report.serving_plans import curve_table, layouts_table

    best, made = result.forecast, result.plan
    console.print(layouts_table(result.ranked[:top]))
    if len(result.front) > 1:
        console.print("Throughput against latency: no layout is better than one of these in both", style="bold")
        for each in result.front:
            between = format_time(each.now.tpot_s)
            console.print(
                f"  {each.tokens_per_device_s:>7,.0f} tokens/s per device  {between:>8} between tokens  "
                f"{each.layout.describe()}",
                soft_wrap=True, highlight=False,
            )  # fmt: skip
        console.print()
    together = sequences_of(best)
    curve = decode_curve(made.model, made.cluster, made.requests, made.layout, together)
    console.print(curve_table(curve, together))
    if result.refused:
        console.print("Not offered", style="bold")
        for rule in dict.fromkeys(refused.rule for refused in result.refused):
            same = [refused for refused in result.refused if refused.rule == rule]
            console.print(
                f"  {rule} ×{len(same)}, for example: {same[0].layout.describe()} {same[0].reason}",
                soft_wrap=True, highlight=False,
            )  # fmt: skip
        console.print()
    console.print(made.why, highlight=False)


def _print_rules(console: Console, made: ServingPlan) -> None:
    """The rows of the decision table that speak of serving, one by one."""
    from meshwright.planner.advise import advise_serving

    console.print("Rules of thumb, one by one", style="bold")
    for rule, holds in advise_serving(made.model, made.cluster, made.requests):
        words = f"{rule.id}: {rule.advice} [{rule.source}]"
        console.print(f"  {'yes' if holds else 'no ':3} {words}", soft_wrap=True, highlight=False)


def show(plan: ServingPlan) -> None:
    """A plan file as tables."""
    from meshwright.planner.explain_serving import decode_curve, sequences_of
    from meshwright.planner.serving import priced
    from meshwright.report.serving_plans import curve_table, serving_memory_table, serving_plan_table, step_table
    from meshwright.report.tables import report_console

    console, forecast = report_console(), priced(plan)
    together = sequences_of(forecast)
    curve = decode_curve(plan.model, plan.cluster, plan.requests, plan.layout, together)
    console.print(serving_plan_table(plan))
    console.print(serving_memory_table(forecast, plan.cluster.usable_memory_bytes))
    console.print(step_table(forecast))
    console.print(curve_table(curve, together))
    if plan.why:
        console.print(plan.why, highlight=False)


def what_if(plan: ServingPlan, texts: Sequence[str], out: Path | None) -> None:
    """A plan with other choices, beside itself."""
    from meshwright.planner.fix_serving import changed
    from meshwright.planner.serving import priced
    from meshwright.report.serving_plans import compare_serving
    from meshwright.report.tables import changes_table, report_console

    other = changed(plan, texts)
    now, then = priced(plan), priced(other)
    if out:
        with writing(out):
            other.save(out)
    console = report_console()
    for name, each in (("now", now), ("what if", then)):
        used = f"{each.utilisation:.0%} of what it sustains, where {each.most.limit}"
        console.print(f"{name}: {each.layout.describe()}: {used}", highlight=False, soft_wrap=True)
    for title, rows in compare_serving(now, then).items():
        console.print(changes_table(rows, ("now", "what if", "change"), title))
    if out:
        console.print(f"plan written to {out}", soft_wrap=True)
