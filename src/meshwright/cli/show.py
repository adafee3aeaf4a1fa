"""`meshwright show`: a plan file as tables and as a pipeline timetable."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.drawing import check_outputs, legend, timetable, trace_text, write_files
from meshwright.core.errors import InputError
from meshwright.core.units import counted

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.core.measures import MemoryBreakdown
    from meshwright.core.plan import Plan
    from meshwright.core.strategy import Strategy
    from meshwright.planner.price import Forecast, Pricer


def show_command(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    html: Annotated[Path | None, typer.Option(help="Also draw memory, traffic and timetable into this page.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the simulated step here, for ui.perfetto.dev.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the program here, one line of actions per rank.")] = None,
) -> None:
    """Show a plan as tables and as a pipeline timetable."""
    from meshwright.core.plan import Plan
    from meshwright.core.serving import is_serving
    from meshwright.planner.price import Pricer, is_long
    from meshwright.report.tables import memory_table, report_console, traffic_table

    if is_serving(file):
        _show_serving(file, {"--html": html, "--trace": trace, "--csv": csv})
        return
    plan = Plan.load(file)
    check_outputs({"--html": html, "--trace": trace, "--csv": csv})
    drawn = ((html, "page", _html), (trace, "trace", _trace), (csv, "program", _csv))
    if is_long(plan.strategy) and (html or trace or csv):
        raise InputError(f"{file}: {_cells(plan.strategy)} are too many to draw or to write; plan larger micro-batches")
    pricer = Pricer(plan.model, plan.cluster, plan.job)
    forecast = pricer.simulate(pricer.forecast(plan.strategy))
    held = _held(plan, pricer)
    console = report_console()
    console.print(_plan_table(plan))
    console.print(memory_table(held, "Memory of a rank at the peak of a step (fullest stage of each kind)"))
    console.print(traffic_table(forecast.traffic, f"What rank {forecast.rank} sends in a step"))
    console.print(_time_table(forecast, pricer))
    title, rows = _timetable(plan.strategy, console.width)
    console.print(title, style="bold")
    console.print(rows, highlight=False, soft_wrap=True)
    if plan.why:
        console.print(plan.why, highlight=False)
    write_files(console, ((path, what, partial(content, plan, pricer)) for path, what, content in drawn))


def _show_serving(file: Path, drawn: dict[str, Path | None]) -> None:
    from meshwright.cli import serving
    from meshwright.core.serving import ServingPlan

    if options := [option for option, path in drawn.items() if path]:
        raise InputError(f"{options[0]}: {file} is a plan for serving, which has no timetable to draw or to write")
    serving.show(ServingPlan.load(file))


def _html(plan: Plan, pricer: Pricer) -> str:
    """Memory of the fullest stage of each kind, what the fullest rank sends, and the step as the clock sees it."""
    from meshwright.report.figures import memory_figure, page, traffic_figure
    from meshwright.schedule.draw import figure

    forecast = pricer.forecast(plan.strategy)
    figures = (
        memory_figure(_held(plan, pricer), plan.cluster.usable_memory_bytes),
        traffic_figure({f"rank {forecast.rank}": forecast.traffic}),
        figure(pricer.timeline(plan.strategy)),
    )
    return page(figures, f"{plan.model.name} on {plan.cluster.name}")


def _held(plan: Plan, pricer: Pricer) -> dict[str, MemoryBreakdown]:
    """Memory of the fullest pipeline rank of each kind, named by its stages."""

    def name(rank: int) -> str:
        stages = plan.strategy.rank_stages(rank)
        return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"

    return {name(rank): memory for rank, memory in pricer.memory_by_rank(plan.strategy).items()}


def _trace(plan: Plan, pricer: Pricer) -> str:
    """The step as the clock sees it."""
    return trace_text(pricer.timeline(plan.strategy))


def _csv(plan: Plan, _: Pricer) -> str:
    """The program that every pipeline runs."""
    from meshwright.schedule.build import build_program

    return build_program(plan.strategy).to_csv()


def _plan_table(plan: Plan) -> Table:
    """Model, cluster, job and strategy, one line each."""
    from meshwright.core.units import format_bytes
    from meshwright.report.tables import plain_table

    model, cluster, job, strategy = plan.model, plan.cluster, plan.job, plan.strategy
    layers = [len(part) for part in strategy.stage_layers(model.num_layers)]
    table = plain_table(None, has_head=False)
    rows = {
        "model": f"{model.name}: {model.num_parameters:,} parameters, "
        f"{counted(model.num_layers, 'layer')} × {model.hidden_size}",
        "cluster": f"{cluster.name}: {cluster.num_nodes} × {cluster.devices_per_node} {cluster.device.name}, "
        f"{format_bytes(cluster.usable_memory_bytes)} usable each",
        "job": f"{counted(job.global_batch_size, 'sequence')} of {counted(job.seq_length, 'token')} per step, "
        f"{job.optimizer}{f', imbalance of experts {job.imbalance:g}' if job.imbalance > 1 else ''}",
        "strategy": f"{strategy.describe()} (dp={strategy.dp} tp={strategy.tp} pp={strategy.pp})",
        "batch": f"{strategy.dp} × {counted(strategy.num_micro_batches, 'micro-batch', 'micro-batches')} × "
        f"{counted(strategy.micro_batch_size, 'sequence')}",
        **({"updates": _delay(strategy)} if strategy.pipeline_schedule.is_asynchronous else {}),
        "layers per stage": ", ".join(map(str, layers)),
        "bytes per parameter": f"{strategy.recipe.source}",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _delay(strategy: Strategy) -> str:
    """What an asynchronous schedule does to the weights."""
    kept = [strategy.pipeline_schedule.num_versions(strategy.pipeline, rank) for rank in range(strategy.pp)]
    each = "step" if strategy.num_updates == 1 else "micro-batch"
    return f"delayed: one after each {each}, while others are under way; versions kept: {', '.join(map(str, kept))}"


def _time_table(forecast: Forecast, pricer: Pricer) -> Table:
    """The step's seconds by cause."""
    from meshwright.core.units import format_time
    from meshwright.report.tables import plain_table

    total = forecast.step_time.total_s
    table = plain_table("Step time")
    for name in ("", "time", "share"):
        table.add_column(name, justify="left" if not name else "right")
    for term in pricer.terms(forecast):
        table.add_row(term.name, format_time(term.seconds), f"{term.seconds / total:.1%}")
    table.add_section()
    table.add_row("step", format_time(total), "")
    table.add_row("bubble, share of the pipeline's time", "", f"{forecast.step_time.bubble_fraction:.1%}")
    return table


def _cells(strategy: Strategy) -> str:
    stages = counted(strategy.pp * strategy.stages_per_rank, "stage")
    return f"{stages} × {counted(strategy.num_micro_batches, 'micro-batch', 'micro-batches')}"


def _timetable(strategy: Strategy, width: int) -> tuple[str, str]:
    """Title, and the unit grid (F=1, B=2), cut to the width and to the first ranks."""
    from meshwright.planner.price import is_long
    from meshwright.schedule.build import build_program

    title = "Timetable of one pipeline"
    if is_long(strategy):
        return title, f"{_cells(strategy)}: too many to draw"
    built = build_program(strategy)
    return f"{title} ({legend(built)}, . idle; one cell is one forward)", timetable(built, width)
