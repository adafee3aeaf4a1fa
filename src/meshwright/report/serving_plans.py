"""Tables of serving plans: layouts, memory, a step by cause, and decoding over degrees of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from meshwright.core.serving import ServingPlan
from meshwright.core.units import counted, format_bytes, format_time
from meshwright.cost.serving import LIMITS
from meshwright.cost.terms import total_s
from meshwright.planner.explain_serving import CurvePoint, turning_point
from meshwright.planner.serving_search import ServingForecast
from meshwright.report.tables import Comparison, plain_table
from meshwright.serve.bench import Summary


def layouts_table(forecasts: Sequence[ServingForecast], title: str = "Layouts, most tokens per device first") -> Table:
    """What each sustains at most, and how long requests wait at the asked rate."""
    table = plain_table(title)
    table.add_column("#", justify="right")
    table.add_column("layout")
    heads = ("tokens/s\nper device", "requests/s\nat most", "used", "first\ntoken", "between\ntokens", "longest\ngap")
    for head in (*heads, "weights", "cache", "requests\nthat fit", "step\ntokens"):
        table.add_column(head, justify="right", no_wrap=True)
    for place, each in enumerate(forecasts, 1):
        now = each.now
        table.add_row(
            str(place),
            each.layout.describe(),
            f"{each.tokens_per_device_s:,.0f}",
            f"{each.most_per_s:.3g}",
            f"{each.utilisation:.0%}",
            *(format_time(seconds) for seconds in (now.ttft_s, now.tpot_s, each.gap_s)),
            format_bytes(each.memory.weights_bytes),
            format_bytes(each.cache_bytes),
            f"{each.max_batch:,}",
            f"{each.layout.step_tokens:,}",
        )
    return table


def curve_table(curve: Sequence[CurvePoint], num_sequences: int) -> Table:
    """Seconds of a step that decodes one sequence, and several, for each degree of tensor parallelism."""
    table = plain_table("A step that decodes, by tensor parallelism (whether its weights fit or not)")
    best = turning_point(curve)
    heads = ("tp", "1 sequence", counted(num_sequences, "sequence"), "from memory", "compute", "links", "")
    for head in heads[: 2 if num_sequences == 1 else 3] + heads[3:]:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for point in curve:
        kinds = {"memory bandwidth": 0.0, "compute": 0.0, "links": 0.0}
        for term in point.one:
            kind = LIMITS[term.name]
            kinds[kind if kind in kinds else "links"] += term.seconds
        several = () if num_sequences == 1 else (format_time(point.many_s),)
        cells = (format_time(point.one_s), *several, *map(format_time, kinds.values()))
        table.add_row(str(point.tp), *cells, "fastest" if point is best else "")
    return table


def serving_plan_table(plan: ServingPlan) -> Table:
    """Model, cluster, requests and layout, one line each."""
    model, cluster, requests, layout = plan.model, plan.cluster, plan.requests, plan.layout
    table = plain_table(None, has_head=False)
    limits = {"first token": requests.max_ttft_s, "between tokens": requests.max_tpot_s}
    kept = ", ".join(f"{name} within {format_time(limit)}" for name, limit in limits.items() if limit is not None)
    rows = {
        "model": f"{model.name}: {model.num_parameters:,} parameters, "
        f"{counted(model.num_layers, 'layer')} × {model.hidden_size}",
        "cluster": f"{cluster.name}: {cluster.num_nodes} × {cluster.devices_per_node} {cluster.device.name}, "
        f"{format_bytes(cluster.usable_memory_bytes)} usable each",
        "requests": f"{requests.rate_per_s:g} per second, of {counted(requests.prompt_tokens, 'token')} and "
        f"{requests.output_tokens:,} of answer{f'; {kept}' if kept else ''}",
        "layout": f"{layout.describe()} (replicas={layout.replicas} tp={layout.tp} pp={layout.pp} ep={layout.ep})",
        "engine": f"{layout.num_blocks:,} blocks of {counted(layout.block_size, 'token')}, steps of "
        f"{counted(layout.step_tokens, 'token')}, {counted(layout.max_running, 'sequence')} at once",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def serving_memory_table(forecast: ServingForecast, usable_bytes: int) -> Table:
    """Of the rank that holds most."""
    table = plain_table(f"Memory of a rank of stage {forecast.memory.rank}, which holds most")
    for head in ("", "bytes"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    rows = {
        "weights": forecast.memory.weights_bytes,
        f"cache, {forecast.cache_tokens:,} tokens of {format_bytes(forecast.memory.token_bytes)}": forecast.cache_bytes,
        "working, at most": forecast.memory.working_bytes,
        "total": forecast.rank_bytes,
        "usable": usable_bytes,
    }
    for name, size in rows.items():
        table.add_row(name, format_bytes(size))
    return table


def step_table(forecast: ServingForecast) -> Table:
    """The steps of a replica at the asked rate, by cause."""
    now = forecast.now
    decoding, mixed = (forecast.costs.terms(work) for work in (now.decoding, now.mixed))
    table = plain_table("Steps of a replica at the asked rate")
    heads = ("", f"{now.decoding.num_decoding:.1f} sequences decode", f"and {now.mixed.num_prompt:,.0f} of a prompt")
    for head in (*heads, "is limited by"):
        table.add_column(head, justify="left" if head in ("", "is limited by") else "right")
    for plain, both in zip(decoding, mixed, strict=True):
        if plain.seconds or both.seconds:
            table.add_row(plain.name, format_time(plain.seconds), format_time(both.seconds), LIMITS[plain.name])
    table.add_section()
    table.add_row("step", format_time(total_s(decoding)), format_time(total_s(mixed)), "")
    table.add_row("share of all steps", f"{1 - now.mixed_share:.1%}", f"{now.mixed_share:.1%}", "")
    return table


def compare_serving(now: ServingForecast, then: ServingForecast) -> dict[str, list[Comparison]]:
    """Title → rows: memory of the fullest rank, a step that decodes, and what requests see."""

    def row(name: str, unit: str, value: Callable[[ServingForecast], float]) -> Comparison:
        return Comparison(name, value(now), value(then), unit)

    steps = [{t.name: t.seconds for t in each.costs.terms(each.now.decoding)} for each in (now, then)]
    shown = [name for name in LIMITS if steps[0][name] or steps[1][name]]
    return {
        "Memory of the fullest rank": [
            row("weights", "bytes", lambda f: f.memory.weights_bytes),
            row("cache", "bytes", lambda f: f.cache_bytes),
            row("working", "bytes", lambda f: f.memory.working_bytes),
            row("total", "bytes", lambda f: f.rank_bytes),
            row("requests that fit, a replica", "calls", lambda f: f.max_batch),
        ],
        "A step that decodes, at the asked rate": [
            *(Comparison(name, steps[0][name], steps[1][name], "seconds") for name in shown),
            Comparison("step", sum(steps[0].values()), sum(steps[1].values()), "seconds"),
        ],
        "Requests": [
            row("first token", "seconds", lambda f: f.now.ttft_s),
            row("between tokens", "seconds", lambda f: f.now.tpot_s),
            row("longest gap", "seconds", lambda f: f.gap_s),
            row("utilisation", "fraction", lambda f: f.utilisation),
            row("tokens per second and device, at most", "calls", lambda f: f.tokens_per_device_s),
        ],
    }


def beside_forecast(forecast: ServingForecast, summary: Summary) -> list[Comparison]:
    """What clients saw beside what was forecast for them; means, rates of all replicas together.

    Beyond what these sustain their queues only grow: then the forecast is that of the most that they sustain.
    """
    is_beyond = forecast.utilisation > 1
    load, asked = forecast.most.load if is_beyond else forecast.now, forecast.requests
    per_s = forecast.most_per_s if is_beyond else asked.rate_per_s
    seen = {what: spread["mean"] for what, spread in summary.times_s.items()}
    whole_s = load.ttft_s + (asked.output_tokens - 1) * load.tpot_s
    return [
        Comparison("requests/s", per_s, summary.requests_per_s, "calls"),
        Comparison("output tokens/s", per_s * asked.output_tokens, summary.output_tokens_per_s, "calls"),
        Comparison("first token", load.ttft_s, seen.get("first token"), "seconds"),
        Comparison("between tokens", load.tpot_s, seen.get("between tokens"), "seconds"),
        Comparison("end to end", whole_s, seen.get("end to end"), "seconds"),
    ]
