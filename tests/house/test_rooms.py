"""The house: which room may import which, no cycles, no torch where plans are made, one door to the network."""

import ast
import subprocess
import sys

import pytest

from meshwright.core.axes import DP_ACROSS, DP_NODE, PP_ENDS, PP_MIRROR, TP_KV
from tests.house.source import Module, modules, modules_among

LEVELS = {
    "core": 0,
    "cost": 1,
    "schedule": 1,
    "sim": 2,
    "planner": 3,
    "comm": 4,
    "models": 5,
    "parallel": 5,
    "checkpoint": 6,
    "serve": 6,
    "train": 6,
    "rehearse": 6,
    "run": 7,
    "cli": 8,
    "report": 8,
    "__main__": 9,
}
"""A room imports rooms of a lower level, and itself."""

SIBLINGS = {
    ("cli", "report"): "the terminal shows the same figures as the other readers",
    ("rehearse", "serve"): "calibration times the products and the steps of the server itself",
    ("cost", "schedule"): "how many micro-batches' activations live at once follows from the table",
}
"""Imports between rooms of one level, each with its reason."""

WITHOUT_TORCH = ("core", "cost", "schedule", "sim", "planner", "report")

NETWORK = {
    "meshwright.comm": "the one door",
    "meshwright.run.torchrun": "the launcher is part of torch.distributed",
    "meshwright.checkpoint": "the checkpoint format is torch.distributed.checkpoint",
}
"""What may name torch.distributed, each with its reason."""


def rooms_imported(module: Module) -> set[str]:
    return {name.split(".")[1] for name in module.imports() if name.startswith("meshwright.")} & LEVELS.keys()


def is_inside(name: str, parents: dict[str, str]) -> bool:
    return any(f"{name}.".startswith(f"{parent}.") for parent in parents)


def test_every_room_has_a_level() -> None:
    assert {m.room for m in modules() if "." in m.name} <= LEVELS.keys()


def test_a_room_imports_only_lower_rooms() -> None:
    wrong = [
        f"{module.name} (level {LEVELS[module.room]}) imports {room} (level {LEVELS[room]})"
        for module in modules()
        for room in rooms_imported(module) - {module.room}
        if module.room and LEVELS[room] >= LEVELS[module.room] and (module.room, room) not in SIBLINGS
    ]
    assert not wrong


def test_imports_are_absolute() -> None:
    assert not [m.name for m in modules() if "relative import" in m.imports()]


def test_no_import_cycles() -> None:
    """By the imports that run when a module is loaded. Peel off modules without open imports until none is left."""
    graph = {m.name: set(modules_among(m.imports_when_loaded())) - {m.name} for m in modules()}
    graph = {name: {t for t in targets if not name.startswith(f"{t}.")} for name, targets in graph.items()}
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert not graph, f"in or behind an import cycle: {sorted(graph)}"


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_room_runs_without_torch(room: str) -> None:
    names = [m.name for m in modules() if m.room == room]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names!r}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_one_door_to_the_network() -> None:
    wrong = [
        f"{module.name} names {name}"
        for module in modules()
        for name in module.imports()
        if name.startswith("torch.distributed") and not is_inside(module.name, NETWORK)
    ]
    assert not wrong


def test_one_place_spells_the_names_of_sub_axes() -> None:
    """The degrees `dp`, `tp`, `pp` are fields of a strategy too; the others are names of axes and nothing else."""
    names = {DP_NODE, DP_ACROSS, TP_KV, PP_ENDS, PP_MIRROR}
    wrong = [
        f"{module.name} spells `{node.value}`"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and node.value in names and module.name != "meshwright.core.axes"
    ]
    assert not wrong
