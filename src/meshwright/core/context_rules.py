"""What context parallelism needs: rows of the table in :mod:`meshwright.core.rules`.

Each says with which numbers a strategy breaks it, or None.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.job import Job
from meshwright.core.layouts import Context
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy

TOKENS = "context.degree divides seq_length, with balance=zigzag twice the degree does"
KINDS = "context.degree > 1 goes with tensor.kind=1d; context.kind=ulysses not with recompute=selective"
HEADS = "with context.kind=ulysses, context.degree divides the heads of a tp rank"
KV_HEADS = "with context.kind=ulysses, context.degree divides the key/value heads of a tp rank or is a multiple of them"


def tokens(strategy: Strategy, job: Job) -> str | None:
    """Rule `context-tokens`."""
    context, length = strategy.context, job.seq_length
    parts = context.degree * (2 if context.balance == "zigzag" else 1)
    if context.degree == 1 or length % parts == 0:
        return None
    twice = " × 2 (zigzag)" if context.balance == "zigzag" else ""
    return f"context.degree={context.degree}{twice} does not divide seq_length={length}"


def kinds(strategy: Strategy) -> str | None:
    """Rule `context-tensor`."""
    if strategy.cp == 1:
        return None
    for name, is_set in (
        (f"tensor.kind={strategy.tensor.kind}", strategy.tensor.kind != "1d"),
        ("context.kind=ulysses and recompute=selective", _is_ulysses(strategy) and strategy.recompute == "selective"),
    ):
        if is_set:
            return f"context.degree={strategy.cp} with {name}"
    return None


def heads(strategy: Strategy, model: ModelSpec) -> str | None:
    """Rule `ulysses-heads`."""
    if not _is_ulysses(strategy) or model.num_heads % (strategy.tp * strategy.cp) == 0:
        return None
    return f"context.degree={strategy.cp} does not divide {_of_rank(model.num_heads, strategy.tp)} heads"


def kv_heads(strategy: Strategy, model: ModelSpec) -> str | None:
    """Rule `ulysses-kv-heads`."""
    have, cp = max(1, model.num_kv_heads // strategy.tp), strategy.cp
    if not _is_ulysses(strategy) or have % cp == 0 or cp % have == 0:
        return None
    count = _of_rank(model.num_kv_heads, strategy.tp)
    return f"context.degree={cp} and {count} key/value heads: neither divides the other"


def _is_ulysses(strategy: Strategy) -> bool:
    return strategy.cp > 1 and strategy.context.kind == "ulysses"


def _of_rank(count: int, tp: int) -> str:
    """`8`, or with tensor parallelism `8/4`."""
    return str(count) if tp == 1 else f"{count}/{tp}"


def nearer(strategy: Strategy) -> Iterator[Strategy]:
    """The same strategy with less changed of its context parallelism than all: balance, then kind, then degree."""
    context = strategy.context
    if context.degree == 1:
        return
    for change in ({"balance": "contiguous"}, {"kind": "ring"}, {"kind": "ring", "balance": "contiguous"}):
        yield strategy.model_copy(update={"context": context.model_copy(update=change)})
    smaller = [degree for degree in range(context.degree - 1, 1, -1) if strategy.world_size % degree == 0]
    for degree in smaller:
        yield strategy.model_copy(update={"context": Context(kind=context.kind, degree=degree)})
