"""`meshwright generate`: text from a trained run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def generate_command(
    run: Annotated[Path, typer.Argument(help="The folder of a training run, or a Hugging Face folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among the k likeliest tokens.")] = 40,
    top_p: Annotated[float, typer.Option(help="Choose among tokens with so much probability together.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the choice.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    plan: Annotated[
        Path | None, typer.Option(help="Plan file of a training: divide the model over its tp and pp ranks.")
    ] = None,
) -> None:
    """Continue a prompt with a run's newest checkpoint, on one process or on the tp and pp ranks of a plan."""
    from meshwright.core.plan import Plan
    from meshwright.run.environment import detect
    from meshwright.run.generate import check_prompt, continue_text, divided
    from meshwright.run.launch import enter_ranks
    from meshwright.serve.request import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k or 0, top_p=top_p, seed=seed, ignore_eos=ignore_eos
    )
    asked = divided(Plan.load(plan)) if plan else None
    num_ranks = asked.strategy.world_size if asked else 1
    has_ranks = num_ranks > 1 or (asked is not None and detect(os.environ) is not None)

    def before() -> None:
        check_prompt(run, prompt, params, asked)

    world = enter_ranks(sys.argv[1:], num_ranks, before=before) if has_ranks else None
    if has_ranks and world is None:
        return
    text = continue_text(run, prompt, params, asked)
    if world is None or world.rank == 0:
        typer.echo(text)
