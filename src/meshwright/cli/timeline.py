"""`meshwright timeline`: the timetable of any schedule, its bubble, and what each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.drawing import MAX_TIMETABLE_RANKS, check_outputs, legend, timetable, trace_text, write_files
from meshwright.core.errors import InputError
from meshwright.core.units import counted, format_time

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.core.plan import Plan
    from meshwright.core.program import Program
    from meshwright.core.schedule import PipelineSize, Schedule
    from meshwright.schedule.timeline import Timeline
    from meshwright.sim.clock import Costs

DEFAULT_RANKS, DEFAULT_MICRO_BATCHES = 4, 8


def timeline_command(
    schedule: Annotated[
        str,
        typer.Argument(metavar="SCHEDULE|RUN", help="A schedule; FILE.csv: a table of your own; or a run's folder."),
    ],
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-p", help="Pipeline ranks; else the plan's or file's, or 4.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", "-m", help="Micro-batches per step; else as many, or 8.")
    ] = None,
    chunks: Annotated[int | None, typer.Option("--chunks", "-v", help="Stages of each rank.")] = None,
    steps: Annotated[int, typer.Option(help="Steps, of a schedule that does not flush between them.")] = 1,
    cost: Annotated[Path | None, typer.Option(metavar="PLAN", help="Time it with the costs of this plan.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw it into this picture.")] = None,
    png: Annotated[Path | None, typer.Option(help="The same as PNG.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write it here, for ui.perfetto.dev.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the program here, one line of actions per rank.")] = None,
) -> None:
    """Draw the timetable of a schedule, with its bubble and what each rank holds."""
    from meshwright.core.plan import Plan
    from meshwright.core.schedule import find_schedule
    from meshwright.report.tables import report_console
    from meshwright.schedule import picture

    outputs = {"--svg": svg, "--png": png, "--trace": trace, "--csv": csv}
    if Path(schedule).is_dir():
        if any(option is not None for option in (ranks, micro_batches, chunks, cost)) or steps != 1:
            raise InputError(f"{schedule}: a run is drawn as it was; leave -p, -m, -v, --steps and --cost out")
        from meshwright.cli.measured import print_run
        from meshwright.run.folder import RunFolder

        check_outputs(outputs)
        return print_run(RunFolder(Path(schedule)), {"svg": svg, "png": png, "trace": trace, "csv": csv})
    found, plan = find_schedule(schedule), Plan.load(cost) if cost else None
    size = _size(found, plan, (ranks, micro_batches, chunks), steps)
    check_outputs(outputs)
    drawn = _drawn(found, size, plan)
    console = report_console()
    console.print(drawn.title(), style="bold", highlight=False)
    console.print(timetable(drawn.shown, console.width), highlight=False, soft_wrap=True)
    console.print(_ranks_table(drawn))
    console.print(_summary(drawn), highlight=False)
    write_files(
        console,
        (
            (svg, "picture", lambda: picture.svg(drawn.shown)),
            (png, "picture", lambda: picture.png(drawn.shown)),
            (trace, "trace", lambda: trace_text(drawn.timeline)),
            (csv, "program", drawn.program.to_csv),
        ),
    )


@dataclass(frozen=True)
class _Drawn:
    """A timetable in time."""

    schedule: Schedule
    size: PipelineSize
    program: Program
    timeline: Timeline
    in_seconds: bool

    @property
    def shown(self) -> Program | Timeline:
        """What drawings take: a program where the unit is a slot."""
        return self.timeline if self.in_seconds else self.program

    def time(self, amount: float) -> str:
        return format_time(amount) if self.in_seconds else f"{amount:g}"

    def title(self) -> str:
        """What is drawn, and what the letters mean."""
        size = self.size
        steps = f", {size.num_steps} steps" if size.num_steps > 1 else ""
        chunks = f", {size.num_chunks} stages each" if size.num_chunks > 1 else ""
        letters = legend(self.program)
        cell = "the shortest action" if self.in_seconds else "one slot"
        return (
            f"{self.schedule.name}: {counted(size.num_ranks, 'rank')}{chunks} × "
            f"{counted(size.num_micro_batches, 'micro-batch', 'micro-batches')}{steps} "
            f"({letters}, . idle; one cell is {cell})"
        )


def _size(
    schedule: Schedule, plan: Plan | None, asked: tuple[int | None, int | None, int | None], num_steps: int
) -> PipelineSize:
    """As asked; else as in the plan, or as the file is; else the defaults. Raises InputError where that is too much."""
    from meshwright.planner.price import MAX_CELLS

    ranks, micro_batches, chunks = asked
    if plan:
        ranks, micro_batches = ranks or plan.strategy.pp, micro_batches or plan.strategy.num_micro_batches
    if only := schedule.only_size:
        ranks, micro_batches = ranks or only.num_ranks, micro_batches or only.num_micro_batches
    size = schedule.size(
        DEFAULT_RANKS if ranks is None else ranks,
        DEFAULT_MICRO_BATCHES if micro_batches is None else micro_batches,
        chunks,
        num_steps,
    )
    if size.num_stages * size.num_in_all > MAX_CELLS:
        cells = f"{counted(size.num_stages, 'stage')} × {counted(size.num_in_all, 'micro-batch', 'micro-batches')}"
        raise InputError(f"{cells} are too many to draw; take at most {MAX_CELLS:,} cells")
    return size


def _drawn(schedule: Schedule, size: PipelineSize, plan: Plan | None) -> _Drawn:
    from meshwright.schedule.build import program
    from meshwright.sim.clock import UnitCosts, simulate

    built = program(
        schedule.name, size.num_ranks, size.num_micro_batches, num_chunks=size.num_chunks, num_steps=size.num_steps
    )
    costs = _plan_costs(plan, schedule, size) if plan else UnitCosts()
    return _Drawn(schedule, size, built, simulate(built, costs), plan is not None)


def _plan_costs(plan: Plan, schedule: Schedule, size: PipelineSize) -> Costs:
    """What stages and boundaries take with the plan's model, cluster and micro-batches, cut as this schedule wants it.

    Raises RuleError where the plan's choices don't go with that.
    """
    from meshwright.core.errors import RuleError
    from meshwright.core.rules import OF_TIMETABLE, violations
    from meshwright.planner.price import Pricer

    planned = plan.strategy
    changes = {"schedule": schedule.name, "pp": size.num_ranks, "num_micro_batches": size.num_micro_batches}
    strategy = planned.model_copy(update=changes | {"num_chunks": 1 if schedule.chunks else size.num_chunks})
    if strategy.num_parts != planned.num_parts:
        strategy = strategy.model_copy(update={"layers_per_stage": None})
    sequences = size.num_micro_batches * planned.micro_batch_size * planned.dp
    job = plan.job.model_copy(update={"global_batch_size": sequences})
    for violation in violations(strategy, plan.model, plan.cluster, job):
        if violation.rule.id != OF_TIMETABLE:
            raise RuleError(f"the costs of this plan: {violation}", violation.rule.id)
    return Pricer(plan.model, plan.cluster, job).step_costs(strategy)


def _ranks_table(drawn: _Drawn) -> Table:
    """What each rank does and holds."""
    from meshwright.report.tables import plain_table
    from meshwright.schedule.liveness import peak_live, peak_live_until_input

    live, until_input = peak_live(drawn.program), peak_live_until_input(drawn.program)
    columns = {"rank": range(drawn.program.num_ranks), "busy": map(drawn.time, drawn.timeline.busy_s)}
    columns |= {"idle": (f"{bubble:.1%}" for bubble in drawn.timeline.rank_bubbles), "peak live": live}
    if live != until_input:
        columns["until input gradient"] = until_input
    if drawn.schedule.is_asynchronous:
        columns["versions of weights"] = (drawn.schedule.num_versions(drawn.size, r) for r in range(len(live)))
    table = plain_table(None)
    for name in columns:
        table.add_column(name, justify="right")
    for row in list(zip(*columns.values(), strict=True))[:MAX_TIMETABLE_RANKS]:
        table.add_row(*map(str, row))
    return table


def _summary(drawn: _Drawn) -> str:
    """Makespan, bubble, and the unit of `peak live`."""
    timeline, size = drawn.timeline, drawn.size
    unit = "" if drawn.in_seconds else " slots (F 1, I 1, W 1, B 2; transfers free)"
    of = "a rank" if size.num_chunks == 1 else f"one of a rank's {size.num_chunks} stages"
    return (
        f"makespan {drawn.time(timeline.makespan_s)}{unit}, bubble {timeline.bubble_fraction:.1%}; "
        f"peak live: micro-batches times the activations of {of}"
    )
