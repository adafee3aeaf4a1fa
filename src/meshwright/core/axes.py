"""The one place that spells mesh axis names.

An *axis* is an axis of the device mesh, a *dim* is a dim of a tensor. Ranks are laid out with the
axis that talks most innermost: ``rank = ((pp * DP + dp) * CP + cp) * TP + tp``.
"""

from __future__ import annotations

from collections.abc import Mapping

DP = "dp"
"""Data parallel: the ranks that hold the same box of every parameter and train on other sequences."""
CP = "cp"
"""Context parallel: the ranks that share the tokens of each sequence."""
TP = "tp"
"""Tensor parallel: the ranks that share each layer's heads, feed-forward columns and vocabulary rows."""
PP = "pp"
"""Pipeline parallel: the ranks that hold consecutive stages of layers."""

MESH_ORDER = (PP, DP, CP, TP)
"""Outermost first."""

DP_CP = "dp_cp"
"""The ranks of dp and cp together, where cp has more than one: all that hold the same box of every parameter."""

DP_NODE = "dp_node"
"""The ranks of one dp (× cp) group that lie on the same node."""

DP_ACROSS = "dp_across"
"""The ranks of one dp (× cp) group at the same position of every node."""

ETP = "etp"
"""Expert tensor parallel: neighbours among the ranks of a stage, which share each expert's width; without a choice of
its own those of tp."""
EP = "ep"
"""Expert parallel: ranks of a stage, as far apart as etp has ranks, which share the experts of every layer and exchange
tokens."""
EDP = "edp"
"""The ranks of a stage that hold the same part of the same experts."""

TP_KV = "tp_kv"
"""The ranks of one tp group that hold a replica of the same key/value heads (fewer than tp, or than a grid's side)."""

TP_ROW = "tp_row"
"""2D and 2.5D tensor parallelism: the ranks of one row of the grid."""
TP_COL = "tp_col"
"""The ranks of one column of the grid."""
TP_DEPTH = "tp_depth"
"""2.5D: the ranks at the same position of every grid."""

TP_INPUT = "tp_input"
"""3D tensor parallelism: the ranks that gather a first linear layer's input, and sum a second one's output."""
TP_WEIGHT = "tp_weight"
"""The ranks that gather a linear layer's weight."""
TP_OUTPUT = "tp_output"
"""The ranks that sum a first linear layer's output, and gather a second one's input."""

PP_ENDS = "pp_ends"
"""The pipeline ranks of the first and of the last stage, which share a tied embedding."""

PP_MIRROR = "pp_mirror"
"""The pipeline ranks r and p−1−r, which hold the same stages where a schedule has two directions."""

WORLD = "world"
"""All ranks of the run."""

HEADS_AXES = (TP_ROW, TP_INPUT)
"""Sub-axes of tp that cut heads."""

TENSOR_AXES = (TP_ROW, TP_COL, TP_DEPTH, TP_INPUT, TP_WEIGHT, TP_OUTPUT)
"""Sub-axes of tp."""

WHOLE_AXIS = {
    DP_CP: DP,
    DP_NODE: DP,
    DP_ACROSS: DP,
    EP: DP,
    EDP: DP,
    ETP: TP,
    TP_KV: TP,
    **dict.fromkeys(TENSOR_AXES, TP),
    PP_ENDS: PP,
    PP_MIRROR: PP,
}
"""Part of an axis → the axis; dp_cp → its outer one."""

ALL_AXES = (*MESH_ORDER, *WHOLE_AXIS, WORLD)


def rank_of(coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Global rank of mesh coordinates. An axis that is left out has one rank."""
    rank = 0
    for axis in MESH_ORDER:
        rank = rank * sizes.get(axis, 1) + coordinates.get(axis, 0)
    return rank


def is_first_device(coordinates: Mapping[str, int]) -> bool:
    """Whether a rank stands for its pipeline rank: the first on all other axes."""
    return all(coordinates.get(axis, 0) == 0 for axis in MESH_ORDER if axis != PP)


def coordinates_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Mesh coordinates of a global rank. An axis that is left out of `sizes` has one rank."""
    coordinates = {}
    for axis in reversed(MESH_ORDER):
        rank, coordinates[axis] = divmod(rank, sizes.get(axis, 1))
    return {axis: coordinates[axis] for axis in MESH_ORDER}
