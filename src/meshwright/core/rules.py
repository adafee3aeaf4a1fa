"""The one table of what is legal. Read by the planner, the runtime and the documentation.

Each rule says what it needs, why, and tests a strategy against model, cluster and job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core import context_rules
from meshwright.core.cluster import ClusterSpec
from meshwright.core.expert_rules import balance, expert_degree, experts
from meshwright.core.grid_rules import company_fault, cut, grid_fault, sequences_fault, sizes_fault
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.placement import is_tiled, param_box
from meshwright.core.strategy import Strategy
from meshwright.core.units import counted


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a rule may look at."""

    strategy: Strategy
    model: ModelSpec
    cluster: ClusterSpec
    job: Job


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. `broken` returns the numbers that break it, or None."""

    id: str
    needs: str
    why: str
    broken: Callable[[Case], str | None]


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a case breaks, with the numbers."""

    rule: Rule
    numbers: str

    def __str__(self) -> str:
        return f"{self.numbers} (rule `{self.rule.id}`: {self.rule.needs}, because {self.rule.why})"


def _divides(what: str, total: int, axis: str, degree: int) -> str | None:
    return f"{axis}={degree} does not divide {what} {total}" if total % degree else None


def _world(c: Case) -> str | None:
    s, have = c.strategy, c.cluster.num_devices
    if s.world_size == have:
        return None
    needed = counted(s.world_size, "rank")
    context = f" × context.degree={s.cp}" if s.cp > 1 else ""
    return f"dp={s.dp}{context} × tp={s.tp} × pp={s.pp} = {needed}, but cluster `{c.cluster.name}` has {have}"


def _kv(c: Case) -> str | None:
    kv, (name, parts) = c.model.num_kv_heads, cut(c.strategy)
    return f"{name}={parts} and {kv} key/value heads: neither divides the other" if kv % parts and parts % kv else None


def _ffn(c: Case) -> str | None:
    model, (name, tp) = c.model, cut(c.strategy)
    by = (name, tp) if c.strategy.et == c.strategy.tp else ("expert.tensor", c.strategy.et)
    widths = (
        ("the experts' width", model.expert_size, *by),
        ("the shared experts' width", model.shared_ffn_size or tp, name, tp),
    )
    all_widths = (("the feed-forward width", model.ffn_size, name, tp), *(widths if model.num_experts else ()))
    return next((fault for each in all_widths if (fault := _divides(*each)) is not None), None)


def _latent(c: Case) -> str | None:
    kind = c.strategy.tensor.kind
    return f"`{c.model.name}` has latent attention: tensor.kind={kind}" if c.model.latent and kind != "1d" else None


def _vocab(c: Case) -> str | None:
    rows, tp = c.model.vocab_size, c.strategy.tp
    return f"tp={tp} is more than the {rows} rows of the vocabulary" if tp > rows else None


def _sequence(c: Case) -> str | None:
    s, length = c.strategy, c.job.seq_length
    if s.sequence == "none":
        return None
    if s.tensor.kind != "1d":
        return f"sequence={s.sequence} with tensor.kind={s.tensor.kind}"
    if s.tile > 1:
        return f"sequence={s.sequence} with tile={s.tile}"
    return (
        _divides("the tokens of a sequence", length, "tp", s.tp)
        if s.cp == 1
        else _divides("the tokens of a sequence", length, "context.degree × tp", s.cp * s.tp)
    )


def _dropout(c: Case) -> str | None:
    for name, rate in (("dropout", c.job.dropout), ("attention_dropout", c.job.attention_dropout)):
        if rate and c.strategy.pipeline_schedule.is_asynchronous:
            return f"{name}={rate:g} with schedule={c.strategy.schedule}"
    return None


def _recompute(c: Case) -> str | None:
    s = c.strategy
    for name, is_set, without in (
        (f"recompute_layers={s.recompute_layers}", s.recompute_layers is not None, s.recompute == "none"),
        (f"recompute_group={s.recompute_group}", s.recompute_group > 1, s.recompute != "full"),
    ):
        if is_set and without:
            return f"{name} with recompute={s.recompute}"
    if s.recompute_group > 1 and s.zero == 3:
        return f"recompute_group={s.recompute_group} with zero=3"
    if s.tile > 1 and (s.recompute == "selective" or s.recompute_layers is not None):
        return f"{'recompute=selective' if s.recompute == 'selective' else 'recompute_layers'} with tile={s.tile}"
    return None


def _layers(c: Case) -> str | None:
    parts, layers = c.strategy.num_parts, c.model.num_layers
    return f"{_parts(c)} is more than the {counted(layers, 'layer')}" if parts > layers else None


def _parts(c: Case) -> str:
    """`pp=4`, or what it is multiplied by: the parts that the model is cut into."""
    s = c.strategy
    return f"pp={s.pp}" if s.num_parts == s.pp else f"pp={s.pp} × {s.num_parts // s.pp} stages per rank = {s.num_parts}"


def _layer_list(c: Case) -> str | None:
    counts, layers = c.strategy.layers_per_stage, c.model.num_layers
    if counts is None or (len(counts) == c.strategy.num_parts and sum(counts) == layers and min(counts) > 0):
        return None
    return f"layers_per_stage={list(counts)} for {_parts(c)} and {counted(layers, 'layer')}"


def _chunks(c: Case) -> str | None:
    s, own = c.strategy, c.strategy.pipeline_schedule.chunks
    if own is None or s.num_chunks == 1:
        return None
    return f"num_chunks={s.num_chunks} with schedule={s.schedule}, which puts {counted(own, 'stage')} on a rank"


def _timetable(c: Case) -> str | None:
    schedule = c.strategy.pipeline_schedule
    fault = schedule.fault(c.strategy.pipeline) if schedule.fault else None
    return fault and f"schedule={schedule.name}: {fault}"


def _asynchronous(c: Case) -> str | None:
    s = c.strategy
    if not s.pipeline_schedule.is_asynchronous:
        return None
    for name, is_set, instead in (
        (f"zero={s.zero}", s.zero > 0, "zero=0"),
        (f"precision={s.precision}", s.recipe.scales_loss, "bf16"),
        (f"tied embeddings of `{c.model.name}` over pp={s.pp}", c.model.tied_embeddings and s.pp > 1, "pp=1"),
        (f"offload.optimizer={s.offload.optimizer}", s.offload.moves_states, "no offload of states"),
    ):
        if is_set:
            return f"{name} with schedule={s.schedule}; take {instead}, or schedule=1f1b"
    return None


def _batch(c: Case) -> str | None:
    s, batch = c.strategy, c.job.global_batch_size
    product = s.dp * s.num_micro_batches * s.micro_batch_size
    if product == batch:
        return None
    return (
        f"dp={s.dp} × num_micro_batches={s.num_micro_batches} × micro_batch_size={s.micro_batch_size} "
        f"= {counted(product, 'sequence')}, but the job's global batch has {batch}"
    )


def _positions(c: Case) -> str | None:
    length, limit = c.job.seq_length, c.model.max_positions
    if c.model.positions != "learned" or length <= limit:
        return None
    return f"seq_length={length} is more than the {limit} learned positions of `{c.model.name}`"


def _zero_choices(c: Case) -> str | None:
    s = c.strategy
    for name, is_set, needed in (
        ("shard_over=node", s.shard_over == "node", 1),
        ("offload.gradients", s.offload.gradients != "none", 2),
        ("offload.parameters", s.offload.parameters != "none", 3),
        ("keep_gathered", s.keep_gathered, 3),
        ("reduce_each", s.reduce_each, 2),
        (f"prefetch={s.prefetch}", s.prefetch != 1, 3),
    ):
        if is_set and s.zero < needed:
            return f"{name} with zero={s.zero}, which needs zero={needed}{' or more' if needed < 3 else ''}"
    if s.offload.gradients != "none" and not s.reduces_each:
        return f"offload.gradients beside a pipeline, pp={s.pp}, without reduce_each, so that they are kept whole"
    if s.reduce_each and s.pp == 1:
        return "reduce_each with pp=1, where every micro-batch reduces in any case"
    return None


def _split_reduction(c: Case) -> str | None:
    s = c.strategy
    if not s.reduces_each or _timetable(c) is not None:
        return None
    numbers = f"zero={s.zero} {'and reduce_each' if s.reduce_each else 'and pp=1'} with schedule={s.schedule}, which"
    if s.pipeline_schedule.num_directions > 1:
        return f"{numbers} has two directions"
    return f"{numbers} splits backwards" if s.splits_backward else None


def _tile_zero(c: Case) -> str | None:
    s = c.strategy
    if s.tile == 1 or (s.zero == 3 and not s.keeps_gathered):
        return None
    return f"tile={s.tile} with zero={s.zero}{_why_kept(s)}"


def _why_kept(s: Strategy) -> str:
    if not s.keeps_gathered:
        return ""
    return " and keep_gathered" if s.keep_gathered else f" beside a pipeline, pp={s.pp}, without reduce_each"


def _tile_rows(c: Case) -> str | None:
    tile, grid, last = c.strategy.tile, c.strategy.grid, c.strategy.tp - 1
    if tile == 1:
        return None
    rows = {p.name: param_box(c.model, p, grid, last).sizes[0] for p in c.model.parameters() if is_tiled(p)}
    name = min(rows, key=rows.__getitem__)
    return f"tile={tile} is more than the {rows[name]} rows of `{name}` on a rank" if tile > rows[name] else None


def _kept_offload(c: Case) -> str | None:
    tier = c.strategy.offload.parameters
    if tier == "none" or not c.strategy.keeps_gathered:
        return None
    return f"offload.parameters={tier}{_why_kept(c.strategy)}"


def _offload_path(c: Case) -> str | None:
    moved = c.strategy.offload
    return "offload to disk without a path" if "disk" in moved.tiers and not moved.path else None


def _delayed(c: Case) -> str | None:
    moved = c.strategy.offload
    is_alone = moved.delayed and moved.optimizer == "none"
    return "offload.delayed with offload.optimizer=none" if is_alone else None


def _node(c: Case) -> str | None:
    s, per_node = c.strategy, c.cluster.devices_per_node
    within = c.cluster.num_nodes == 1 or per_node % (s.data_ranks * s.tp) == 0
    if s.shard_over == "all" or within or 1 < s.dp_local < s.data_ranks:
        return None
    return f"shard_over=node with dp={s.dp} and tp={s.tp} on nodes of {per_node} devices"


OF_TIMETABLE, OF_SEQUENCES, BALANCE = "pp-timetable", "tensor-batch", "balance"
MICRO_BATCH_RULES = (OF_TIMETABLE, OF_SEQUENCES, BALANCE)
"""The rules that depend on how a rank's sequences are cut into micro-batches."""

RULES = (
    Rule("world", "dp × context.degree × tp × pp = number of devices", "every device runs exactly one rank", _world),
    Rule(
        "tp-heads",
        "tp, or the side q of a grid, divides the attention heads",
        "a head is computed whole on one rank",
        lambda c: _divides("the heads", c.model.num_heads, *cut(c.strategy)),
    ),
    Rule(
        "tp-kv-heads",
        "tp, or the side q of a grid, divides the key/value heads or is a multiple of them",
        "a key/value head is held whole, by one rank or by equally many replicas",
        _kv,
    ),
    Rule(
        "tp-ffn",
        "tp, or the side q of a grid, divides the feed-forward width, of experts too",
        "gate, up and down are cut into equal blocks of columns and rows",
        _ffn,
    ),
    Rule(
        "experts",
        "layers of experts need 1D tensor parallelism; losses, biases and noise of gates no asynchronous schedule",
        "a token's experts are chosen once, by what the ranks of its sequence know of it and of the step",
        lambda c: experts(c.strategy, c.model),
    ),
    Rule(
        "expert-degree",
        "expert.degree divides the experts, and times expert.tensor the ranks dp × context.degree × tp; expert.tensor "
        "divides tp or is a multiple of it, and if it is not tp, tp (× context.degree) divides seq_length; beside them "
        "no sharding over a node, grid or asynchronous schedule",
        "each rank holds equally many experts of every layer, whose gradients are summed over the ranks that hold them "
        "too, and has equally many tokens",
        lambda c: expert_degree(c.strategy, c.model, c.job),
    ),
    Rule(
        BALANCE,
        "a balance loss over the batch needs one micro-batch, or every forward of a step before its first backward "
        "(schedule=gpipe); else take router.balance_over=sequence",
        "it weighs experts by their loads over all tokens of the step, which backward must know",
        lambda c: balance(c.strategy, c.model),
    ),
    Rule(
        "tensor-grid",
        "tp is a square with tensor.kind=2d, tensor.depth squares of a side of at least that with 2.5d, a cube with 3d",
        "its ranks are laid out so, and a block is nowhere missing",
        lambda c: grid_fault(c.strategy),
    ),
    Rule(
        OF_SEQUENCES,
        "q divides micro_batch_size with tensor.kind=2d, depth·q with 2.5d, q² with 3d",
        "each rank of a grid has whole sequences, equally many",
        lambda c: sequences_fault(c.strategy),
    ),
    Rule(
        "tensor-sizes",
        "q divides hidden size, feed-forward width and the width of all heads with tensor.kind=2d and 2.5d, q² with 3d",
        "weights and hidden states are cut into equal blocks",
        lambda c: sizes_fault(c.strategy, c.model),
    ),
    Rule(
        "tensor-alone",
        "a grid stands without sequence=megatron, context.degree > 1 and tiles",
        "it cuts the sequences of a micro-batch and both dims of a weight itself, and its layers are its own",
        lambda c: company_fault(c.strategy),
    ),
    Rule(
        "latent",
        "multi-head latent attention needs tensor.kind=1d",
        "its latents belong to all heads, and are whole on every rank that has some of them",
        _latent,
    ),
    Rule(
        "sequence-tokens",
        "sequence=megatron needs tensor.kind=1d, tile=1, and tp (× context.degree) to divide seq_length",
        "each tp rank holds equally many tokens between the layers' products, which gather them whole",
        _sequence,
    ),
    Rule("tp-vocab", "tp is at most the vocabulary size", "each rank holds at least one row", _vocab),
    Rule(
        "context-tokens",
        context_rules.TOKENS,
        "every rank has equally many tokens of each sequence",
        lambda c: context_rules.tokens(c.strategy, c.job),
    ),
    Rule(
        "context-tensor",
        context_rules.KINDS,
        "the others cut the hidden state, or run the core again, in ways that are not joined with it",
        lambda c: context_rules.kinds(c.strategy),
    ),
    Rule(
        "ulysses-heads",
        context_rules.HEADS,
        "each rank computes whole heads over all tokens",
        lambda c: context_rules.heads(c.strategy, c.model),
    ),
    Rule(
        "ulysses-kv-heads",
        context_rules.KV_HEADS,
        "each rank gets equally many key/value heads, or one copy of one",
        lambda c: context_rules.kv_heads(c.strategy, c.model),
    ),
    Rule(
        "pp-layers",
        "pp, times the stages of a rank, is at most the number of layers",
        "a stage without a layer only adds a hop",
        _layers,
    ),
    Rule(
        "pp-layer-list",
        "layers_per_stage has a positive entry for each part that the pipeline cuts, which add up to the layers",
        "every layer stands on exactly one stage",
        _layer_list,
    ),
    Rule(
        "pp-chunks",
        "num_chunks needs a schedule that leaves the choice",
        "the others are written for one number of stages per rank",
        _chunks,
    ),
    Rule(
        OF_TIMETABLE,
        "the schedule has a timetable of one step for pp and num_micro_batches",
        "it is what ranks run",
        _timetable,
    ),
    Rule(
        "asynchronous",
        "an asynchronous schedule needs zero=0, no loss scale, no weight that two stages share, and no offload of "
        "states",
        "each stage updates by itself, while others are at other micro-batches",
        _asynchronous,
    ),
    Rule(
        "batch",
        "dp × num_micro_batches × micro_batch_size = global batch",
        "every sequence of the batch is trained on exactly once",
        _batch,
    ),
    Rule(
        "zero-choice",
        "shard_over=node needs zero=1 or more, offloaded gradients and reduce_each zero=2 or more, keep_gathered, "
        "prefetch and offloaded parameters zero=3; beside a pipeline offloaded gradients need reduce_each",
        "only what is divided over dp can be divided otherwise, gathered ahead, kept or moved away",
        _zero_choices,
    ),
    Rule(
        "zero-schedule",
        "zero=2 and 3 need a schedule of one direction with whole backwards, beside a pipeline only with reduce_each",
        "a block's gradients are reduced, and their memory is given up, with its backward",
        _split_reduction,
    ),
    Rule(
        "tile-zero",
        "tile > 1 needs zero=3 without keep_gathered, and reduce_each beside a pipeline",
        "only there a weight is not whole on the rank, and can be gathered tile by tile",
        _tile_zero,
    ),
    Rule(
        "tile-rows",
        "tile is at most the rows of every linear layer on a rank",
        "a tile holds at least one row",
        _tile_rows,
    ),
    Rule(
        "kept-offload",
        "parameters are either kept gathered or offloaded",
        "a kept block fills the memory that offloading is to free",
        _kept_offload,
    ),
    Rule(
        "offload-path",
        "offloading to disk needs offload.path, a folder of each node's own",
        "none is made or guessed, lest another disk fill up",
        _offload_path,
    ),
    Rule(
        "offload-delayed",
        "a delayed update needs the optimizer offloaded",
        "it works on copies away from the device, while the next step runs there",
        _delayed,
    ),
    Rule(
        "dropout",
        "dropout and attention_dropout need a synchronous schedule",
        "masks are numbered by step, sequence and token, which are not told to the others",
        _dropout,
    ),
    Rule(
        "recompute-choice",
        "recompute_layers needs recompute, recompute_group > 1 needs recompute=full and zero below 3; selective and "
        "recompute_layers need tile=1",
        "only layers that run again can be chosen or put together; blocks and tiles are gathered in one order",
        _recompute,
    ),
    Rule(
        "shard-node",
        "with shard_over=node every node holds several ranks of each dp group, equally many",
        "the ranks of a node share one copy",
        _node,
    ),
    Rule("positions", "seq_length is at most the learned positions", "there is no row for later positions", _positions),
)


def violations(strategy: Strategy, model: ModelSpec, cluster: ClusterSpec, job: Job) -> list[Violation]:
    """Every rule that the strategy breaks, in table order."""
    case = Case(strategy, model, cluster, job)
    found = ((rule, rule.broken(case)) for rule in RULES)
    return [Violation(rule, numbers) for rule, numbers in found if numbers is not None]
