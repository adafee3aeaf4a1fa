"""Benchmarks are run by hand: what they take from the package is there."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshwright":
            module = import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert all(_is_module(f"{node.module}.{name}") for name in missing), f"{node.module} has no {missing}"


def _is_module(name: str) -> bool:
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True
