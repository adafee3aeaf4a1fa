"""The one place that spells mesh axis names.

An *axis* is an axis of the device mesh, a *dim* is a dim of a tensor. Ranks are laid out with the
axis that talks most innermost: ``rank = (pp * DP + dp) * TP + tp``.
"""

from __future__ import annotations

from collections.abc import Mapping

DP = "dp"
"""Data parallel: the ranks that hold the same box of every parameter and train on other sequences."""
TP = "tp"
"""Tensor parallel: the ranks that share each layer's heads, feed-forward columns and vocabulary rows."""
PP = "pp"
"""Pipeline parallel: the ranks that hold consecutive stages of layers."""

MESH_ORDER = (PP, DP, TP)
"""Outermost first."""

DP_NODE = "dp_node"
"""The ranks of one dp group that lie on the same node."""

DP_ACROSS = "dp_across"
"""The ranks of one dp group at the same position of every node."""

TP_KV = "tp_kv"
"""The ranks of one tp group that hold a replica of the same key/value heads (kv heads < tp)."""

PP_ENDS = "pp_ends"
"""The pipeline ranks of the first and of the last stage, which share a tied embedding."""

PP_MIRROR = "pp_mirror"
"""The pipeline ranks r and p−1−r, which hold the same stages where a schedule has two directions."""

WORLD = "world"
"""All ranks of the run."""

WHOLE_AXIS = {DP_NODE: DP, DP_ACROSS: DP, TP_KV: TP, PP_ENDS: PP, PP_MIRROR: PP}
"""Part of an axis → the axis."""

ALL_AXES = (*MESH_ORDER, *WHOLE_AXIS, WORLD)


def rank_of(coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Global rank of mesh coordinates."""
    rank = 0
    for axis in MESH_ORDER:
        rank = rank * sizes[axis] + coordinates[axis]
    return rank


def coordinates_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Mesh coordinates of a global rank."""
    coordinates = {}
    for axis in reversed(MESH_ORDER):
        rank, coordinates[axis] = divmod(rank, sizes[axis])
    return {axis: coordinates[axis] for axis in MESH_ORDER}
