"""A page of documentation that is run: its code blocks are executed, its outputs and tables are what they print.

```python   executed, all blocks of a page in one namespace; a ```text block right after one is its output
```console  each `$ meshwright ...` is run; what stands under it is its output
```sh       shown only; but its `meshwright` and `make` lines must parse
<!-- generated: NAME --> ... <!-- end -->  written by `GENERATED[NAME]`
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.cli.main import build_app, find_commands, main

BLOCK = re.compile(
    r"^```(?P<kind>python|console|sh)\n(?P<code>.*?)^```\n(?:\n*^```text\n(?P<output>.*?)^```\n)?"
    r"|^<!-- generated: (?P<name>\w+) -->\n.*?^<!-- end -->\n",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Page:
    """One page while it is run. `render` gives the text as it should stand."""

    path: Path
    generated: Mapping[str, Callable[[], str]]
    make_targets: frozenset[str]
    names: dict[str, Any] = field(default_factory=dict)

    def render(self) -> str:
        """The page with every output as it is today. Raises what a block raises."""
        return BLOCK.sub(self._run, self.path.read_text(encoding="utf-8"))

    def _run(self, match: re.Match[str]) -> str:
        if match["name"]:
            return f"<!-- generated: {match['name']} -->\n{self.generated[match['name']]()}<!-- end -->\n"
        match match["kind"]:
            case "python":
                return self._run_python(match)
            case "console":
                return f"```console\n{''.join(self._run_console(match['code']))}```\n"
            case _:
                self._check_shell(match["code"])
                return match[0]

    def _run_python(self, match: re.Match[str]) -> str:
        line = match.string[: match.start()].count("\n") + 1
        code = compile("\n" * line + match["code"], str(self.path), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, self.names)
        if match["output"] is None:
            return match[0]
        return f"```python\n{match['code']}```\n\n```text\n{tidy(printed.getvalue())}```\n"

    def _run_console(self, code: str) -> Iterator[str]:
        for part in re.findall(r"^\$ .*\n(?:^(?!\$ ).*\n)*", code, re.MULTILINE):
            command, _, output = part.partition("\n")
            program, *arguments = shlex.split(command.removeprefix("$ "))
            assert program == "meshwright", f"{self.path.name}: only meshwright runs in a console block: {command}"
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                status = main(arguments)
            assert status == 0, f"{self.path.name}: {command} ended with status {status}"
            yield f"{command}\n{tidy(printed.getvalue()) if output.strip() else output}"

    def _check_shell(self, code: str) -> None:
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                assert words[1] in self.make_targets, f"{self.path.name}: no such target: {line}"
            if "meshwright" in words[:1] or "-m meshwright" in line:
                check_arguments(words[1 + max(i for i, w in enumerate(words) if w.startswith("meshwright")) :])


def check_arguments(arguments: list[str]) -> None:
    """The command exists, and its options and the number of its arguments are right."""
    import typer

    name, *rest = arguments
    assert name in {command.name for command in find_commands()}, f"no command `{name}`"
    group = typer.main.get_command(build_app(name))
    group.commands[name].make_context(name, rest)  # type: ignore[attr-defined]


def tidy(output: str) -> str:
    """Output as a page holds it: no spaces at line ends, no empty lines around, one newline at the end."""
    lines = [line.rstrip() for line in output.splitlines()]
    return "\n".join(lines).strip("\n") + "\n"
