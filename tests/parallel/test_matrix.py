"""Every legal small layout beside one process: losses, gradients, norms, weights, and bytes sent."""

from __future__ import annotations

from meshwright.core.plan import Plan
from meshwright.run.engine import make_mesh
from meshwright.run.parity import find_mismatch


def parity_on_rank(rank: int, world: int, plan: str) -> str | None:
    """The first mismatch that this rank sees, as text."""
    parsed = Plan.from_toml(plan)
    found = find_mismatch(parsed, make_mesh(parsed))
    return None if found is None else str(found)
