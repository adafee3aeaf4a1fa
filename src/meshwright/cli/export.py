"""`meshwright export`: a trained run as a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.run.folder import RunFolder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def export_command(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    to: Annotated[Path, typer.Option(help="A new folder.")],
) -> None:
    """Write safetensors, config.json and tokenizer of a run's newest checkpoint, as `transformers` loads them."""
    from meshwright.models.hf import export
    from meshwright.run.restore import restore_plain

    folder = RunFolder(run)
    model = restore_plain(folder)
    parameters = dict(model.named_parameters())
    extra = {name: (folder.data / name).read_bytes() for name in TOKENIZER_FILES if (folder.data / name).exists()}
    names = [p.name for p in model.spec.parameters()]
    export(to, model.spec, ((name, parameters[name].detach()) for name in names), extra_files=extra)
    typer.echo(f"written to {to}: load it with transformers' AutoModelForCausalLM.from_pretrained")
