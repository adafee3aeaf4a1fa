"""`meshwright compare`: one model, trained in several ways, side by side."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.core.errors import InputError
from meshwright.core.precision import RECIPES
from meshwright.core.values import writing
from meshwright.run.environment import World, detect
from meshwright.run.launch import enter_ranks, speaks_for_all

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.core.model import ModelSpec
    from meshwright.run.compare import Request
    from meshwright.run.options import TrainOptions
    from meshwright.run.outcome import Outcome, Trial

LOSS_TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
"""How far, relatively, a loss may lie from that of stage 0."""
LOOSE = 0.05
"""Likewise in 16 bits."""
JUDGED_STEPS = 10
"""First steps whose losses are judged: later, rounding has moved the weights apart."""
SEQUENCES_PER_RANK = 4


class What(StrEnum):
    """What differs between the trials."""

    ZERO = "zero"
    PRECISION = "precision"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What is run where the command line says nothing."""

    ranks: int
    steps: int
    precisions: tuple[str, ...]


DEFAULTS = {
    What.ZERO: Defaults(ranks=2, steps=8, precisions=("fp32",)),
    What.TENSOR: Defaults(ranks=64, steps=0, precisions=("bf16",)),
    What.PRECISION: Defaults(ranks=1, steps=60, precisions=("fp32", "bf16", "bf16-16", "fp16")),
}


def compare_command(
    what: Annotated[
        What, typer.Argument(help="zero: every stage, and DataParallel; precision: fp32, bf16, ...; tensor: see below.")
    ],
    model: Annotated[str, typer.Option(help="Preset name, config.json, folder with one, or TOML file.")] = "demo-s",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="CPU ranks. Default: zero 2, precision 1, tensor 64.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each. Default: zero 8, precision 60.")] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")] = 64,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of one step. Default: 4 per rank and micro-batch.")
    ] = None,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per step and rank.")] = 1,
    precisions: Annotated[
        str | None, typer.Option("--precision", "--precisions", help="One; for precision several, as in fp32,bf16.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text to train on. Default: Python's standard library.")] = None,
    max_text_bytes: Annotated[int, typer.Option(min=1, help="How much of the standard library.")] = 1_000_000,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of weights and of the order of samples.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Also draw the comparison into this page.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Of tensor: also draw it into this picture.")] = None,
    png: Annotated[Path | None, typer.Option(help="The same as PNG.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep plans, losses and measurements in this new folder.")] = None,
) -> None:
    """Train one model in several ways; exit status 1 where one is not as forecast.

    `tensor` trains nothing: what one layer holds and sends on a rank, for each way to divide it over --ranks.
    """
    from meshwright.cli.drawing import check_outputs
    from meshwright.core.sources import load_model
    from meshwright.run.compare import Request
    from meshwright.run.options import TrainOptions

    defaults = DEFAULTS[what]
    ranks = ranks or defaults.ranks
    if what is What.TENSOR:
        training = {"--steps": steps, "--text": text, "--out": out, "--micro-batches": micro_batches - 1 or None}
        _refuse(training, "`compare tensor`, which trains nothing; leave it out")
        files = {"--html": html, "--svg": svg, "--png": png}
        compare_tensor(load_model(model), ranks, batch or ranks, seq, _precisions(what, precisions)[0], files)
        return
    _refuse({"--svg": svg, "--png": png}, f"`compare {what}`, which draws a page; give --html")
    check_outputs({"--html": html})
    sequences = SEQUENCES_PER_RANK * ranks * micro_batches if batch is None else batch
    request = Request(load_model(model), ranks, seq, sequences, micro_batches)
    wanted = {
        "text": text, "max_text_bytes": max_text_bytes, "steps": defaults.steps if steps is None else steps,
        "learning_rate": learning_rate, "seed": seed, "eval_samples": 1,
    }  # fmt: skip
    options = TrainOptions.parse(wanted, "options")
    trials = _trials(what, request, _precisions(what, precisions))
    with ExitStack() as stack:
        found = _carry_out(trials, options, ranks, out, stack)
    if found is not None:
        show(what, found, html)


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raises InputError for options that are given where they mean nothing."""
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise InputError(f"{', '.join(given)} with {why}")


def _precisions(what: What, text: str | None) -> tuple[str, ...]:
    """The precisions asked for. Raises InputError."""
    if text is None:
        return DEFAULTS[what].precisions
    names = tuple(dict.fromkeys(name for name in text.replace(",", " ").split()))
    unknown = [name for name in names if name not in RECIPES]
    if unknown or not names:
        raise InputError(f"--precision {text}: no precision `{', '.join(unknown)}`; known: {', '.join(RECIPES)}")
    if what is not What.PRECISION and len(names) > 1:
        raise InputError(
            f"--precision {text}: `{what}` is compared in one precision; give one, or `meshwright compare precision`"
        )
    return names


def compare_tensor(
    model: ModelSpec, ranks: int, batch: int, seq: int, precision: str, files: Mapping[str, Path | None]
) -> None:
    """Tables and sentences in closed form; page and pictures where `files` names them."""
    from meshwright.cli.drawing import check_outputs, write_files
    from meshwright.core.sources import load_cluster
    from meshwright.core.strategy import Strategy
    from meshwright.planner.tensor_kinds import crossovers, remedies, ways
    from meshwright.report.figures import write_page
    from meshwright.report.tables import report_console
    from meshwright.report.tensor import refusals, ways_figure, ways_picture, ways_table
    from meshwright.schedule import picture

    check_outputs(files)
    cluster, kept = load_cluster(f"local:{ranks}"), Strategy(precision=precision).precision
    found = ways(model, cluster, batch, seq, kept)
    console = report_console()
    console.print(ways_table(found))
    near = remedies(found, model, cluster, batch, seq, kept)
    for line in (*refusals(found, near), *crossovers(found, model, cluster, batch, seq, kept)):
        console.print(line, highlight=False, soft_wrap=True)
    if (html := files["--html"]) is not None:
        with writing(html):
            write_page([ways_figure(found)], html, "ways to divide a layer")
        console.print(f"page written to {html}", highlight=False, soft_wrap=True)
    title = f"One layer of {model.name} on one of {ranks} ranks, {batch} sequences of {seq:,} tokens"
    drawn = ways_picture(found, title)
    pictures = ((files["--svg"], lambda: picture.svg(drawn)), (files["--png"], lambda: picture.png(drawn)))
    write_files(console, [(path, "picture", content) for path, content in pictures])


def _trials(what: What, request: Request, precisions: Sequence[str]) -> list[Trial]:
    from meshwright.run.compare import precision_trials, zero_trials

    return zero_trials(request, precisions[0]) if what is What.ZERO else precision_trials(request, precisions)


def _carry_out(
    trials: Sequence[Trial], options: TrainOptions, ranks: int, out: Path | None, stack: ExitStack
) -> list[Outcome] | None:
    """Launcher or rank, whichever this process is. Outcomes in the one that speaks for all, else None."""
    from meshwright.run.compare import outcomes, run_in_one_process, run_trials, set_up_trials

    world = detect(os.environ)
    is_speaker = speaks_for_all(world)
    out = _folder(out, world, stack)
    argv = [*sys.argv[1:], "--out", str(out)]  # the last one counts
    if enter_ranks(argv, ranks, before=lambda: set_up_trials(trials, options, out)) is not None:
        run_trials(trials, options, out, _announce)
    if not is_speaker:
        return None
    run_in_one_process(trials, out, _announce)
    return outcomes(trials, out)


def _folder(out: Path | None, world: World | None, stack: ExitStack) -> Path:
    """Where all ranks read and write; a temporary folder unless one is given."""
    if out is not None:
        return out
    if world is not None:
        raise InputError(f"ranks that {world.source} started need a folder that all of them see; give --out FOLDER")
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-compare-")))


def _announce(name: str) -> None:
    typer.secho(name, bold=True)


def show(what: What, found: Sequence[Outcome], html: Path | None) -> None:
    """Tables, page, and what is not as it should be. Ends with status 1 where anything isn't."""
    from meshwright.report.compare import losses_figure, zero_figures
    from meshwright.report.figures import write_page
    from meshwright.report.tables import report_console

    reference = _reference(what, found)
    console = report_console()
    console.print()
    for table in _tables(what, found, reference):
        console.print(table)
    wrong = [f"{outcome.name}: {difference}" for outcome in found for difference in outcome.differences()]
    if what is What.ZERO:
        wrong += unequal_losses(found, reference)
    for line in wrong:
        console.print(f"differs: {line}", highlight=False, soft_wrap=True)
    if html is not None:
        title = f"Loss of `{reference.trial.plan.model.name}`, {len(reference.losses)} steps"
        figures = zero_figures(found) if what is What.ZERO else [losses_figure(found, title)]
        with writing(html):
            write_page(figures, html, "comparison")
        console.print(f"page written to {html}", highlight=False, soft_wrap=True)
    if wrong:
        raise typer.Exit(1)


def _tables(what: What, found: Sequence[Outcome], reference: Outcome) -> list[Table]:
    from meshwright.report.compare import memory_comparison, precision_table, traffic_comparison, verdict_table

    if what is What.PRECISION:
        return [precision_table(found, reference)]
    return [memory_comparison(found), traffic_comparison(found), verdict_table(found, reference)]


def _reference(what: What, found: Sequence[Outcome]) -> Outcome:
    """Stage 0; the first precision."""
    return next((o for o in found if what is What.ZERO and o.name == "zero0"), found[0])


def unequal_losses(found: Sequence[Outcome], reference: Outcome) -> list[str]:
    """One line for each trial whose losses are not those of the reference."""
    tolerance = LOSS_TOLERANCE.get(reference.trial.plan.strategy.precision, LOOSE)
    errors = {outcome.name: outcome.loss_difference(reference, JUDGED_STEPS) for outcome in found}
    return [
        f"{name}: loss: {error:.1e} from {reference.name} in the first {JUDGED_STEPS} steps, {tolerance:.0e} allowed"
        for name, error in errors.items()
        if not error <= tolerance
    ]
