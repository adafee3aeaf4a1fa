"""The command line: found by file, imported on demand, flags frozen, mistakes in one line."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from meshwright import cli
from meshwright.cli.main import Command, build_app, find_commands, main

WITHOUT_TORCH = ("plan", "show", "timeline", "what-if", "emit")
COMMANDS = find_commands()


def loaded_modules(*arguments: str) -> set[str]:
    """Modules in memory after `meshwright ARGUMENTS`."""
    code = (
        "import sys; from meshwright.cli.main import main; main(sys.argv[1:]); "
        "print('modules', *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def describe_flags(name: str) -> Iterator[str]:
    """One line per argument and option of a command."""
    group = typer.main.get_command(build_app(name))
    for param in group.commands[name].params:  # type: ignore[attr-defined]
        spelling = "/".join([*param.opts, *param.secondary_opts])
        kind = "argument" if param.param_type_name == "argument" else "option"
        more = " repeatable" if getattr(param, "multiple", False) else ""
        value = " required" if param.required else f" default={param.default!r}"
        yield f"{name:<9} {kind:<8} {spelling:<28}{more}{value}"


def test_flags_are_frozen(golden: Callable[[str, str], None]) -> None:
    lines = [line for command in COMMANDS for line in describe_flags(command.name)]
    golden("flags.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_every_command_has_a_summary(command: Command) -> None:
    assert command.summary


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command.name} " in shown for command in COMMANDS)
    assert main([]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in WITHOUT_TORCH)], ids=" ".join)
def test_light_commands_import_no_torch(arguments: list[str]) -> None:
    assert "torch" not in loaded_modules(*arguments)


def test_help_is_quick() -> None:
    """A tenth of a second on a free core: of what is installed, only the parser of commands is imported."""
    packages = {module.partition(".")[0] for module in loaded_modules("--help")} - sys.stdlib_module_names
    assert "typer" in packages
    assert not packages & {"numpy", "plotly", "pydantic", "rich", "torch", "transformers"}


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["train", "plan.toml", "--out", ""], "--out"),
        (["train", "plan.toml", "--text=", "--out", "x"], "--text"),
        (["plan", "gpt2", "local:1", "-o", ""], "-o"),
        (["show", ""], "argument 1"),
    ],
)
def test_an_empty_word_is_no_path(arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert f"Invalid value: `{option}` is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["--nonsense"], "No such option: --nonsense"),
        (
            ["plan", "demo", "local:1", "--imbalance", "inf"],
            "Invalid value for '--imbalance': Input should be a finite",
        ),
        (["compare", "tensorr"], "Invalid value for 'what': 'tensorr' is not one of 'zero', 'precision', 'tensor'"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"meshwright: error: {words}")
    assert "--help" in captured.err


def test_a_command_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "greet.py").write_text(
        'def greet_command(name: str) -> None:\n    """Say hello."""\n    print(f"hello {name}")\n'
    )
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    assert main(["greet", "mesh"]) == 0
    assert capsys.readouterr().out == "hello mesh\n"
    assert main(["greet"]) == 2
    assert "Missing argument 'name' (see `meshwright greet --help`)" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "greet" in capsys.readouterr().out
