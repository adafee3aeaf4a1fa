"""`meshwright emit`: a plan as the flags or files of another tool."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.core.errors import InputError
from meshwright.core.values import write_text, writing

if TYPE_CHECKING:
    from meshwright.core.plan import Plan
    from meshwright.core.serving import ServingPlan
    from meshwright.planner.emit.common import Emitted


def emit_command(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    to: Annotated[str, typer.Option(help="megatron, torchtitan, deepspeed, accelerate, nemo, vllm, slurm, torchrun.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the files into this folder.")] = None,
) -> None:
    """Write a plan as flags or files of another tool, and say what it cannot express."""
    from meshwright.core.plan import Plan
    from meshwright.core.serving import ServingPlan, is_serving

    emitted = _emitted(to, ServingPlan.load(file) if is_serving(file) else Plan.load(file))
    for name, text in emitted.files.items():
        if out is None:
            typer.echo(text if len(emitted.files) == 1 else f"# {name}\n{text}", nl=False)
            continue
        with writing(out / name):
            out.mkdir(parents=True, exist_ok=True)
            write_text(out / name, text)
        typer.echo(f"{name} written to {out / name}")
    for note in emitted.notes:
        typer.echo(f"note: {note}", err=out is None)


def targets() -> tuple[str, ...]:
    """The tools that a plan can be emitted to: the files of `planner/emit`."""
    from meshwright.planner import emit

    files = (path.stem for folder in emit.__path__ for path in Path(folder).glob("*.py"))
    return tuple(sorted(name for name in files if name not in ("__init__", "common")))


def _emitted(name: str, plan: Plan | ServingPlan) -> Emitted:
    from meshwright.core.plan import Plan

    if name not in targets():
        raise InputError(f"--to {name}: no such tool; take one of {', '.join(targets())}")
    tool = importlib.import_module(f"meshwright.planner.emit.{name}")
    emit = tool.emit if isinstance(plan, Plan) else getattr(tool, "emit_serving", None)
    if emit is None:
        raise InputError(f"--to {name}: a plan for serving is not a training; --to vllm takes it")
    found: Emitted = emit(plan)
    return found
