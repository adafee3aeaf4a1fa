"""`meshwright generate`: text from a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.core.errors import InputError
from meshwright.run.folder import RunFolder


def generate_command(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among the k likeliest tokens.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the choice.")] = 0,
) -> None:
    """Continue a prompt with a run's newest checkpoint, on one process and without a cache."""
    typer.echo(continue_text(RunFolder(run), prompt, max_tokens, temperature, top_k, seed))


def continue_text(
    run: RunFolder, prompt: str, max_tokens: int, temperature: float, top_k: int | None, seed: int
) -> str:
    """The prompt and its continuation. Raises InputError for an empty prompt."""
    import torch

    from meshwright.models.generate import generate
    from meshwright.run.restore import restore_plain
    from meshwright.train.prepare import load_prepared

    run.plan()
    tokenizer = load_prepared(run.data).tokenizer()
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise InputError("the prompt is empty; give --prompt some text")
    tokens = generate(restore_plain(run), torch.tensor([ids]), max_tokens, temperature, top_k, seed)
    return str(tokenizer.decode(tokens[0].tolist()))
