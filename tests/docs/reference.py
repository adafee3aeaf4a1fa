"""The tables of `docs/reference/`, each from the one place in the code that decides what it says."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from types import ModuleType
from typing import get_args

import typer
from pydantic import BaseModel

from meshwright.cli.main import build_app, find_commands
from meshwright.core import axes, cluster, job, model, plan, program, serving, strategy
from meshwright.core.axes import ALL_AXES
from meshwright.core.errors import UnsupportedError
from meshwright.core.measures import PHASES, PRIMITIVES, wire_bytes
from meshwright.core.model import ModelSpec
from meshwright.core.precision import RECIPES, Recipe
from meshwright.core.rules import RULES
from meshwright.core.schedule import schedules as declared_schedules
from meshwright.core.sources import cluster_names, device_names, load_cluster, load_model, model_names
from meshwright.core.units import format_bytes, format_time
from meshwright.models.build import build
from meshwright.planner.advise import ADVICE_RULES
from meshwright.run import options
from tests.house.source import modules


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    heads = tuple(heads)
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _code(value: object) -> str:
    return f"`{value}`"


def _documented(body: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    """(name, docstring) of each assignment; the docstring is the string right below it, empty where none is."""
    statements = [*body, ast.Pass()]
    for statement, after in pairwise(statements):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if isinstance(target, ast.Name):
            doc = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            yield target.id, inspect.cleandoc(doc)


def _class_docs(module: ModuleType, name: str) -> dict[str, str]:
    """Attribute → docstring of a class."""
    tree = ast.parse(inspect.getsource(module))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return dict(_documented(found.body))


# --- commands ----------------------------------------------------------------------------------------------


def commands() -> str:
    """Each command with its arguments and options."""
    return "\n".join(_command(command.name, command.summary) for command in find_commands())


def _command(name: str, summary: str) -> str:
    group = typer.main.get_command(build_app(name))
    params = group.commands[name].params  # type: ignore[attr-defined]
    arguments = [param for param in params if param.param_type_name == "argument"]
    usage = " ".join(["meshwright", name, *((param.metavar or param.name).upper() for param in arguments), "[OPTIONS]"])
    rows = [(_spelling(param), _default(param), param.help or "") for param in params]
    return f"## {name}\n\n{summary}\n\n`{usage}`\n\n{table(('argument or option', 'default', 'meaning'), rows)}"


def _spelling(param: typer.core.TyperArgument | typer.core.TyperOption) -> str:
    if param.param_type_name == "argument":
        return _code((param.metavar or param.name).upper())
    return ", ".join(map(_code, param.opts)) + (", repeatable" if param.multiple else "")


def _default(param: typer.core.TyperArgument | typer.core.TyperOption) -> str:
    if param.required:
        return "required"
    return "" if param.default is None or param.default is False else _code(param.default)


def environment() -> str:
    """Variables of the environment that the package names."""
    rows = []
    for module in modules():
        docs = dict(_documented(module.tree.body))
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                value, name = str(node.value.value), ast.unparse(node.targets[0])
                if value.startswith("MESHWRIGHT_"):
                    rows.append((_code(value), docs[name].removeprefix("Environment variable: ")))
    return table(("variable", "meaning"), rows)


# --- values ------------------------------------------------------------------------------------------------


def _fields(module: ModuleType, name: str) -> str:
    """Field, type, default and meaning of a value."""
    value: type[BaseModel] = getattr(module, name)
    docs = _class_docs(module, name)
    annotations = {
        node.target.id: ast.unparse(node.annotation)
        for node in ast.walk(ast.parse(inspect.getsource(value)))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    rows = [
        (
            _code(field),
            _code(_spelt_out(module, annotations[field])),
            "required" if info.is_required() else _code(repr(info.default) if info.default == "" else info.default),
            docs[field],
        )
        for field, info in value.model_fields.items()
    ]
    return table(("field", "type", "default", "meaning"), rows)


def _spelt_out(module: ModuleType, annotation: str) -> str:
    """`Precision` as the values that it allows."""
    values = get_args(getattr(module, annotation, None))
    return f"Literal[{', '.join(map(repr, values))}]" if values else annotation


def schedules() -> str:
    """Each schedule, from the docstring of its file."""
    found = declared_schedules()
    docs = {name: inspect.getdoc(inspect.getmodule(schedule.order)) or "" for name, schedule in found.items()}
    return table(("schedule", "order"), ((_code(name), doc) for name, doc in docs.items()))


def actions() -> str:
    """Each kind of cell of a timetable."""
    docs = _class_docs(program, "Kind")
    return table(("action", "what it does"), ((_code(kind), docs[kind.name]) for kind in program.Kind))


def recipes() -> str:
    """Each precision with the dtype of every copy and the bytes of a parameter under AdamW."""
    heads = ("precision", "parameter", "gradient", "master", "moment", "bytes, AdamW", "trains", "source")
    return table(heads, map(_recipe, RECIPES.values()))


def _recipe(recipe: Recipe) -> tuple[object, ...]:
    wider = f" + {recipe.step_gradient} during the update" if recipe.step_gradient else ""
    return (
        _code(recipe.name),
        recipe.parameter,
        recipe.gradient + wider,
        recipe.master or "–",
        recipe.moment,
        recipe.adamw_total_bytes,
        "yes" if recipe.runnable else "forecast only",
        recipe.source,
    )


# --- rules -------------------------------------------------------------------------------------------------


def rules() -> str:
    """One line per rule of the table that makes a strategy legal."""
    return table(("rule", "what it needs", "why"), ((_code(rule.id), rule.needs, rule.why) for rule in RULES))


def advice() -> str:
    """One line per rule of thumb."""
    return table(("rule", "advice", "source"), ((_code(rule.id), rule.advice, rule.source) for rule in ADVICE_RULES))


# --- ledger ------------------------------------------------------------------------------------------------


def mesh_axes() -> str:
    """Each axis."""
    docs = dict(_documented(ast.parse(inspect.getsource(axes)).body))
    names = {getattr(axes, name): doc for name, doc in docs.items() if isinstance(getattr(axes, name), str)}
    return table(("axis", "its groups"), ((_code(axis), names[axis]) for axis in ALL_AXES))


def primitives() -> str:
    """Each primitive with what one of 8 ranks sends for a payload of 8000 bytes."""
    heads = ("primitive", "payload: the bytes of", "wire bytes of one of 8 ranks, payload 8000")
    return table(heads, ((_code(name), what, wire_bytes(name, 8000, 8)) for name, what in PRIMITIVES.items()))


def phases() -> str:
    """Each phase."""
    return table(("phase", "what is communicated"), ((_code(name), what) for name, what in PHASES.items()))


# --- catalogue ---------------------------------------------------------------------------------------------


def models() -> str:
    """Each preset of a model."""
    heads = ("model", "family", "parameters", "layers × hidden", "heads / key-value", "feed-forward", "vocabulary")
    return table((*heads, "positions", "trains"), (_model(name, load_model(name)) for name in model_names()))


def _model(name: str, spec: ModelSpec) -> tuple[object, ...]:
    try:
        build(spec.model_copy(update={"num_layers": 2, "dense_layers": None}))
        trains = "yes"
    except UnsupportedError:
        trains = "plan only"
    experts = f" × {spec.num_experts} experts" if spec.num_experts else ""
    return (
        _code(name),
        spec.family,
        f"{spec.num_parameters:,}",
        f"{spec.num_layers} × {spec.hidden_size}",
        f"{spec.num_heads} / {spec.num_kv_heads}",
        f"{spec.expert_size}{experts}",
        spec.vocab_size,
        f"{spec.positions}, {spec.max_positions}",
        trains,
    )


def devices() -> str:
    """Each device, with the links that come with it."""
    heads = ("device", "memory", "memory bandwidth", "peak TFLOP/s", "within a node", "between nodes", "source")
    return table(heads, (_device(name, load_cluster(f"2x8x{name}")) for name in device_names()))


def _device(name: str, one: cluster.ClusterSpec) -> tuple[object, ...]:
    device = one.device
    peaks = ", ".join(f"{dtype} {peak / 1e12:g}" for dtype, peak in device.peak_flops_per_s.items())
    return (
        _code(name),
        format_bytes(device.memory_bytes),
        f"{format_bytes(device.memory_bandwidth_bytes_per_s)}/s",
        peaks,
        _link(one.intra_link),
        _link(one.inter_link),
        device.source,
    )


def _link(link: cluster.Link) -> str:
    return f"{link.name}: {format_bytes(link.bandwidth_bytes_per_s)}/s, {format_time(link.latency_s)}"


def clusters() -> str:
    """Each preset of a cluster."""
    found = ((name, load_cluster(name)) for name in cluster_names())
    rows = ((_code(n), c.num_nodes, c.devices_per_node, c.device.name, _link(c.inter_link)) for n, c in found)
    return table(("cluster", "nodes", "devices each", "device", "between nodes"), rows)


# --- errors ------------------------------------------------------------------------------------------------


def errors() -> str:
    """The tree of exceptions, wherever in the package they are defined."""
    defined = {
        node.name: (
            [ast.unparse(base) for base in node.bases],
            (ast.get_docstring(node) or "").partition("\n")[0],
            module,
        )
        for module in modules()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }

    def below(parent: str, depth: int) -> Iterator[tuple[str, str, str]]:
        for name, (bases, doc, module) in defined.items():
            if parent in bases:
                yield f"{'&emsp;' * depth}`{name}`", _code(module.name), doc
                yield from below(name, depth + 1)

    bases, doc, module = defined["MeshwrightError"]
    assert bases == ["Exception"]
    return table(
        ("exception", "module", "meaning"),
        [("`MeshwrightError`", _code(module.name), doc), *below("MeshwrightError", 1)],
    )


REFERENCE: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "environment": environment,
    "plan_fields": lambda: _fields(plan, "Plan"),
    "serving_plan_fields": lambda: _fields(serving, "ServingPlan"),
    "requests_fields": lambda: _fields(serving, "Requests"),
    "layout_fields": lambda: _fields(serving, "Layout"),
    "strategy_fields": lambda: _fields(strategy, "Strategy"),
    "model_fields": lambda: _fields(model, "ModelSpec"),
    "job_fields": lambda: _fields(job, "Job"),
    "cluster_fields": lambda: _fields(cluster, "ClusterSpec"),
    "device_fields": lambda: _fields(cluster, "Device"),
    "link_fields": lambda: _fields(cluster, "Link"),
    "option_fields": lambda: _fields(options, "TrainOptions"),
    "schedules": schedules,
    "actions": actions,
    "recipes": recipes,
    "rules": rules,
    "advice": advice,
    "axes": mesh_axes,
    "primitives": primitives,
    "phases": phases,
    "models": models,
    "devices": devices,
    "clusters": clusters,
    "errors": errors,
}
