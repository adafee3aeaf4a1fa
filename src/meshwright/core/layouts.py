"""How a model's tensors are cut besides by whole layers: kinds of tensor, sequence and context parallelism.

A kind of tensor parallelism lays the ranks of `tp` out as a grid, whose sub-axes have the names of `core.axes`
(rank = i·q + j, outermost first), and says which sub-axes cut each dim of a parameter and of a hidden state:

    kind   grid               linear [out, in]      second linear [out, in]   hidden state [b, s, h]
    1d     tp                 heads, ffn, vocab: tp, whichever side           whole (sequence="megatron": s by tp)
    2d     tp_col × tp_row    row | col             row | col                 b: col           h: row
    2.5d   tp_depth × 2d      row | col             row | col                 b: depth, col    h: row
    3d     output × input     input | output,       output | input,           b: weight,       h: output
             × weight           weight                weight                     input

A *second* linear takes what a first one has made (o, down): there input and output change roles (3d). A bias or a norm
is cut like what it is added to. Of several sub-axes on one dim the first is the outer cut.

Sources: Shoeybi et al. 2019 §3 (1d); Xu et al. 2021 (2d); Wang et al. 2021 (2.5d); Bian et al. 2021 (3d).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, prod
from typing import Literal

from pydantic import Field

from meshwright.core.axes import TP, TP_COL, TP_DEPTH, TP_INPUT, TP_OUTPUT, TP_ROW, TP_WEIGHT
from meshwright.core.model import ParamSpec
from meshwright.core.values import Value

TensorKind = Literal["1d", "2d", "2.5d", "3d"]
ContextKind = Literal["ring-self-attention", "ring", "ulysses"]
Balance = Literal["contiguous", "zigzag", "striped"]
SequenceKind = Literal["none", "megatron"]

INNER_DIMS = ("heads", "kv_heads", "ffn")
"""Dims between the first and the second linear of attention and MLP."""
CUT_BY_1D = ("vocab", *INNER_DIMS)
"""Dims that 1D tensor parallelism cuts. All others are whole on every rank of the tp axis."""


class Tensor(Value):
    """Which kind of tensor parallelism the ranks of `tp` do."""

    kind: TensorKind = "1d"
    """`1d`: heads, feed-forward and vocabulary; `2d`: blocks on a q × q grid; `2.5d`: `depth` such grids, each with
    its own sequences; `3d`: blocks on a q × q × q cube."""
    depth: int = Field(default=1, gt=0)
    """Grids of `2.5d`."""


class Context(Value):
    """How the tokens of a sequence are divided over ranks."""

    kind: ContextKind = "ring"
    """`ring-self-attention`: keys and values go round, whole rows of scores; `ring`: likewise, with an online softmax;
    `ulysses`: tokens are exchanged for heads."""
    degree: int = Field(default=1, gt=0)
    """Ranks that share each sequence."""
    balance: Balance = "contiguous"
    """Which tokens a rank has: neighbours; a piece from the front and its mirror from the back; or every so many."""


class Expert(Value):
    """How the experts of a layer are divided over ranks."""

    degree: int = Field(default=1, gt=0)
    """Ranks that share the experts of each layer: each has its own, and tokens travel."""
    tensor: int | None = Field(default=None, gt=0)
    """Ranks that share each expert's width, neighbours among all of a stage; None: those of tp."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a tp axis under a kind of tensor parallelism."""

    kind: TensorKind
    axes: tuple[tuple[str, int], ...]
    """Sub-axis and size, outermost first; their product is tp."""

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def side(self) -> int:
        """q: ranks along an edge of the square or the cube."""
        return self.axes[-1][1]

    def coordinates(self, index: int) -> dict[str, int]:
        """Sub-axis → position, of a position on tp."""
        found = {}
        for axis, size in reversed(self.axes):
            index, found[axis] = divmod(index, size)
        return found

    def dims(self, param: ParamSpec) -> tuple[tuple[str, ...], ...]:
        """For each dim of a parameter the sub-axes that cut it."""
        cut = _PARAMETER_CUTS[self.kind]
        kind = _kind_of(param)
        return tuple(cut(kind, side, dim) for side, dim in zip(_sides(param), param.dims, strict=True))

    def replicas(self, param: ParamSpec) -> tuple[str, ...]:
        """Sub-axes whose ranks hold the same box of a parameter."""
        used = {axis for axes in self.dims(param) for axis in axes}
        return tuple(axis for axis, size in self.axes if axis not in used and size > 1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Sub-axes that cut the sequences of a micro-batch, between the layers."""
        return _BATCH_AXES[self.kind]

    @property
    def hidden_axes(self) -> tuple[str, ...]:
        """Sub-axes that cut the hidden dim of a hidden state."""
        return _HIDDEN_AXES[self.kind]

    @property
    def vocab_axis(self) -> str:
        """The sub-axis that cuts the vocabulary of logits."""
        return _VOCAB_AXIS[self.kind]

    @property
    def heads_axis(self) -> str:
        """The sub-axis that cuts heads, between a first and a second linear."""
        return _VOCAB_AXIS[self.kind]

    @property
    def logit_axes(self) -> tuple[str, ...]:
        """Sub-axes that cut the sequences of logits, and of all that lies behind a first linear layer."""
        return _LOGIT_AXES[self.kind]

    def parts(self, axes: tuple[str, ...]) -> int:
        """Into how many parts these sub-axes cut a dim."""
        sizes = self.sizes
        return prod(sizes[axis] for axis in axes)


@lru_cache(maxsize=1024)
def grid(tensor: Tensor, tp: int) -> Grid:
    """The grid of `tp` ranks; sides are rounded down where `tp` is no square or cube (rule `tensor-grid`)."""
    if tensor.kind == "1d":
        return Grid("1d", ((TP, tp),))
    if tensor.kind == "3d":
        q = max(1, round(tp ** (1 / 3)))
        return Grid("3d", ((TP_OUTPUT, q), (TP_INPUT, q), (TP_WEIGHT, q)))
    depth = tensor.depth if tensor.kind == "2.5d" else 1
    q = max(1, isqrt(tp // depth))
    outer = ((TP_DEPTH, depth),) if tensor.kind == "2.5d" else ()
    return Grid(tensor.kind, (*outer, (TP_COL, q), (TP_ROW, q)))


def _kind_of(param: ParamSpec) -> str:
    """What a parameter is to the layout: a table of rows, a first or a second linear, or a vector of hidden size."""
    if "vocab" in param.dims or "position" in param.dims:
        return "table"
    return "second" if param.dims[-1] in INNER_DIMS and len(param.dims) > 1 else "first"


def _sides(param: ParamSpec) -> tuple[str, ...]:
    """`out` or `in` of each dim, `expert` of a stack. A bias lies as the output of its linear, a norm as the hidden
    state."""
    if len(param.dims) == 1:
        return ("hidden",) if param.dims[0] not in INNER_DIMS else ("out",)
    sides = ("out", "hidden" if "position" in param.dims else "in")
    return ("expert", *sides) if "experts" in param.dims else sides


def _cut_1d(kind: str, side: str, dim: str) -> tuple[str, ...]:
    return (TP,) if dim in CUT_BY_1D else ()


def _cut_2d(kind: str, side: str, dim: str) -> tuple[str, ...]:
    if dim in ("head_dim", "position", "experts"):
        return ()
    if kind == "table":  # [rows, hidden]: the hidden dim lies as in a hidden state
        return (TP_COL,) if dim == "vocab" else (TP_ROW,)
    return (TP_COL,) if side == "in" else (TP_ROW,)


def _cut_3d(kind: str, side: str, dim: str) -> tuple[str, ...]:
    if dim in ("head_dim", "position", "experts"):
        return ()
    if dim == "vocab":
        return (TP_INPUT,)
    if side == "hidden":
        return (TP_OUTPUT,)
    if side == "in":
        return (TP_INPUT, TP_WEIGHT) if kind == "second" else (TP_OUTPUT, TP_WEIGHT)
    return (TP_OUTPUT,) if kind == "second" else (TP_INPUT,)


_PARAMETER_CUTS = {"1d": _cut_1d, "2d": _cut_2d, "2.5d": _cut_2d, "3d": _cut_3d}
_BATCH_AXES: dict[TensorKind, tuple[str, ...]] = {
    "1d": (),
    "2d": (TP_COL,),
    "2.5d": (TP_DEPTH, TP_COL),
    "3d": (TP_WEIGHT, TP_INPUT),
}
_LOGIT_AXES: dict[TensorKind, tuple[str, ...]] = {**_BATCH_AXES, "3d": (TP_WEIGHT, TP_OUTPUT)}
_VOCAB_AXIS: dict[TensorKind, str] = {"1d": TP, "2d": TP_ROW, "2.5d": TP_ROW, "3d": TP_INPUT}
_HIDDEN_AXES: dict[TensorKind, tuple[str, ...]] = {"1d": (), "2d": (TP_ROW,), "2.5d": (TP_ROW,), "3d": (TP_OUTPUT,)}
