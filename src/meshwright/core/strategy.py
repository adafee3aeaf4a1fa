"""Strategy: one point of the search space, a frozen value. Rules that need the model, the cluster or
the job stand in :mod:`meshwright.core.rules`; a :class:`~meshwright.core.plan.Plan` cannot be built
around a strategy that breaks one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from itertools import accumulate
from math import lcm
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from meshwright.core.axes import CP, DP, DP_CP, PP, TP
from meshwright.core.cluster import ClusterSpec, Tier
from meshwright.core.errors import MeshwrightError
from meshwright.core.layouts import Context, Expert, Grid, SequenceKind, Tensor, grid
from meshwright.core.precision import RECIPES, Recipe
from meshwright.core.program import COMPUTE_KINDS, Kind
from meshwright.core.schedule import (
    FILE_SUFFIX,
    PipelineSize,
    Schedule,
    choices,
    find_schedule,
    own_schedule,
    schedules,
)
from meshwright.core.values import Value

Precision = Literal["fp32", "fp64", "bf16", "bf16-16", "bf16-20", "bf16-sr", "bf16-fp8", "fp16", "fp16-16"]


Recompute = Literal["none", "full", "selective"]


class Offload(Value):
    """What leaves the device between its uses, and where to (Ren et al. 2021; Rajbhandari et al. 2021)."""

    optimizer: Tier = "none"
    """Moments and master copies."""
    parameters: Tier = "none"
    """This rank's shard of the parameters; needs zero=3."""
    gradients: Tier = "none"
    """This rank's shard of the gradients; needs zero=2 or 3."""
    activations: Literal["none", "cpu"] = "none"
    """What layers keep for backward; each layer's comes back one layer ahead of its backward."""
    path: str | None = None
    """Folder of the disk tier, one of each node's own."""
    delayed: bool = False
    """Update with the gradients of the step before, while the next step runs."""
    group_numel: int = Field(default=2**20, ge=64)
    """Elements that are read, updated and written together; three such groups are in memory at a time."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Of the states."""
        return (self.optimizer, self.parameters, self.gradients)

    @property
    def all_tiers(self) -> tuple[Tier, ...]:
        return (*self.tiers, self.activations)

    @property
    def moves_states(self) -> bool:
        return any(tier != "none" for tier in self.tiers)

    @property
    def moves_activations(self) -> bool:
        return self.activations != "none"

    @property
    def is_used(self) -> bool:
        return self.moves_states or self.moves_activations


class Strategy(Value):
    """How a job is split over the ranks."""

    dp: int = Field(default=1, gt=0)
    """Data-parallel ranks: each trains on its own sequences."""
    tp: int = Field(default=1, gt=0)
    """Tensor-parallel ranks: they share every layer."""
    pp: int = Field(default=1, gt=0)
    """Pipeline ranks: each runs a stage of the layers, or several."""
    tensor: Tensor = Tensor()
    """What the ranks of tp do with each layer."""
    sequence: SequenceKind = "none"
    """`megatron` divides the tokens over tp between the layers' matrix products (with tensor.kind=1d)."""
    context: Context = Context()
    """How many ranks share the tokens of a sequence, and how."""
    expert: Expert = Expert()
    """Which ranks share the experts of a mixture."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 1 divides the optimizer's state over dp, 2 also the gradients, 3 also the parameters."""
    shard_over: Literal["all", "node"] = "all"
    """`node` divides over the dp ranks of one node, and keeps a copy on every node (hybrid sharding)."""
    keep_gathered: bool = False
    """With zero=3: keep a gathered block until the step ends, instead of gathering it again for backward."""
    reduce_each: bool = False
    """With zero=2 or 3 beside a pipeline: reduce gradients, and gather parameters, in each micro-batch: correct, lean
    and slow. Otherwise a pipeline's step keeps whole gradients and gathered parameters, and does both once."""
    prefetch: int = Field(default=1, ge=0)
    """With zero=3: blocks that are gathered ahead of the one that runs."""
    ranks_per_node: int | None = Field(default=None, gt=0)
    """Ranks of a node, where collectives over dp go in two levels, inside the nodes and across; None: in one.
    A plan takes it from its cluster."""
    tile: int = Field(default=1, gt=0)
    """Linear layers run in so many tiles, one after the other; with zero=3 a tile is gathered at a time."""
    offload: Offload = Offload()
    """What leaves the device between its uses."""
    schedule: str = "1f1b"
    """Order of forwards and backwards: one of the files in `schedule/orders`, or a table of one's own (`mine.csv`)."""
    num_chunks: int = Field(default=1, gt=0)
    """Stages of each pipeline rank, where the schedule leaves the choice."""
    micro_batch_size: int = Field(default=1, gt=0)
    """Sequences per micro-batch and data-parallel rank."""
    num_micro_batches: int = Field(default=1, gt=0)
    """Micro-batches per step and data-parallel rank; also gradient accumulation when pp = 1."""
    recompute: Recompute = "none"
    """`full` keeps a layer's input alone and runs the layer again in backward; `selective` keeps q, k and v, and runs
    attention's core again (scores, softmax, values), whose output and log-sum-exp it does not keep."""
    recompute_layers: int | None = Field(default=None, gt=0)
    """With recompute: only the first so many layers of each stage; None: all."""
    recompute_group: int = Field(default=1, gt=0)
    """With recompute=full: so many layers in a row are kept by the input of the first alone, and run again together."""
    precision: Precision = "fp32"
    """Byte recipe: the dtype of parameters, gradients and optimizer state."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each part that the pipeline cuts the model into, in order: of every stage, also where a rank has
    several. None splits them evenly, extra layers to the inner parts."""
    bucket_bytes: int = Field(default=25 * 2**20, gt=0)
    """Cap of one gradient bucket. With zero=2 and 3 a bucket is one block of the model."""

    @field_validator("schedule")
    @classmethod
    def _known(cls, name: str) -> str:
        if name.endswith(FILE_SUFFIX):
            try:
                own_schedule(name)
            except MeshwrightError as error:
                raise PydanticCustomError("schedule", "{fault}", {"fault": str(error)}) from None
        elif name not in schedules():
            raise PydanticCustomError("schedule", f"no such schedule; {choices()}")
        return name

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis name → size."""
        return {PP: self.pp, DP: self.dp, CP: self.cp, TP: self.tp}

    @property
    def cp(self) -> int:
        """Context-parallel ranks: they share the tokens of each sequence."""
        return self.context.degree

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same parameters and see other tokens: of dp and cp together."""
        return self.dp * self.cp

    @property
    def data_axis(self) -> str:
        """Their axis."""
        return DP if self.cp == 1 else DP_CP

    @property
    def ep(self) -> int:
        """Ranks that share the experts of a layer."""
        return self.expert.degree

    @property
    def et(self) -> int:
        """Ranks that share each expert's width."""
        return self.expert.tensor or self.tp

    @property
    def spreads_experts(self) -> bool:
        """Whether experts lie on the ranks of a stage otherwise than the layers' other parts do."""
        return self.ep > 1 or self.et != self.tp

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that hold the same part of the same experts."""
        return max(1, self.data_ranks * self.tp // (self.ep * self.et))

    @property
    def sequences_together(self) -> int:
        """So many times its own sequences have tokens on the ranks that share an expert's width."""
        return -(-self.et // (self.cp * self.tp))

    @property
    def expert_dp(self) -> int:
        """Data-parallel ranks that the experts need at least."""
        return self.ep * max(1, self.et // self.tp)

    @property
    def bucket_multiple(self) -> int:
        """What a bucket's length is a multiple of, so that all that may divide it do so evenly."""
        return self.data_ranks if self.et == self.tp else lcm(self.data_ranks, self.expert_replicas)

    def expert_position(self, at: Mapping[str, int]) -> tuple[int, int, int]:
        """(edp, ep, etp) of the rank at mesh coordinates `at`: its stage's ranks in order, etp innermost."""
        rest, etp = divmod(self.data_index(at) * self.tp + at.get(TP, 0), self.et)
        return *divmod(rest, self.ep), etp

    def shard_index(self, at: Mapping[str, int], is_spread: bool = False) -> int:
        """Position among the ranks that hold the same parameters, or, if `is_spread`, the same experts."""
        return self.expert_position(at)[0] if is_spread else self.data_index(at)

    def data_index(self, at: Mapping[str, int]) -> int:
        """Position on :attr:`data_axis` of the rank at mesh coordinates `at`."""
        return at[DP] * self.cp + at.get(CP, 0)

    @cached_property
    def grid(self) -> Grid:
        """How the ranks of tp lie."""
        return grid(self.tensor, self.tp)

    @cached_property
    def hidden_parts(self) -> tuple[int, int, int]:
        """Into how many parts a hidden state [b, s, h] is cut between the layers, along each dim."""
        grid = self.grid
        in_s = self.cp * (self.tp if self.sequence == "megatron" else 1)
        return grid.parts(grid.batch_axes), in_s, grid.parts(grid.hidden_axes)

    @property
    def token_parts(self) -> int:
        """What the tokens of a sequence must be a multiple of, so that ranks can divide them."""
        pieces = 2 * self.cp if self.cp > 1 and self.context.balance == "zigzag" else 1
        by_block = 1 if self.et == self.tp else self.cp * self.tp
        return lcm(self.hidden_parts[1], pieces, by_block)

    @property
    def dp_local(self) -> int:
        """How many ranks of each dp (× cp) group share a node: all, where a plan has not set `ranks_per_node`, or they
        don't lie evenly on the nodes."""
        per_node, block = self.ranks_per_node, self.data_ranks * self.tp
        if per_node is None or per_node % self.tp or block % per_node:
            return self.data_ranks
        return per_node // self.tp

    def on(self, cluster: ClusterSpec) -> Strategy:
        """The same strategy, told how the cluster's ranks lie on its nodes.

        NCCL goes in two levels by itself; so only gloo, or sharding over a node, is told.
        """
        knows = cluster.num_nodes > 1 and (cluster.backend == "gloo" or self.shard_over == "node")
        per_node = cluster.devices_per_node if knows else None
        return self if self.ranks_per_node == per_node else self.model_copy(update={"ranks_per_node": per_node})

    @cached_property
    def recipe(self) -> Recipe:
        return RECIPES[self.precision]

    @cached_property
    def pipeline_schedule(self) -> Schedule:
        """What the schedule of that name declares; of a file, as it was when this was first asked."""
        return find_schedule(self.schedule)

    @property
    def schedule_file(self) -> Path | None:
        """Of a table of one's own."""
        return Path(self.schedule) if self.schedule.endswith(FILE_SUFFIX) else None

    @cached_property
    def stages_per_rank(self) -> int:
        """The schedule's own number, or `num_chunks` where it leaves the choice."""
        return self.pipeline_schedule.chunks or self.num_chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of inputs and of weights apart."""
        return _splits_backward(self.pipeline_schedule, self.pipeline)

    @property
    def forwards_first(self) -> bool:
        """Whether every rank runs all forwards of a step before its first backward."""
        return self.num_micro_batches == 1 or _forwards_first(self.pipeline_schedule, self.pipeline)

    @cached_property
    def pipeline(self) -> PipelineSize:
        """What the timetable is made for."""
        return PipelineSize(self.pp, self.num_micro_batches, self.stages_per_rank)

    @property
    def num_updates(self) -> int:
        """Updates of each stage's weights in a step: 1, or as many as the asynchronous table has of a step."""
        schedule = self.pipeline_schedule
        return _num_updates(schedule, self.pipeline) if schedule.is_asynchronous else 1

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced in each micro-batch, so that only shards of them add up."""
        return self.zero >= 2 and (self.pp == 1 or self.reduce_each)

    @property
    def keeps_gathered(self) -> bool:
        """Whether a block stays gathered from its first use in a step to its last."""
        return self.zero == 3 and (self.keep_gathered or not self.reduces_each)

    @property
    def keeps_operands(self) -> bool:
        """Whether a cube of several ranks keeps what its linear layers gather in forward until their backward, instead
        of gathering again: always, but where the core of attention is all that shall come back (recompute=selective).
        """
        return self.tensor.kind == "3d" and self.tp > 1 and self.recompute != "selective"

    @cached_property
    def num_parts(self) -> int:
        """Parts that the model is cut into; each is one stage, or one in each direction."""
        schedule = self.pipeline_schedule
        return max(1, self.pp * (schedule.chunks or self.num_chunks) // schedule.num_directions)

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        schedule = self.pipeline_schedule
        chunks = schedule.chunks or self.num_chunks
        return _stage_ranks(schedule.stage_ranks, PipelineSize(self.pp, self.num_micro_batches, chunks))

    @property
    def end_ranks(self) -> tuple[int, int]:
        """Pipeline ranks of the first and of the last stage; one rank where stages go down and up again."""
        ranks = self.stage_ranks
        return ranks[0], ranks[self.num_parts - 1]

    def rank_stages(self, rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, ascending."""
        return self.stages_by_rank[rank]

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each pipeline rank, ascending."""
        return _by_rank(self.stage_ranks, self.pp)

    def stage_ends(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage is the first, and whether it is the last that a micro-batch passes."""
        num_parts = self.num_parts
        return stage % num_parts == 0, stage % num_parts == num_parts - 1

    @property
    def micro_batches_per_stage(self) -> int:
        """Micro-batches that pass each stage in a step: all, or those of its direction."""
        return self.num_micro_batches // self.pipeline_schedule.num_directions

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """Global layer indices of each stage, in order. A second direction has the same parts again."""
        counts = self.layers_per_stage or split_layers(num_layers, self.num_parts)
        return _ranges(counts) * self.pipeline_schedule.num_directions

    def num_recomputed(self, num_layers: int) -> int:
        """Layers that a stage of `num_layers` runs again in backward, in whole or in part: its first ones."""
        if self.recompute == "none":
            return 0
        return num_layers if self.recompute_layers is None else min(num_layers, self.recompute_layers)

    def recompute_groups(self, layers: range) -> tuple[range, ...]:
        """The layers of a stage that are run again, those together that are run again together."""
        again = layers[: self.num_recomputed(len(layers))]
        return tuple(again[at : at + self.recompute_group] for at in range(0, len(again), self.recompute_group))

    def describe(self) -> str:
        """Short name, for tables: `D2 T2 P2 zero1 1f1b m8×b1`; several stages per rank as `interleaved-1f1b v2`."""
        chunks = f" v{self.num_chunks}" if self.num_chunks > 1 else ""
        has_order = self.pp > 1 or self.pipeline_schedule.is_asynchronous
        schedule = f" {self.schedule}{chunks}" if has_order else ""
        batch = f" m{self.num_micro_batches}×b{self.micro_batch_size}"
        zero = f"zero{self.zero}{self._zero_choices()}"
        degrees = f"D{self.dp}{self._expert()}{self._context()} T{self.tp}{self._tensor()} P{self.pp}"
        return f"{degrees} {zero}{schedule}{batch}{self._recompute()} {self.precision}"

    def _recompute(self) -> str:
        """` recompute`, ` selective first 2`, ` recompute by 3`."""
        if self.recompute == "none":
            return ""
        first = f" first {self.recompute_layers}" if self.recompute_layers else ""
        together = f" by {self.recompute_group}" if self.recompute_group > 1 else ""
        return (" recompute" if self.recompute == "full" else " selective") + first + together

    def _expert(self) -> str:
        """` E4`, ` E4 by 1` where an expert's width is cut otherwise than tp cuts."""
        if not self.spreads_experts:
            return ""
        return f" E{self.ep}" + (f" by {self.et}" if self.et != self.tp else "")

    def _context(self) -> str:
        """` C4 ring zigzag`."""
        return f" C{self.cp} {self.context.kind} {self.context.balance}" if self.cp > 1 else ""

    def _tensor(self) -> str:
        """What differs from the default: ` 2d`, ` sp`."""
        kind = f" {self.tensor.kind}" if self.tensor.kind != "1d" else ""
        return kind + (" sp" if self.sequence == "megatron" else "")

    def _zero_choices(self) -> str:
        """What differs from the default: ` node kept tile2 offload`."""
        words = (
            ("node", self.shard_over == "node"),
            ("kept", self.keep_gathered),
            ("each", self.reduce_each),
            (f"tile{self.tile}", self.tile > 1),
            ("offload", self.offload.is_used),
        )
        return "".join(f" {word}" for word, holds in words if holds)


@lru_cache(maxsize=256)
def _splits_backward(schedule: Schedule, size: PipelineSize) -> bool:
    """Seen in a small timetable where there is one: a planner asks of large ones by the thousand."""
    small = PipelineSize(min(2, size.num_ranks), 4, size.num_chunks)
    seen = size if schedule.fault is not None and schedule.fault(small) is not None else small
    return any(action.kind is Kind.W for row in schedule.order(seen) for action in row)


@lru_cache(maxsize=256)
def _forwards_first(schedule: Schedule, size: PipelineSize) -> bool:
    """As :func:`_splits_backward`, seen in a small timetable."""
    small = PipelineSize(min(2, size.num_ranks), 4, size.num_chunks)
    seen = size if schedule.fault is not None and schedule.fault(small) is not None else small
    rows = ([action.kind is Kind.F for action in row if action.kind in COMPUTE_KINDS] for row in schedule.order(seen))
    return all(row == sorted(row, reverse=True) for row in rows)


@lru_cache(maxsize=256)
def _num_updates(schedule: Schedule, size: PipelineSize) -> int:
    return sum(action.kind is Kind.UPDATE for action in schedule.order(size)[0])


@lru_cache(maxsize=4096)
def _ranges(counts: tuple[int, ...]) -> tuple[range, ...]:
    """What follows one another, so many at a time."""
    return tuple(range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True))


@lru_cache(maxsize=4096)
def _by_rank(stage_ranks: tuple[int, ...], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(stage_ranks):
        found[rank].append(stage)
    return tuple(map(tuple, found))


@lru_cache(maxsize=4096)
def _stage_ranks(place: Callable[[PipelineSize], tuple[int, ...]], size: PipelineSize) -> tuple[int, ...]:
    """A planner asks for the same ones thousands of times."""
    return place(size)


def inner_stages_first(num_stages: int) -> tuple[int, ...]:
    """Stages in the order in which they take further layers: the ends hold embedding and head already."""
    return tuple(dict.fromkeys((*range(1, num_stages - 1), 0, num_stages - 1)))


@lru_cache(maxsize=4096)
def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Even split; extra layers go to inner stages first."""
    base, extra = divmod(num_layers, num_stages)
    bonus = set(inner_stages_first(num_stages)[:extra])
    return tuple(base + (stage in bonus) for stage in range(num_stages))
