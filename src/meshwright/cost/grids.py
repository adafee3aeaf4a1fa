"""What 2D, 2.5D and 3D tensor parallelism send for one micro-batch.

Of a linear layer of [in → out] over T tokens S_X = β·T·in, S_W = β·in·out, S_Y = β·T·out, each rank sends on average

    2D, 2.5D   forward (q−1)/q²·(S_X/δ + S_W), backward twice as much; the head, a transpose, sends S_Y/δ for S_X/δ in
               forward and in the weight's gradient, and both in the input's
    3D         forward (q−1)/q³·(S_X + S_W + S_Y), backward as much; S_X + S_W more of the same, where backward gathers
               again (`Strategy.keeps_operands`)

q, k and v are one layer here, and gate and up: their input passes once. In 2D and 2.5D backward keeps blocks of 1/(δq²)
and moves them again. A norm sums one or two numbers a token over the ranks that share its hidden dim; embedding and
loss as `parallel.grids.embedding` and `parallel.loss` say.

In 2D and 2.5D a product works in panels: of each of the two operands or sums that go round, up to two blocks of other
ranks, in memory that all products share.

Sources: Xu et al. 2021 (2D), Wang et al. 2021 (2.5D), Bian et al. 2021 (3D).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.axes import TP_COL, TP_DEPTH, TP_INPUT, TP_OUTPUT, TP_ROW, TP_WEIGHT
from meshwright.core.job import Job
from meshwright.core.layouts import INNER_DIMS, Grid
from meshwright.core.measures import Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.placement import even_split, kv_replicas
from meshwright.core.strategy import Strategy

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of a micro-batch."""

    phase: str
    primitive: str
    axis: str
    payload_bytes: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the calls of one rank depend on."""

    model: ModelSpec
    grid: Grid
    tokens: int
    """Of the whole micro-batch."""
    element_bytes: int
    statistic_bytes: int
    index: int
    """Position on tp; only a share of the vocabulary depends on it."""
    splits_backward: bool
    keeps_operands: bool
    num_loss_sums: int
    """Of a token, besides its maximum."""

    @property
    def q(self) -> int:
        return self.grid.side

    @property
    def own_tokens(self) -> int:
        """Of this rank, between the layers."""
        return self.tokens // self.grid.parts(self.grid.batch_axes)


def grid_sizes(model: ModelSpec, job: Job, strategy: Strategy, index: int) -> Sizes:
    """Of the rank at position `index` of tp."""
    return Sizes(
        model=model,
        grid=strategy.grid,
        tokens=strategy.micro_batch_size * job.seq_length,
        element_bytes=strategy.recipe.parameter_bytes,
        statistic_bytes=strategy.recipe.statistic_bytes,
        index=index,
        splits_backward=strategy.splits_backward,
        keeps_operands=strategy.keeps_operands,
        num_loss_sums=job.num_loss_sums,
    )


def grid_traffic(total: Traffic, sizes: Sizes, strategy: Strategy, stage: int) -> None:
    """Add what a rank sends for all micro-batches of a step on one stage."""
    m, parts = strategy.micro_batches_per_stage, sizes.grid.sizes
    num_layers = len(strategy.stage_layers(sizes.model.num_layers)[stage])

    def add(calls: Iterator[Call], times: int, phases: dict[str, str]) -> None:
        for call in calls:
            if call.phase in phases:
                count = m * times * call.times
                total.add(call.primitive, call.axis, phases[call.phase], call.payload_bytes, parts[call.axis], count)

    both = {FORWARD: FORWARD, BACKWARD: BACKWARD}
    add(layer_calls(sizes), num_layers, both)
    if strategy.recompute == "full":
        add(layer_calls(sizes), strategy.num_recomputed(num_layers), {FORWARD: "recompute"})
    is_first, is_last = strategy.stage_ends(stage)
    if is_first:
        add(embedding_calls(sizes), 1, both)
    if is_last:
        add(end_calls(sizes), 1, both)


def layer_calls(sizes: Sizes) -> Iterator[Call]:
    """Of one layer: its two norms, and its linear layers."""
    for _ in range(2):
        yield from norm_calls(sizes)
    for out, into, is_second in _linears(sizes.model, sizes.q):
        yield from linear_calls(sizes, out, into, is_second=is_second)


def _linears(model: ModelSpec, side: int) -> Iterator[tuple[int, int, bool]]:
    """(out, in, whether it is o or down) of a layer's products; q, k and v are one, and gate and up. Key/value heads
    count once for each column of ranks that has them."""
    together: dict[str, tuple[int, int]] = {}
    for param in model.parameters():
        if param.layer != 0 or len(param.shape) != 2:
            continue
        out, into = param.shape
        if param.dims[0] == "kv_heads":
            out *= kv_replicas(model, side)
        if param.dims[1] in INNER_DIMS:
            yield out, into, True
        else:
            block = param.name.rsplit(".", 2)[0]
            together[block] = together.get(block, (0, 0))[0] + out, into
    yield from ((out, into, False) for out, into in together.values())


def linear_calls(sizes: Sizes, out: int, into: int, *, is_second: bool) -> Iterator[Call]:
    """Of one linear layer, a second one being o or down."""
    if sizes.grid.kind == "3d":
        yield from _cube_calls(sizes, out // sizes.q, into // sizes.q, is_second)
        return
    q, element = sizes.q, sizes.element_bytes
    x, weight = sizes.own_tokens * into // q * element, out // q * into // q * element
    yield Call(FORWARD, "broadcast", TP_ROW, x, q)
    yield Call(FORWARD, "broadcast", TP_COL, weight, q)
    yield Call(BACKWARD, "broadcast", TP_COL, weight, q)
    yield Call(BACKWARD, "reduce", TP_ROW, x, q)
    yield Call(BACKWARD, "broadcast", TP_ROW, x, q)
    yield Call(BACKWARD, "reduce", TP_COL, weight, q)


def panels_bytes(sizes: Sizes, has_head: bool) -> int:
    """Of the panels of a rank's largest product; a cube has none."""
    if sizes.grid.kind not in ("2d", "2.5d"):
        return 0
    q, hidden = sizes.q, sizes.model.hidden_size // sizes.q
    most = max(into // q * (sizes.own_tokens + out // q) for out, into, _ in _linears(sizes.model, q))
    if has_head:
        most = max(most, even_split(sizes.model.vocab_size, q, 0)[1] * (sizes.own_tokens + hidden))
    return min(2, q - 1) * most * sizes.element_bytes


def _cube_calls(sizes: Sizes, out: int, into: int, is_second: bool) -> Iterator[Call]:
    """`out` and `into` are this rank's columns of the output and of the input."""
    rows = sizes.tokens // sizes.q
    x, y, weight = (n * sizes.element_bytes for n in (rows * into, rows * out, out * into))
    in_axis, out_axis = (TP_OUTPUT, TP_INPUT) if is_second else (TP_INPUT, TP_OUTPUT)
    yield Call(FORWARD, "all_gather", in_axis, x)
    yield Call(FORWARD, "all_gather", TP_WEIGHT, weight)
    yield Call(FORWARD, "reduce_scatter", out_axis, y)
    yield Call(BACKWARD, "all_gather", out_axis, y, 2 if sizes.splits_backward else 1)
    yield Call(BACKWARD, "reduce_scatter", in_axis, x)
    if not sizes.keeps_operands:
        yield Call(BACKWARD, "all_gather", TP_WEIGHT, weight)
        yield Call(BACKWARD, "all_gather", in_axis, x)
    yield Call(BACKWARD, "reduce_scatter", TP_WEIGHT, weight)


def head_calls(sizes: Sizes) -> Iterator[Call]:
    """Of the head, whose vocabulary may be cut unevenly."""
    q, vocab, hidden = sizes.q, sizes.model.vocab_size, sizes.model.hidden_size // sizes.q
    if sizes.grid.kind == "3d":
        own = even_split(vocab, q, sizes.grid.coordinates(sizes.index)[TP_INPUT])[1]
        yield from _cube_calls(sizes, own, hidden, is_second=False)
        return
    for at in range(q):
        rows = even_split(vocab, q, at)[1]
        logits, weight = sizes.own_tokens * rows * sizes.element_bytes, rows * hidden * sizes.element_bytes
        yield Call(FORWARD, "broadcast", TP_COL, weight)
        yield Call(FORWARD, "reduce", TP_ROW, logits)
        yield Call(BACKWARD, "broadcast", TP_ROW, logits, 2)
        yield Call(BACKWARD, "broadcast", TP_COL, weight)
        yield Call(BACKWARD, "reduce", TP_COL, weight)


def norm_calls(sizes: Sizes) -> Iterator[Call]:
    """Of one norm over the hidden dim: statistics in forward, sums along them in backward."""
    (axis,), per_token = sizes.grid.hidden_axes, sizes.own_tokens * sizes.statistic_bytes
    num_statistics = 2 if sizes.model.norm == "layernorm" else 1
    yield Call(FORWARD, "all_reduce", axis, per_token, num_statistics)
    yield Call(BACKWARD, "all_reduce", axis, num_statistics * per_token)


def embedding_calls(sizes: Sizes) -> Iterator[Call]:
    """Of the look-up of token ids."""
    sizes_by_axis, hidden = sizes.grid.sizes, sizes.tokens * sizes.model.hidden_size // sizes.q * sizes.element_bytes
    if sizes.grid.kind == "3d":
        summed = hidden // sizes.q
        yield Call(FORWARD, "reduce_scatter", TP_INPUT, summed)
        yield Call(BACKWARD, "all_gather", TP_INPUT, summed)
        for phase in (FORWARD, BACKWARD):
            yield Call(phase, "all_to_all", TP_WEIGHT, summed // sizes.q)
        return
    summed = hidden // sizes_by_axis.get(TP_DEPTH, 1)
    yield Call(FORWARD, "reduce_scatter", TP_COL, summed)
    yield Call(BACKWARD, "all_gather", TP_COL, summed)


def end_calls(sizes: Sizes) -> Iterator[Call]:
    """Of the final norm, the head and the loss: of each token the maximum, and then its sums."""
    yield from norm_calls(sizes)
    yield from head_calls(sizes)
    per_token = sizes.own_tokens * sizes.statistic_bytes
    yield Call(FORWARD, "all_reduce", sizes.grid.vocab_axis, per_token)
    yield Call(FORWARD, "all_reduce", sizes.grid.vocab_axis, sizes.num_loss_sums * per_token)
