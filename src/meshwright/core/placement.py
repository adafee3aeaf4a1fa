"""Placement: which box of each logical parameter a rank holds, and what its gradient still lacks.

Everything that must know where a parameter lives reads this one table: initialisation, loading,
gradient reduction, the gradient norm, checkpoints, export and the memory forecast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from meshwright.core.axes import ETP, PP, PP_ENDS, PP_MIRROR, TP, TP_KV
from meshwright.core.layouts import CUT_BY_1D, Grid
from meshwright.core.model import ModelSpec, ParamSpec
from meshwright.core.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular piece of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Placement:
    """One logical parameter as one rank holds it. Every placement is replicated over dp and cp, or over edp."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    box: Box
    part: str
    layer: int | None
    sum_over: tuple[str, ...]
    """Axes besides dp and cp over which this rank's gradient is partial and must be summed."""
    owned: bool
    """True on exactly one of the replicas outside dp and cp: the one that the norm counts and a checkpoint saves."""
    tile: int | None = None
    """Which tile of the parameter's rows on this rank, where it is held in tiles."""
    stages: tuple[int, ...] = (0,)
    """Pipeline stages of this rank that use it, ascending: two where it holds both ends of a tied embedding."""
    is_spread: bool = False
    """Whether it is divided over ep and etp: then it is replicated over edp only."""

    @property
    def key(self) -> str:
        """Names what a rank holds: the parameter, or one tile of it."""
        return self.name if self.tile is None else f"{self.name}[{self.tile}]"

    @property
    def decay(self) -> bool:
        """Weight decay applies to matrices, not to biases and norms."""
        return len(self.shape) > 1


def even_split(total: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, size) of part `index` of a balanced split; the first parts take the remainder."""
    base, extra = divmod(total, parts)
    return index * base + min(index, extra), base + (index < extra)


def nested_split(total: int, cuts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(offset, size) after balanced splits into (parts, index), the outer one first."""
    offset, size = 0, total
    for parts, index in cuts:
        further, size = even_split(size, parts, index)
        offset += further
    return offset, size


def kv_replicas(spec: ModelSpec, tp: int) -> int:
    """How many ranks of a tp group hold the same key/value heads: more than 1 where tp exceeds these heads."""
    return max(1, tp // spec.num_kv_heads)


def kv_group(spec: ModelSpec, strategy: Strategy) -> int:
    """Ranks of each group of axis `tp_kv`: neighbours along the axis that cuts heads, which on a grid is a side."""
    return kv_replicas(spec, strategy.grid.side)


def dim_range(spec: ModelSpec, dim: str, size: int, tp: int, index: int) -> tuple[int, int]:
    """(offset, size) along a named dim that rank `index` of the tp axis holds, in 1D tensor parallelism; of key/value
    heads also that of a grid's axis that cuts heads."""
    if dim not in CUT_BY_1D:
        return 0, size
    if dim == "kv_heads":
        replicas = kv_replicas(spec, tp)
        return even_split(size, tp // replicas, index // replicas)
    return even_split(size, tp, index)


def largest_part(spec: ModelSpec, dim: str, size: int, tp: int) -> int:
    """Length along a named dim that the first rank of a tp axis holds; no rank holds more."""
    return dim_range(spec, dim, size, tp, 0)[1]


def param_box(spec: ModelSpec, param: ParamSpec, grid: Grid, index: int) -> Box:
    """The box of `param` that rank `index` of a tp axis, laid out as `grid`, holds."""
    if grid.kind == "1d":
        tp = grid.side
        ranges = [dim_range(spec, dim, size, tp, index) for dim, size in zip(param.dims, param.shape, strict=True)]
    else:
        at = grid.coordinates(index)
        ranges = []
        for dim, size, axes in zip(param.dims, param.shape, grid.dims(param), strict=True):
            cuts = [(grid.sizes[axis], at[axis]) for axis in axes]
            ranges.append(dim_range(spec, dim, size, *cuts[0]) if dim == "kv_heads" else nested_split(size, cuts))
    return Box(tuple(offset for offset, _ in ranges), tuple(size for _, size in ranges))


def _is_used(spec: ModelSpec, param: ParamSpec, ends: tuple[bool, bool]) -> bool:
    """Whether a stage that is the (first, last) of its direction uses a `param` outside of the layers."""
    first, last = ends
    if param.name == "embedding.weight" and spec.tied_embeddings:
        return first or last
    return first if param.part == "embedding" or param.name.startswith("embedding_norm") else last


def _partial_axes(spec: ModelSpec, param: ParamSpec, strategy: Strategy, is_mirrored: bool) -> tuple[str, ...]:
    axes: list[str] = []
    if strategy.tp > 1 and not is_spread(param, strategy):
        is_partial = "head_dim" in param.dims or strategy.tensor.kind != "1d" or strategy.sequence == "megatron"
        if is_partial:  # q/k norms see only the local heads; the others of these kinds only a part of the tokens
            axes += strategy.grid.replicas(param)
        if _has_kv_replicas(spec, param, strategy):
            axes.append(TP_KV)
    if is_mirrored:
        axes.append(PP_MIRROR)
    elif _is_tied(spec, param) and strategy.end_ranks[0] != strategy.end_ranks[1]:
        axes.append(PP_ENDS)
    return tuple(axes)


def _has_kv_replicas(spec: ModelSpec, param: ParamSpec, strategy: Strategy) -> bool:
    return "kv_heads" in param.dims and kv_group(spec, strategy) > 1


def _is_tied(spec: ModelSpec, param: ParamSpec) -> bool:
    return spec.tied_embeddings and param.name == "embedding.weight"


def _is_owned(spec: ModelSpec, param: ParamSpec, strategy: Strategy, at: Mapping[str, int], is_mirrored: bool) -> bool:
    if is_mirrored:
        if at[PP] >= strategy.pp / 2:
            return False
    elif _is_tied(spec, param) and at[PP] != strategy.end_ranks[0]:
        return False
    if is_spread(param, strategy):
        return True
    grid = strategy.grid
    positions = grid.coordinates(at[TP])
    if _has_kv_replicas(spec, param, strategy) and positions[grid.heads_axis] % kv_group(spec, strategy):
        return False
    return all(positions[axis] == 0 for axis in grid.replicas(param))


def placements(spec: ModelSpec, strategy: Strategy, at: Mapping[str, int]) -> tuple[Placement, ...]:
    """What the rank at mesh coordinates `at` holds, in forward order.

    Source: Shoeybi et al. 2019, §3 (tensor); Narayanan et al. 2021, §2 (pipeline).
    """
    layers = strategy.stage_layers(spec.num_layers)
    own = strategy.rank_stages(at[PP])
    ends = {stage: strategy.stage_ends(stage) for stage in own}
    of_layer = {layer: (stage,) for stage in own for layer in layers[stage]}
    known: dict[tuple[object, ...], _Held] = {}
    found: list[Placement] = []
    for param in spec.parameters():
        if param.layer is None:
            stages = tuple(stage for stage in own if _is_used(spec, param, ends[stage]))
        else:
            stages = of_layer.get(param.layer, ())
        if not stages:
            continue
        kind = param.shape, param.dims, param.layer is None and param.name
        held = known.get(kind)
        if held is None:
            held = known[kind] = _held(spec, param, strategy, at)
        for tile, box in held.tiles:
            found.append(
                Placement(
                    name=param.name,
                    shape=param.shape,
                    box=box,
                    part=param.part,
                    layer=param.layer,
                    sum_over=held.sum_over,
                    owned=held.owned,
                    tile=tile,
                    stages=stages,
                    is_spread=held.is_spread,
                )
            )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Held:
    """What is the same of a parameter in every layer."""

    tiles: tuple[tuple[int | None, Box], ...]
    sum_over: tuple[str, ...]
    owned: bool
    is_spread: bool


def _held(spec: ModelSpec, param: ParamSpec, strategy: Strategy, at: Mapping[str, int]) -> _Held:
    is_mirrored = strategy.pipeline_schedule.num_directions > 1
    return _Held(
        tiles=tuple(_tiles(param, _own_box(spec, param, strategy, at), strategy.tile)),
        sum_over=_partial_axes(spec, param, strategy, is_mirrored),
        owned=_is_owned(spec, param, strategy, at, is_mirrored),
        is_spread=is_spread(param, strategy),
    )


def is_spread(param: ParamSpec, strategy: Strategy) -> bool:
    """Whether the ranks of ep and etp divide a parameter: a matrix of all experts."""
    return strategy.spreads_experts and "experts" in param.dims


def _own_box(spec: ModelSpec, param: ParamSpec, strategy: Strategy, at: Mapping[str, int]) -> Box:
    if not is_spread(param, strategy):
        return param_box(spec, param, strategy.grid, at[TP])
    _, ep, etp = strategy.expert_position(at)
    box = param_box(spec, param, Grid("1d", ((ETP, strategy.et),)), etp)
    first, count = even_split(box.sizes[0], strategy.ep, ep)
    return Box((first, *box.offsets[1:]), (count, *box.sizes[1:]))


def is_tiled(param: ParamSpec) -> bool:
    """Whether it is the weight of a linear layer that can run in tiles: of a layer's, or of an untied head. A router's
    few rows stay whole."""
    if param.part == "router":
        return False
    return len(param.shape) == 2 and (param.layer is not None or param.part == "head")


def _tiles(param: ParamSpec, box: Box, num_tiles: int) -> Iterator[tuple[int | None, Box]]:
    """A box cut into tiles of rows, as even as can be (Rajbhandari et al. 2021, §5.1.3)."""
    if num_tiles == 1 or not is_tiled(param):
        yield None, box
        return
    for tile in range(num_tiles):
        offset, rows = even_split(box.sizes[0], num_tiles, tile)
        yield tile, Box((box.offsets[0] + offset, *box.offsets[1:]), (rows, *box.sizes[1:]))
