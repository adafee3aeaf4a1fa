"""The package's source as data: modules, what they import, their functions. Read by `ast`, never imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "meshwright"


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """First part of the name inside the package, empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]

    def imports(self) -> frozenset[str]:
        """Full names of everything imported, at the top or inside a function, for running or for typing."""
        return frozenset(name for node in ast.walk(self.tree) for name in self._imported(node))

    def imports_when_loaded(self) -> frozenset[str]:
        """Names imported while the module itself is imported: none inside functions, none for typing only."""
        return frozenset(name for node in _outside_functions(self.tree) for name in self._imported(node))

    def _imported(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "relative import"

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, nested ones too."""
        return (n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_typing_block(child):
            continue
        yield child
        yield from _outside_functions(child)


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    return tuple(
        Module(_name(path), path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(PACKAGE.rglob("*.py"))
    )


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_among(names: frozenset[str]) -> Iterator[str]:
    """The package's modules that these imported names stand for: `a.b.C` is module `a.b`."""
    known = {module.name for module in modules()}
    for name in names:
        parts = name.split(".")
        yield from (
            candidate
            for candidate in (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            if candidate in known
        )
