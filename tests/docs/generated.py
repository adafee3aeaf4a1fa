"""The parts of pages that are written from the code."""

import ast
from collections.abc import Callable, Mapping

from tests.docs.reference import REFERENCE
from tests.house.source import PACKAGE
from tests.house.test_rooms import LEVELS


def rooms() -> str:
    """One line per room, from its docstring."""
    lines = ["| level | room | what lives there |", "| --- | --- | --- |"]
    for room, level in sorted(LEVELS.items(), key=lambda item: (item[1], item[0])):
        init = PACKAGE / room / "__init__.py"
        if init.exists():
            doc = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
            lines.append(f"| {level} | `{room}/` | {doc.splitlines()[0].partition(': ')[2]} |")
    return "\n".join(lines) + "\n"


GENERATED: Mapping[str, Callable[[], str]] = {"rooms": rooms, **REFERENCE}
