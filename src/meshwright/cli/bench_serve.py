"""`meshwright bench-serve URL`: a load on any OpenAI-compatible server, and how it bore it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwright.core.serving import ServingPlan
    from meshwright.report.tables import Comparison
    from meshwright.serve.bench import Record, Summary
    from meshwright.serve.workload import Workload

DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = 8, 100
_LENGTHS = "128, uniform:64,256, normal:128,32, lognormal:128,0.8 or exponential:128"
OPTIONS = {
    **{name: f"--{name.replace('_', '-')}" for name in ("rate", "concurrency", "prompt_tokens", "output_tokens",
                                                        "prefix_tokens", "temperature")},
    "num_requests": "--requests", "duration_s": "--duration", "timeout_s": "--timeout",
}  # fmt: skip
"""Field of the workload → option."""
_EVERY_S = 10.0
"""Between plain lines where the output is no terminal."""


def bench_serve_command(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="Of the server, as in http://127.0.0.1:8000.")],
    model: Annotated[str | None, typer.Option(help="As the server calls it; default: the first it lists.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second, at Poisson's times.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help=f"Clients that ask one after the other; default {DEFAULT_CONCURRENCY}.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help=f"How many in all; default {DEFAULT_REQUESTS}.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds after which no request begins.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help=f"Tokens of prompts, about: {_LENGTHS}.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="Tokens of answers at most, as lengths of prompts.")] = "128",
    prefix_tokens: Annotated[int, typer.Option(help="Tokens, about, with which all prompts begin.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, words and times.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the draws; 0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers as long as planned.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds of one request at most.")] = 600.0,
    api_key: Annotated[str | None, typer.Option(envvar="MESHWRIGHT_API_KEY", help="For the server.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Of `plan --serve`: ask as it says, unless told otherwise, and show its forecast beside."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, and nothing else.")] = False,
) -> None:
    """Put a load on an OpenAI-compatible server and time what its clients see."""
    import asyncio

    from meshwright.cli.serving import is_typed, options_named
    from meshwright.core.errors import InputError
    from meshwright.core.serving import ServingPlan
    from meshwright.serve.bench import summary_of
    from meshwright.serve.workload import Workload

    plan_asked = None if plan is None else ServingPlan.load(plan)
    if plan_asked is not None:
        asked = plan_asked.requests
        rate = asked.rate_per_s if rate is None and concurrency is None else rate
        prompt_tokens = prompt_tokens if is_typed(context, "prompt_tokens") else str(asked.prompt_tokens)
        output_tokens = output_tokens if is_typed(context, "output_tokens") else str(asked.output_tokens)
    with options_named(OPTIONS):
        workload = Workload(
            rate=rate, concurrency=DEFAULT_CONCURRENCY if rate is None and concurrency is None else concurrency,
            num_requests=DEFAULT_REQUESTS if requests is None and duration is None else requests, duration_s=duration,
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, prefix_tokens=prefix_tokens, seed=seed, chat=chat,
            temperature=temperature, ignore_eos=ignore_eos, timeout_s=timeout,
        )  # fmt: skip
    asked_url, asked_model, records = asyncio.run(_load(url, workload, api_key, model))
    summary = summary_of(asked_url, asked_model, records)
    compared = [] if plan_asked is None or not summary.num_ok else _beside(plan_asked, workload, summary)
    if as_json:
        typer.echo(_as_json(summary, workload, records, compared))
    else:
        _print(summary, compared)
    if not summary.num_ok:
        raise InputError(f"{asked_url}: not one of {len(records):,} requests was answered")


async def _load(url: str, workload: Workload, api_key: str | None, model: str | None) -> tuple[str, str, list[Record]]:
    """Where and what was asked in the end, and what came."""
    from meshwright.serve.bench import Target, run_load
    from meshwright.serve.workload import planned

    target = Target(url, workload, api_key, model)
    try:
        await target.prepare()
        with _progress(workload) as watch:
            records = await run_load(target, workload, planned(workload), watch)
    finally:
        await target.close()
    return target.url, target.model, records


def _as_json(summary: Summary, workload: Workload, records: list[Record], compared: Sequence[Comparison]) -> str:
    import json
    from dataclasses import asdict

    forecast = {"forecast": {row.name: row.forecast for row in compared}} if compared else {}
    each = [asdict(record) for record in records]
    return json.dumps({**summary.to_dict(), **forecast, "workload": workload.model_dump(), "records": each}, indent=1)


def _beside(plan: ServingPlan, workload: Workload, summary: Summary) -> list[Comparison]:
    """The plan's forecast for the load as it came: mean lengths, and the rate of clients that ask again."""
    from meshwright.core.serving import Requests
    from meshwright.planner.serving import under_load
    from meshwright.report.serving_plans import beside_forecast

    prompt = plan.requests.prompt_tokens if summary.prompt_tokens is None else summary.prompt_tokens / summary.num_ok
    came = Requests(
        prompt_tokens=max(1, round(prompt)), output_tokens=max(1, round(summary.output_tokens / summary.num_ok)),
        rate_per_s=summary.requests_per_s if workload.rate is None else workload.rate,
    )  # fmt: skip
    return beside_forecast(under_load(plan, came), summary)


def _print(summary: Summary, compared: Sequence[Comparison]) -> None:
    from meshwright.report.serving import load_lines, times_table
    from meshwright.report.tables import changes_table, report_console

    console = report_console()
    if summary.times_s:
        console.print(times_table(summary))
    if compared:
        console.print(changes_table(compared, ("forecast", "measured", "difference"), "Beside the plan, means"))
    for line in load_lines(summary):
        console.print(line, highlight=False)


@contextmanager
def _progress(workload: Workload) -> Iterator[Callable[[float, Record], None]]:
    """A bar on a terminal, a line now and then elsewhere; on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    total = workload.num_requests if workload.duration_s is None else workload.duration_s
    num_done = num_tokens = num_errors = 0
    told_s = 0.0
    bar = Progress(
        TextColumn("{task.fields[status]}"),
        BarColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = bar.add_task("", total=total, status="starting")

    def watch(now_s: float, record: Record) -> None:
        nonlocal num_done, num_tokens, num_errors, told_s
        num_done, num_tokens = num_done + 1, num_tokens + record.num_tokens
        num_errors += record.error is not None
        errors = f", {num_errors:,} errors" if num_errors else ""
        status = f"{num_done:,} requests in {now_s:.0f} s, {num_tokens / max(now_s, 1e-9):,.0f} tokens/s{errors}"
        bar.update(
            task, completed=num_done if workload.duration_s is None else min(now_s, workload.duration_s), status=status
        )
        if not console.is_terminal and now_s >= told_s + _EVERY_S:
            told_s = now_s
            console.print(status, highlight=False, markup=False, soft_wrap=True)

    with bar:
        yield watch
