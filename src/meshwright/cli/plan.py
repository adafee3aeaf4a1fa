"""`meshwright plan`: from a model, a cluster and a job to a plan file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.core.values import writing

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.planner.rank import PlanResult


def plan_command(
    model: Annotated[str, typer.Argument(help="Preset name, config.json, folder with one, or TOML file.")],
    cluster: Annotated[str, typer.Argument(help="For example 8x8xh100, 8xa100, local:4, or a TOML file.")],
    seq: Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of one step, over all ranks.")] = 512,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    fix: Annotated[
        list[str] | None, typer.Option(help="Fix a field of the strategy, as in dp=2 or layers_per_stage=3,3,2.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Short for --fix precision=...")] = None,
    zero: Annotated[int | None, typer.Option(help="Short for --fix zero=...")] = None,
    schedule: Annotated[str | None, typer.Option(help="Short for --fix schedule=...")] = None,
    recompute: Annotated[str | None, typer.Option(help="Short for --fix recompute=...")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many strategies to show.")] = 8,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here.")] = None,
) -> None:
    """Find the fastest way to split a training job over a cluster, and say why."""
    from meshwright.core.job import Job
    from meshwright.core.sources import cluster_warning, load_cluster, load_model
    from meshwright.planner.fix import parse_fix
    from meshwright.planner.rank import Options, plan
    from meshwright.report.tables import report_console

    machines = load_cluster(cluster)
    job = Job.parse({"seq_length": seq, "global_batch_size": batch, "optimizer": optimizer}, "job")
    short = {"precision": precision, "zero": zero, "schedule": schedule, "recompute": recompute}
    wanted = parse_fix([*(fix or ()), *(f"{name}={value}" for name, value in short.items() if value is not None)])
    result = plan(load_model(model), machines, job, wanted, Options(num_ranked=top))
    if out:  # before anything is printed: who reads that may stop reading
        with writing(out):
            result.plan.save(out)
    console = report_console()
    _print(console, result)
    warning = cluster_warning(machines)
    if warning:
        console.print(f"note: {warning}")
    if out:
        console.print(f"plan written to {out}", soft_wrap=True)


def _print(console: Console, result: PlanResult) -> None:
    """The ranking, what the winner sends, what was refused, and the paragraph."""
    from meshwright.report.tables import strategies_table, traffic_table

    console.print(strategies_table(result.ranked))
    winner = result.forecast
    console.print(traffic_table(winner.traffic, f"What rank {winner.rank} of the first sends in a step"))
    if result.refused:
        console.print("Not offered", style="bold")
        for refusal in result.refused:
            console.print(
                f"  {refusal.rule} ×{refusal.count}, for example: {refusal.example}", soft_wrap=True, highlight=False
            )
        console.print()
    console.print(result.plan.why, highlight=False)
