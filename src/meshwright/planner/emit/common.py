"""What all targets share: the result, how flags are written, and what was not said."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.core.plan import Plan
from meshwright.core.units import counted
from meshwright.core.values import Value

Flags = dict[str, str | int | None]
"""Flag → its value; None for a flag without one."""

FOLLOWS_FROM_CLUSTER = ("ranks_per_node",)
"""Fields that a plan takes from its cluster: how gloo's collectives go, not a choice."""


SAID_OF_JOB = ("seq_length", "global_batch_size", "optimizer")
"""Fields of a job that every target writes, or has a note on of its own."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """A plan as a tool takes it."""

    files: dict[str, str]
    """Name → text."""
    notes: tuple[str, ...]
    """What the tool cannot express, or does otherwise."""


OF_FORECASTS = {"imbalance": "it is for forecasts alone"}
"""What no tool needs to know, though a plan was made with it."""


def left_out(plan: Plan, tool: str, said: Collection[str], why: Mapping[str, str] | None = None) -> Iterator[str]:
    """One line for each field of strategy and job that is not at its default and was not said.

    Args:
        tool: how it is called.
        said: fields that its flags or files express, besides `SAID_OF_JOB`.
        why: field → what to know about it, in the place of the general words.
    """
    for value in (plan.strategy, plan.job):
        for name, field in type(value).model_fields.items():
            chosen = getattr(value, name)
            if name in (*said, *SAID_OF_JOB, *FOLLOWS_FROM_CLUSTER):
                continue
            if chosen != field.get_default(call_default_factory=True):
                reason = {**OF_FORECASTS, **(why or {})}.get(name, f"{tool} has no such choice")
                yield f"{name}={written(chosen)}: {reason}"


def why_experts(plan: Plan, degree: str) -> dict[str, str]:
    """`why` of :func:`left_out` on `expert`, for a tool whose files say nothing of it.

    Args:
        degree: how the ranks that share the experts are set in the tool.
    """
    s = plan.strategy
    reasons = [degree] if s.ep > 1 else []
    if s.et != s.tp:
        reasons.append(f"not expressed: the width of an expert over {counted(s.et, 'rank')}, where tp={s.tp}")
    return {"expert": "; ".join(reasons) or f"as tp={s.tp} says already"}


def written(value: Any) -> str:
    """A value of a field as it is written behind `--fix`: what is at its default is left out of nested ones."""
    if isinstance(value, Value):
        return ",".join(f"{name}:{written(part)}" for name, part in value.model_dump(exclude_defaults=True).items())
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    return str(value)


def torchrun_words(plan: Plan) -> list[str]:
    """`torchrun` and its own flags, the same on every node. `$MASTER` is the first node's address."""
    cluster = plan.cluster
    words = ["torchrun", f"--nnodes={cluster.num_nodes}", f"--nproc-per-node={cluster.devices_per_node}"]
    if cluster.num_nodes == 1:
        return [*words, "--standalone"]
    return [*words, "--rdzv-backend=c10d", '--rdzv-endpoint="$MASTER:29500"', "--rdzv-id=meshwright"]


def command_line(words: list[str], flags: Flags) -> str:
    """One flag per line."""
    lines = [" ".join(words), *(_flag(name, value) for name, value in flags.items())]
    return " \\\n  ".join(lines) + "\n"


def _flag(name: str, value: str | int | None) -> str:
    return name if value is None else f"{name} {shlex.quote(str(value))}"


def script(text: str) -> str:
    """A shell script that ends at its first failure."""
    needs_master = ': "${MASTER:?set it to the address of the first node}"\n' if "$MASTER" in text else ""
    return f"#!/bin/bash\nset -euo pipefail\n{needs_master}{text}"
