"""`meshwright demo`: the main job on this machine, from plan to text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.verify import print_verification
from meshwright.core.plan import Plan
from meshwright.run.folder import RunFolder

PROMPT = "def "
SPLIT = {"dp": 2, "tp": 2, "pp": 2}
"""The demonstration splits all three ways, whatever is fastest on a machine whose ranks share cores."""


def demo_command(
    out: Annotated[Path, typer.Option(help="The run's folder; a number is added where it is taken.")] = Path(
        "runs/demo"
    ),
    model: Annotated[str, typer.Option(help="Preset name or config.json.")] = "demo-s",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 60,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of one step.")] = 16,
) -> None:
    """Plan on this machine as 8 CPU ranks, train with data, tensor and pipeline parallelism, verify, sample."""
    run = RunFolder(_free(out))
    run.path.mkdir(parents=True)
    plan_path = run.path / "chosen.toml"
    _heading("Plan")
    _plan(model, seq, batch, plan_path)
    _heading("Train")
    options = ["--steps", str(steps), "--learning-rate", "0.002", "--eval-every", str(max(1, steps // 2))]
    _meshwright("train", str(plan_path), "--stdlib", "--max-text-bytes", "2000000", "--out", str(run.path), *options)
    _heading("Forecast beside measured")
    agrees = print_verification(run)
    _heading("Text from the trained model")
    _meshwright("generate", str(run.path), "--prompt", PROMPT, "--max-tokens", "60")
    _heading(f"Left in {run.path}")
    for name in sorted(path.name for path in run.path.iterdir()):
        typer.echo(f"  {name}")
    if not agrees:
        raise typer.Exit(1)


def _plan(model: str, seq: int, batch: int, path: Path) -> None:
    """Rank every legal split, then choose the best that uses all three axes."""
    from meshwright.core.job import Job
    from meshwright.core.sources import load_cluster, load_model
    from meshwright.planner.rank import plan
    from meshwright.report.tables import report_console, strategies_table, traffic_table

    spec, cluster = load_model(model), load_cluster("local:8")
    job = Job(seq_length=seq, global_batch_size=batch)
    console = report_console()
    console.print(strategies_table(plan(spec, cluster, job).ranked, f"`{model}` on 8 CPU ranks, best first"))
    chosen = plan(spec, cluster, job, SPLIT)
    console.print("Chosen: the best that splits data, tensors and layers, to show all three.")
    console.print(strategies_table(chosen.ranked[:1], "Chosen"))
    console.print(traffic_table(chosen.forecast.traffic, f"What rank {chosen.forecast.rank} sends in a step"))
    console.print(chosen.plan.why, highlight=False)
    chosen.plan.save(path)
    _show_timetable(chosen.plan)


def _show_timetable(plan: Plan) -> None:
    from meshwright.schedule.build import build_program
    from meshwright.schedule.draw import text

    typer.echo(text(build_program(plan.strategy), max_cells=100))


def _meshwright(*argv: str) -> None:
    """Run another command as a user would. Ends with its status where it fails; it has said why."""
    status = subprocess.run([sys.executable, "-m", "meshwright", *argv], check=False).returncode
    if status:
        raise typer.Exit(status)


def _free(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that isn't there."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _heading(words: str) -> None:
    typer.secho(f"\n{words}\n{'─' * len(words)}", bold=True)
