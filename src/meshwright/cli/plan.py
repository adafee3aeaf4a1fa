"""`meshwright plan`: from a model, a cluster and a job to a plan file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.core.errors import InputError
from meshwright.core.values import make_ready, writing

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.cluster import ClusterSpec
    from meshwright.core.job import Job
    from meshwright.core.model import ModelSpec
    from meshwright.planner.balance import Ends
    from meshwright.planner.objective import Price
    from meshwright.planner.rank import PlanResult


def plan_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Preset name, config.json, folder with one, or TOML file.")],
    cluster: Annotated[str, typer.Argument(help="For example 8x8xh100, 8xa100, local:4, or a TOML file.")],
    seq: Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of one step, over all ranks.")] = 512,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    fix: Annotated[list[str] | None, typer.Option(help="Fix a field of the strategy or layout, as in tp=2.")] = None,
    precision: Annotated[str | None, typer.Option(help="Short for --fix precision=...")] = None,
    zero: Annotated[int | None, typer.Option(help="Short for --fix zero=...")] = None,
    schedule: Annotated[str | None, typer.Option(help="Short for --fix schedule=...")] = None,
    recompute: Annotated[str | None, typer.Option(help="Short for --fix recompute=...")] = None,
    balance_from: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Cut pipelines by what this run measured of its stages.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help="fastest, fewest-gpus, cheapest, longest-context or largest-model.")
    ] = "fastest",
    tokens: Annotated[float | None, typer.Option(min=1, help="Tokens of the whole run, for cheapest.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of one device and hour, for cheapest.")] = None,
    must: Annotated[list[str] | None, typer.Option(help="Constraint on the strategy, as in tp<=8 or pp>1.")] = None,
    memory_limit: Annotated[str | None, typer.Option(help="What a rank may fill: 60GB, or 75% of it.")] = None,
    explain_rules: Annotated[bool, typer.Option("--explain-rules", help="Each rule of thumb, one by one.")] = False,
    imbalance: Annotated[
        float, typer.Option(min=1, help="Of a mixture: rows of the fullest rank of experts over their mean.")
    ] = 1.0,
    serve: Annotated[bool, typer.Option("--serve", help="Plan a server instead of a training.")] = False,
    prompt: Annotated[int, typer.Option(help="Tokens of a request's prompt, with --serve.")] = 2048,
    output: Annotated[int, typer.Option(help="Tokens of its answer.")] = 256,
    rate: Annotated[float, typer.Option(help="Requests that come each second.")] = 1.0,
    max_ttft: Annotated[float | None, typer.Option(help="Mean seconds to the first token at most.")] = None,
    max_tpot: Annotated[float | None, typer.Option(help="Mean seconds between tokens at most.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many strategies or layouts to show.")] = 8,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here.")] = None,
) -> None:
    """Find the best way to split a training job, or with --serve a server, over a cluster, and say why."""
    from meshwright.cli import serving
    from meshwright.core.job import Job
    from meshwright.core.sources import load_cluster, load_model
    from meshwright.planner.must import limited

    serving.refuse_others(context, serve)
    if not isfinite(imbalance):
        raise typer.BadParameter("Input should be a finite number", param_hint="'--imbalance'")
    if out:
        make_ready(out)
    machines = load_cluster(cluster) if memory_limit is None else limited(load_cluster(cluster), memory_limit)
    spec = load_model(model)
    if serve:
        asked = serving.requests(prompt, output, rate, max_ttft, max_tpot)
        fixed = [*(fix or ()), *([] if precision is None else [f"precision={precision}"])]
        serving.plan(spec, machines, asked, fixed, serving.Shown(top, explain_rules, out))
        return
    values = {"seq_length": seq, "global_batch_size": batch, "optimizer": optimizer, "imbalance": imbalance}
    job = Job.parse(values, "job")
    short = {"precision": precision, "zero": zero, "schedule": schedule, "recompute": recompute}
    fixed = [*(fix or ()), *(f"{name}={value}" for name, value in short.items() if value is not None)]
    _plan_training(
        spec, machines, job, fixed, _Search(balance_from, objective, tokens, price, must, top), explain_rules, out
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """How to look for a training plan."""

    balance_from: Path | None
    objective: str
    tokens: float | None
    price: float | None
    must: list[str] | None
    top: int


def _plan_training(
    spec: ModelSpec,
    machines: ClusterSpec,
    job: Job,
    fixed: list[str],
    search: _Search,
    explain_rules: bool,
    out: Path | None,
) -> None:
    from meshwright.core.sources import cluster_warning
    from meshwright.planner.fix import parse_fix
    from meshwright.planner.must import parse_must
    from meshwright.planner.objective import Wanted, best
    from meshwright.planner.rank import Options
    from meshwright.report.tables import report_console
    from meshwright.report.waiting import told_if_slow

    wanted = parse_fix(fixed)
    ends = _measured_ends(search.balance_from, spec, wanted) if search.balance_from else None
    must, may_offload = parse_must(search.must or ()), search.objective == "fastest"
    options = Options(num_ranked=search.top, ends=ends, must=must, may_offload=may_offload)
    priced = _price(search.tokens, search.price)
    with told_if_slow(f"searching how to train {spec.name} on {machines.name}"):
        found = best(Wanted(spec, machines, job, wanted, options), search.objective, priced)
    result = found.result
    if out:  # before anything is printed: who reads that may stop reading
        with writing(out):
            result.plan.save(out)
    console = report_console()
    _print(console, result)
    if found.words:
        console.print(f"{search.objective}: {found.words}", highlight=False, soft_wrap=True)
    if explain_rules:
        _print_rules(console, result)
    if ends is not None:
        console.print(_cut_by(search.balance_from, ends), highlight=False, soft_wrap=True)
    for note in filter(None, (spec.length_warning(result.plan.job.seq_length), cluster_warning(machines))):
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    if out:
        console.print(f"plan written to {out}", soft_wrap=True)


def _cut_by(run: Path | None, ends: Ends) -> str:
    return (
        f"pipelines are cut by {run}: there the embedding took {ends.first:.2f} and the head {ends.last:.2f} times "
        "what a layer takes"
    )


def _price(tokens: float | None, price: float | None) -> Price | None:
    """Raises InputError where one is given without the other."""
    from meshwright.planner.objective import Price

    if tokens is None and price is None:
        return None
    if tokens is None or price is None:
        raise InputError("--tokens and --price belong together: what the run's tokens cost follows from both")
    return Price(tokens, price)


def _print_rules(console: Console, result: PlanResult) -> None:
    """The decision table, rule by rule, with the facts that decide."""
    from meshwright.planner.advise import decision_table

    plan = result.plan
    console.print("Rules of thumb, one by one", style="bold")
    for name, holds, advice, source in decision_table(plan.model, plan.cluster, plan.job):
        says = f": {advice} [{source}]" if advice else ""
        console.print(f"  {'yes' if holds else 'no ':3} {name}{says}", soft_wrap=True, highlight=False)


def _print_front(console: Console, result: PlanResult) -> None:
    """What less memory costs in time."""
    from meshwright.core.units import format_bytes
    from meshwright.report.tables import step_text, told_apart

    if len(result.pareto) < 2:
        return
    console.print("Time against memory: no strategy is both faster and smaller than one of these", style="bold")
    names = told_apart([forecast.strategy for forecast in result.pareto], result.plan.model.num_layers)
    for forecast, name in zip(result.pareto, names, strict=True):
        seconds, held = step_text(forecast), format_bytes(forecast.device_bytes)
        console.print(f"  {seconds:>9}  {held:>8}  {name}", soft_wrap=True, highlight=False)
    console.print()


def _measured_ends(folder: Path, model: ModelSpec, fixed: Mapping[str, Any]) -> Ends:
    """What a run of the same model says. Raises InputError where it says nothing, or the split is fixed already."""
    from meshwright.core.record import RankRecord
    from meshwright.planner.balance import measured_ends
    from meshwright.rehearse.timeline import MeasuredCosts, measured_timeline
    from meshwright.run.folder import RunFolder

    if "layers_per_stage" in fixed:
        raise InputError(f"--balance-from {folder}: layers_per_stage is fixed already; leave one of them out")
    run = RunFolder(folder)
    ran = run.plan()
    if ran.model != model:
        raise InputError(
            f"--balance-from {folder}: it trained `{ran.model.name}`, {ran.model.num_layers} layers of "
            f"{ran.model.hidden_size}, not the `{model.name}` of this plan; measure the same model"
        )
    costs = MeasuredCosts.of(measured_timeline(ran, RankRecord.load_all(run.measured)))
    try:
        return measured_ends(costs.durations_s, ran.strategy, model.num_layers)
    except InputError as error:
        raise InputError(f"--balance-from {folder}: {error}") from None


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
    _print_front(console, result)
    console.print(result.plan.why, highlight=False)
