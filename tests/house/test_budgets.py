"""Small functions, small files, and a sentence for everything that is public."""

import ast
from collections.abc import Iterator
from typing import TypeGuard

from tests.house.source import modules

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600


def public_things(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def _is_class(node: ast.stmt) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def test_functions_are_short() -> None:
    sizes = {f"{m.name}.{f.name}": (f.end_lineno or 0) - f.lineno + 1 for m in modules() for f in m.functions()}
    assert not {name: lines for name, lines in sizes.items() if lines > MAX_FUNCTION_LINES}


def test_files_are_short() -> None:
    sizes = {m.name: len(m.path.read_text(encoding="utf-8").splitlines()) for m in modules()}
    assert not {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES}


def test_every_module_says_what_it_is() -> None:
    assert not [m.name for m in modules() if not ast.get_docstring(m.tree)]


def test_everything_public_says_what_it_is() -> None:
    silent = [f"{m.name}.{x.name}" for m in modules() for x in public_things(m.tree) if not ast.get_docstring(x)]
    assert not silent


def test_every_exception_is_drawn_in_the_tree() -> None:
    """At the head of core/errors.py, wherever it is defined."""
    bases = {n.name: {ast.unparse(b) for b in n.bases} for m in modules() for n in m.tree.body if _is_class(n)}
    family = {"MeshwrightError"}
    while more := {name for name, parents in bases.items() if parents & family} - family:
        family |= more
    drawn = next(ast.get_docstring(m.tree) or "" for m in modules() if m.name == "meshwright.core.errors")
    assert not family - set(drawn.split())


def test_no_ambient_state() -> None:
    wrong = [f"{m.name}: {ast.unparse(n)}" for m in modules() for n in ast.walk(m.tree) if isinstance(n, ast.Global)]
    assert not wrong, "pass the value by hand"
