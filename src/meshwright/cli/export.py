"""`meshwright export`: a trained run as a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.run.folder import RunFolder
from meshwright.train.tokenizer import CONFIG_FILE, TOKENIZER_FILE

TOKENIZER_FILES = (TOKENIZER_FILE, CONFIG_FILE)


def export_command(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    to: Annotated[Path, typer.Option(help="A new folder.")],
) -> None:
    """Write safetensors, config.json and tokenizer of a run's newest checkpoint, as `transformers` loads them."""
    from meshwright.models.hf import export
    from meshwright.run.restore import restore_plain

    folder = RunFolder(run)
    model = restore_plain(folder)
    tokenizer = {name: (folder.data / name).read_bytes() for name in TOKENIZER_FILES if (folder.data / name).exists()}
    export(to, model.spec, model.stored(), extra_files=tokenizer)
    typer.echo(f"written to {to}: load it with transformers' AutoModelForCausalLM.from_pretrained")
