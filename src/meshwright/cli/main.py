"""The `meshwright` command: finds the commands, imports only the one that is asked for.

A command is one file in this folder: `train.py` with a function `train_command`. Its first docstring
line is its help. The files are read, not imported, until their command runs, so that `--help` and
`plan` never wait for torch.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright import cli
from meshwright.run.command import end_rank, print_error, run_command
from meshwright.run.environment import is_rank

SUMMARY = "Plan, run and prove the parallel training of transformers."

ORDER = (
    "demo",
    "plan",
    "show",
    "what-if",
    "timeline",
    "calibrate",
    "dryrun",
    "train",
    "parity",
    "compare",
    "verify",
    "generate",
    "serve",
    "bench-serve",
    "export",
)
"""How `--help` lists the commands; others follow by name."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command, before its module is imported."""

    name: str
    module: str
    function: str
    summary: str

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function that typer turns into the command."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return function


def find_commands(folders: Sequence[str] | None = None) -> tuple[Command, ...]:
    """The commands whose files stand in `folders` (default: this package's), in the order of the help."""
    files = [file for folder in folders or cli.__path__ for file in sorted(Path(folder).glob("*.py"))]
    found = [command for file in files if (command := _read_command(file))]
    return tuple(sorted(found, key=lambda c: (ORDER.index(c.name) if c.name in ORDER else len(ORDER), c.name)))


def _read_command(file: Path) -> Command | None:
    function = f"{file.stem}_command"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            summary = (ast.get_docstring(node) or "").strip().split("\n")[0]
            return Command(file.stem.replace("_", "-"), f"{cli.__name__}.{file.stem}", function, summary)
    return None


def build_app(wanted: str | None) -> typer.Typer:
    """The typer app. Only the command `wanted` is imported; the others are names with a summary."""
    app = typer.Typer(
        name="meshwright",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help=SUMMARY)(_global_options)
    for command in find_commands():
        function = command.load() if command.name == wanted else _not_loaded
        app.command(command.name, help=None if command.name == wanted else command.summary)(function)
    return app


def _not_loaded() -> None:
    """Stands for a command that isn't asked for."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshwright {metadata.version('meshwright')}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def main(argv: Sequence[str]) -> int:
    """Run one command line and return the exit status; MeshwrightErrors pass through."""
    wanted = next((word for word in argv if not word.startswith("-")), None)
    app = build_app(wanted)
    try:
        _refuse_empty(argv)
        status = app(args=list(argv) or ["--help"], prog_name="meshwright", standalone_mode=False)
    except typer.TyperException as error:
        help_command = (
            f"meshwright {wanted} --help" if wanted in {c.name for c in find_commands()} else "meshwright --help"
        )
        message = error.format_message().removesuffix(".").replace("Value error, ", "")  # pydantic's words, not ours
        print_error(f"{message} (see `{help_command}`)")
        return error.exit_code
    except typer.Abort:
        return 1
    return status if isinstance(status, int) else 0


def _refuse_empty(argv: Sequence[str]) -> None:
    """An empty word names nothing, though as a path it would mean the folder one stands in."""
    for at, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if word and not (name.startswith("-") and equals and not value):
            continue
        option = name or (argv[at - 1] if at and argv[at - 1].startswith("-") else f"argument {at}")
        raise typer.BadParameter(f"`{option}` is empty: give it a value, or leave it out")


def run() -> None:
    """Entry point of the `meshwright` script, and of `python -m meshwright` in every rank."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without × is no reason to fail
    status = run_command(lambda: main(sys.argv[1:]))
    if is_rank(os.environ):
        end_rank(status)
    raise SystemExit(status)


if __name__ == "__main__":
    run()
