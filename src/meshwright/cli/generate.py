"""`meshwright generate`: text from a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate_command(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among the k likeliest tokens.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the choice.")] = 0,
) -> None:
    """Continue a prompt with a run's newest checkpoint, on one process and without a cache."""
    from meshwright.run.folder import RunFolder
    from meshwright.run.generate import continue_text

    typer.echo(continue_text(RunFolder(run), prompt, max_tokens, temperature, top_k, seed))
