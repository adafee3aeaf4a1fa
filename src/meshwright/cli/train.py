"""`meshwright train`: carry out a plan on real text."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from meshwright.core.errors import InputError
from meshwright.core.plan import Plan
from meshwright.core.units import counted
from meshwright.planner.named import NamedFields
from meshwright.run.environment import detect
from meshwright.run.folder import RunFolder
from meshwright.run.launch import enter_ranks, speaks_for_all
from meshwright.run.options import TrainOptions


def train_command(
    plan: Annotated[Path, typer.Argument(help="Plan file written by `meshwright plan`.")],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    text: Annotated[str | None, typer.Option(help="Text, JSONL or Parquet file, or a folder of them.")] = None,
    stdlib: Annotated[bool, typer.Option("--stdlib", help="Train on the source of Python's standard library.")] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Decoupled decay, on matrices only.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Largest global gradient norm.")] = None,
    loss_scale: Annotated[
        str | None, typer.Option(help="Of fp16, as in initial=1024,interval=200; also growth, backoff, hysteresis, ...")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and of the order of samples.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None,
    eval_samples: Annotated[int | None, typer.Option(help="Sequences in an evaluation.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    keep: Annotated[int | None, typer.Option(help="Newest checkpoints that are kept.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Hugging Face tokenizer; default: trained on the text.")] = None,
    pretrained: Annotated[str | None, typer.Option(help="Hugging Face folder whose weights to start from.")] = None,
    max_text_bytes: Annotated[int | None, typer.Option(help="How much of the standard library to read.")] = None,
    separate_documents: Annotated[
        bool, typer.Option("--separate-documents", help="Documents that share a sequence don't see each other.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
) -> None:
    """Train a plan: starts its own ranks, or takes its place among those of torchrun or Slurm."""
    if (stdlib and text is not None) or not (stdlib or text is not None or resume):
        raise InputError("say what to train on: either --text PATH or --stdlib")
    given = {
        "text": text, "steps": steps, "learning_rate": learning_rate, "warmup_steps": warmup_steps,
        "weight_decay": weight_decay, "clip_norm": clip_norm, "seed": seed, "eval_every": eval_every,
        "eval_samples": eval_samples, "save_every": save_every, "keep": keep, "tokenizer": tokenizer,
        "pretrained": pretrained, "max_text_bytes": max_text_bytes,
        "loss_scale": None if loss_scale is None else _loss_scale(loss_scale),
        "separate_documents": separate_documents or None,
    }  # fmt: skip
    changed: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    run, old = RunFolder(out), {}
    if resume:
        run.plan()
        old = run.options().model_dump()
    if stdlib:
        changed["text"] = None
    train(Plan.load(plan), TrainOptions.parse({**old, **changed}, "options"), run, resume=resume)


def _loss_scale(text: str) -> dict[str, str]:
    """`initial=1024,interval=200` as names and values. Raises InputError."""
    from meshwright.train.loss_scale import LossScaleOptions

    types = {field.name: field.type for field in fields(LossScaleOptions)}
    return NamedFields("--loss-scale", types, "the loss scale", "initial=1024,interval=200").read(text.split(","))


def train(plan: Plan, options: TrainOptions, run: RunFolder, *, resume: bool) -> None:
    """Launcher or rank, whichever this process is.

    Raises:
        MeshwrightError: before anything is started, what :func:`meshwright.run.set_up.set_up` refuses.
        RankError: a rank failed.
    """
    from meshwright.run.set_up import set_up

    is_speaker = speaks_for_all(detect(os.environ))
    done = _steps_done(run) if resume else 0
    if done >= options.steps:
        if is_speaker:
            have = counted(done, "step is", "steps are")
            typer.echo(f"{run.path}: nothing left to do: {have} done; to go on, give --steps more than {done}")
        return
    if resume and is_speaker and not done and run.plan_path.exists():
        typer.echo(f"{run.path}: no checkpoint in it yet; training starts again with its first step")
    with run.claim() if is_speaker else nullcontext():
        world = enter_ranks(
            sys.argv[1:],
            plan.strategy.world_size,
            log_dir=run.logs,
            before=lambda: set_up(plan, options, run, resume=resume),
        )
        if world is None:
            return
        from meshwright.run.training import Training

        Training(plan, options, run).run(resume=resume)
    if world.rank == 0:
        _show(run)


def _steps_done(run: RunFolder) -> int:
    """By the newest checkpoint."""
    from meshwright.checkpoint import latest

    return latest(run.checkpoints) or 0


def _show(run: RunFolder) -> None:
    """The loss curve, in the terminal and as a picture."""
    from meshwright.report.figures import write_experts_figures, write_loss_figure
    from meshwright.report.tables import sparkline
    from meshwright.train.metrics import read_metrics

    rows = read_metrics(run.path)
    picture = write_loss_figure(run.path)
    typer.echo(f"loss {rows[0].loss:.3f} {sparkline([row.loss for row in rows])} {rows[-1].loss:.3f}  ({picture})")
    if loads := write_experts_figures(run.path):
        typer.echo(f"imbalance of experts {rows[0].expert_imbalance:.2f} → {rows[-1].expert_imbalance:.2f}  ({loads})")
