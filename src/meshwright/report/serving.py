"""What a load generator measured, as a table."""

from __future__ import annotations

from rich.table import Table

from meshwright.core.units import counted, format_time
from meshwright.report.tables import plain_table
from meshwright.serve.bench import Summary

LATE_S = 0.05
"""A generator that is later than this is too slow for the rate that it was asked for."""


def times_table(summary: Summary) -> Table:
    """Time to the first token, between tokens, and end to end; of requests that were answered."""
    table = plain_table(f"{summary.model} at {summary.url}")
    table.add_column("")
    heads = ("mean", "p50", "p95", "p99", "max")
    for head in heads:
        table.add_column(head, justify="right")
    for what, spread in summary.times_s.items():
        table.add_row(what, *(format_time(spread[head]) for head in heads))
    return table


def load_lines(summary: Summary) -> list[str]:
    """What was answered, how fast, and what went wrong."""
    unit = "piece" if summary.tokens_are_pieces else "token"
    asked = "" if summary.prompt_tokens is None else f" to {counted(summary.prompt_tokens, 'token')} of prompts"
    lines = [
        f"{counted(summary.num_ok, 'request')} answered in {format_time(summary.duration_s)}: "
        f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:,.1f} output {unit}s/s; "
        f"{counted(summary.output_tokens, unit)}{asked}"
    ]
    if summary.tokens_are_pieces:
        lines.append("the server does not say how many tokens it gave: pieces of the streams are counted")
    if summary.errors:
        kinds = ", ".join(f"{count:,} × {kind}" for kind, count in summary.errors.items())
        lines.append(f"{counted(sum(summary.errors.values()), 'error')}: {kinds}")
        lines += [f"{kind}, first: {said}" for kind, said in summary.said.items()]
    if summary.lag_s > LATE_S:
        lines.append(f"the generator was late by up to {format_time(summary.lag_s)}: the rate is more than it can send")
    return lines
