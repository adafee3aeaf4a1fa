"""What grids of tensor parallelism need of sizes; the rows of :mod:`meshwright.core.rules` about them.

    kind    ranks     micro-batch    hidden    feed-forward    heads
    2d      q²        q              q         q               q
    2.5d    δ·q²      δ·q            q         q               q             δ ≤ q
    3d      q³        q²             q²        q²              q             heads × head_dim: q²

Each number divides what stands above it; q divides the key/value heads, or they q: then each is held by several
columns of ranks. Each function returns the numbers that break its rule, or None.
Sources: Xu et al. 2021, Wang et al. 2021 (2.5D, δ ≤ q), Bian et al. 2021 (3D).
"""

from __future__ import annotations

from math import isqrt

from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy


def grid_fault(strategy: Strategy) -> str | None:
    """Whether the ranks of tp fill a grid."""
    kind, depth, tp = strategy.tensor.kind, strategy.tensor.depth, strategy.tp
    if kind != "2.5d" and depth > 1:
        return f"tensor.depth={depth} with tensor.kind={kind}"
    if kind == "1d" or strategy.grid.parts(tuple(axis for axis, _ in strategy.grid.axes)) == tp:
        if kind == "2.5d" and depth > strategy.grid.side:
            return f"tensor.depth={depth} is more than the side {strategy.grid.side} of a grid of tp={tp}"
        return None
    power, unit = (3, 1) if kind == "3d" else (2, depth)
    q = round((tp / unit) ** (1 / power)) if power == 3 else isqrt(max(1, tp // unit))
    near = sorted({unit * side**power for side in (q - 1, q, q + 1) if side > 0}, key=lambda n: (abs(n - tp), n))
    what = {"2d": "a square", "2.5d": f"{depth} squares", "3d": "a cube"}[kind]
    return f"tp={tp} ranks with tensor.kind={kind} are not {what}; nearest: tp={near[0]}"


def sequences_fault(strategy: Strategy) -> str | None:
    """Whether the sequences of a micro-batch can be dealt out."""
    size, parts = strategy.micro_batch_size, strategy.grid.parts(strategy.grid.batch_axes)
    if size % parts == 0:
        return None
    near = max(1, round(size / parts)) * parts
    return (
        f"micro_batch_size={size} with tensor.kind={strategy.tensor.kind} on tp={strategy.tp}, which cuts it into "
        f"{parts}; nearest: micro_batch_size={near}"
    )


def sizes_fault(strategy: Strategy, model: ModelSpec) -> str | None:
    """Whether the grid divides hidden size, feed-forward width and the width of all heads."""
    if strategy.tensor.kind == "1d":
        return None
    q = strategy.grid.side
    by, name = (q * q, "q²") if strategy.tensor.kind == "3d" else (q, "q")
    for what, size in (
        ("hidden size", model.hidden_size),
        ("feed-forward width", model.ffn_size),
        ("width of all heads", model.heads_size),
    ):
        if size % by:
            return f"{name}={by} of tensor.kind={strategy.tensor.kind} does not divide the {what} {size}"
    return None


def company_fault(strategy: Strategy) -> str | None:
    """What cannot stand beside a grid."""
    kind = strategy.tensor.kind
    if kind == "1d":
        return None
    for name, is_set in (
        (f"sequence={strategy.sequence}", strategy.sequence != "none"),
        (f"context.degree={strategy.cp}", strategy.cp > 1),
        (f"tile={strategy.tile}", strategy.tile > 1),
    ):
        if is_set:
            return f"{name} with tensor.kind={kind}"
    return None


def cut(strategy: Strategy) -> tuple[str, int]:
    """What divides heads and columns: (`tp`, its size), or (`q`, the side of the grid)."""
    return ("tp", strategy.tp) if strategy.tensor.kind == "1d" else ("q", strategy.grid.side)
