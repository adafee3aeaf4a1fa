"""Seconds of the kernels of a step on one device, from its measured profile.

    product       2·m·n·k FLOPs at the peak × what large ones reach, the last wave of tiles counted whole; or its three
                  matrices once through memory, where that takes longer
    attention     fused: its FLOPs at a rate that grows with the keys of a query; otherwise two batched products and
                  the passes of softmax and dropout over b·a·s² scores, all through memory
    streaming     norms, residuals, activations, copies, rows to their experts and back: bytes through memory
    host          a floor: a layer's kernels cannot run faster than they are launched

Backward runs two products for each of forward's, twice its streams, and 2.5 times the FLOPs of fused attention, whose
scores it computes again.

Sources: Williams et al. 2009 (roofline); NVIDIA, "Matrix Multiplication Background" (tiles, waves, alignment);
Dao et al. 2022 and Dao 2023 (attention); Korthikanti et al. 2022 §4.1 and Ivanov et al. 2021 (bytes of the kernels
between products).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf

from meshwright.core.cluster import Device
from meshwright.core.job import Job
from meshwright.core.latent import LatentAttention
from meshwright.core.model import ModelSpec
from meshwright.core.placement import largest_part
from meshwright.core.precision import DTYPE_BYTES
from meshwright.core.profile import Profile, Stack
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import imbalance_of

FUSED_BACKWARD = 2.5
"""FLOPs of backward over those of forward in fused attention (Dao et al. 2022, §3.1)."""
ALIGNED_TO = 8
"""Elements that a row of 16-bit numbers must be a multiple of for tensor cores to take whole fragments."""
MISALIGNED_SHARE = 0.5
"""Of the fp32 peak outside of tensor cores, that a product reaches whose rows are not."""
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of the output that one multiprocessor computes at a time, and the share of the best rate."""
SCORE_PASSES, SCORE_PASSES_BACKWARD = 4.0, 7.0
"""Times that unfused kernels read or write all scores: product, softmax (2), product; and their gradients."""
DROPOUT_PASSES = 2.5
"""More, each way, with dropout: read, write, and a mask of one byte."""
ROW_COPIES = 4.0
"""Times that a row of a token's choice is read or written on its way to an expert and back."""
ARRIVAL_COPIES = 4.0
"""More, where it comes from another rank."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one layer and one micro-batch on one device, or of anything that is run both ways."""

    forward: float
    backward: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: float) -> Seconds:
        return Seconds(count * self.forward, count * self.backward)


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """What one layer takes of one micro-batch."""

    products: Seconds
    attention: Seconds
    streams: Seconds

    def __add__(self, other: LayerKernels) -> LayerKernels:
        return LayerKernels(
            self.products + other.products, self.attention + other.attention, self.streams + other.streams
        )

    def times(self, count: float) -> LayerKernels:
        return LayerKernels(self.products.times(count), self.attention.times(count), self.streams.times(count))

    @property
    def total(self) -> Seconds:
        return self.products + self.attention + self.streams


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does per second in one dtype."""

    flops_per_s: float
    """Peak."""
    plain_flops_per_s: float
    """Peak of fp32, outside of tensor cores."""
    profile: Profile
    bytes_per_s: float
    """Of memory, reached."""
    element_bytes: int
    narrow: Rates | None = None
    """Where the products of layers are multiplied in fewer bits."""

    def narrowing_s(self, elements: float) -> float:
        """Seconds to narrow the gradient of a product's output: read wide, written narrow twice, as its two products
        want it. What goes into a product forward is written narrow by the kernel before, in as many bytes."""
        if self.narrow is None:
            return 0.0
        return elements * (self.element_bytes + 2 * self.narrow.element_bytes) / self.bytes_per_s

    def product_s(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """Seconds of `batch` products [m, k] × [k, n]."""
        bytes_s = batch * self.stream_s(m * k + k * n + m * n)
        if n % ALIGNED_TO or k % ALIGNED_TO:
            return max(bytes_s, 2 * batch * m * n * k / (MISALIGNED_SHARE * self.plain_flops_per_s))
        full = self.flops_per_s * self.profile.matmul_efficiency / self.profile.num_units
        least, num_units = inf, self.profile.num_units
        for rows, columns, share in TILES:  # a planner's innermost loop
            waves = ceil(batch * ceil(m / rows) * ceil(n / columns) / num_units) * rows * columns / share
            if waves < least:
                least = waves
        return max(bytes_s, 2 * k * least / full)

    def product(self, m: float, n: float, k: float, batch: float = 1.0) -> Seconds:
        """A product, and the two that its gradients take: [m, n] × [n, k] and [n, m] × [m, k]. The latter's m lies
        across the rows in memory, and may be any number."""
        backward_s = self.product_s(m, k, n, batch) + self.product_s(n, k, ALIGNED_TO * ceil(m / ALIGNED_TO), batch)
        return Seconds(self.product_s(m, n, k, batch), backward_s)

    def layer_product(self, m: float, n: float, k: float, batch: float = 1.0) -> Seconds:
        """Likewise of a layer, with what is narrowed for it."""
        rates = self.narrow or self
        return rates.product(m, n, k, batch) + Seconds(0.0, self.narrowing_s(batch * m * n))

    def stream_s(self, elements: float) -> float:
        """Seconds to move so many elements through memory once."""
        return elements * self.element_bytes / self.bytes_per_s


def rates(device: Device, profile: Profile, dtype: str, element_bytes: int, product: str | None = None) -> Rates:
    """The rates of a device in a dtype that it has a peak for, and in that of the products of layers."""
    narrow = None
    if product is not None:
        narrow = rates(device, profile, product, DTYPE_BYTES[product])
    return Rates(
        narrow=narrow,
        flops_per_s=device.peak_flops_per_s[dtype],
        plain_flops_per_s=device.peak_flops_per_s.get("fp32", device.peak_flops_per_s[dtype]),
        profile=profile,
        bytes_per_s=device.memory_bandwidth_bytes_per_s * profile.memory_efficiency,
        element_bytes=element_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes on the first tp rank, which holds the largest pieces."""

    b: int
    s: int
    own: int
    """Of the s tokens of a sequence, that this rank computes with."""
    between: int
    """And holds outside of the tensor-parallel regions."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    num_matrices: int
    """Of the MLP."""
    ep: int
    """Ranks that share the experts, and send each other rows."""

    @property
    def tokens(self) -> int:
        return self.b * self.own


def _shape(spec: ModelSpec, job: Job, strategy: Strategy) -> _Shape:
    def local(dim: str, size: int) -> int:
        return largest_part(spec, dim, size, strategy.tp)

    return _Shape(
        b=strategy.micro_batch_size,
        s=job.seq_length,
        own=job.seq_length // strategy.cp,
        between=job.seq_length // strategy.hidden_parts[1],
        hidden=spec.hidden_size,
        heads=local("heads", spec.heads_size) // spec.head_dim,
        kv_heads=local("kv_heads", spec.kv_size) // spec.head_dim,
        head_dim=spec.head_dim,
        ffn=local("ffn", spec.ffn_size),
        vocab=local("vocab", spec.vocab_size),
        num_matrices=3 if spec.gated_mlp else 2,
        ep=strategy.ep,
    )


def layers_kernels(
    spec: ModelSpec, job: Job, strategy: Strategy, rates: Rates, stack: Stack, layers: range
) -> LayerKernels:
    """Several layers; all are alike but for a mixture's dense ones."""
    none = Seconds(0.0, 0.0)
    total = LayerKernels(none, none, none)
    for is_sparse in (False, True):
        count = spec.count_layers(layers, is_sparse)
        if count:
            one = next(layer for layer in layers if spec.is_sparse(layer) is is_sparse)
            total += layer_kernels(spec, job, strategy, rates, stack, one).times(count)
    return total


def layer_kernels(
    spec: ModelSpec, job: Job, strategy: Strategy, rates: Rates, stack: Stack, layer: int = 0
) -> LayerKernels:
    """One layer, one micro-batch, without communication."""
    drops_scores = stack.dropout or job.attention_dropout > 0
    is_fused = stack.fused_attention and not job.attention_dropout  # whose probabilities are nowhere to be dropped
    fusion = _Fusion(is_fused, stack.attention_share, stack.dropout, drops_scores, stack.rows_once)
    cuts = strategy.tp, strategy.et, imbalance_of(job, strategy, spec)
    return _kernels(spec, _shape(spec, job, strategy), cuts, rates, fusion, spec.is_sparse(layer))


@dataclass(frozen=True, slots=True)
class _Fusion:
    """What a stack's kernels are, as in :class:`~meshwright.core.profile.Stack`."""

    fused_attention: bool
    attention_share: float
    dropout: bool
    drops_scores: bool
    rows_once: bool


@lru_cache(maxsize=4096)
def _kernels(
    spec: ModelSpec, z: _Shape, cuts: tuple[int, int, float], rates: Rates, fusion: _Fusion, is_sparse: bool
) -> LayerKernels:
    """A planner asks for the same layers in every pipeline.

    Args:
        cuts: into how many parts the layer's widths are cut, and those of its experts; rows of the fullest rank over
            their mean.
    """
    attention = _fused_attention(z, rates, fusion) if fusion.fused_attention else _unfused_attention(z, rates, fusion)
    inner = _expert_products(spec, z, cuts, rates) if is_sparse else _mlp_products(z, z.ffn, rates)
    streams_s = rates.stream_s(rates.profile.stream_passes * _stream_elements(spec, z, cuts, fusion, is_sparse))
    rows_moved = _expert_tokens(z, cuts) * moved_elements(spec, z.ep, fusion.rows_once) * is_sparse
    moved_s = rates.stream_s((1.0 if fusion.rows_once else rates.profile.stream_passes) * rows_moved)
    return LayerKernels(
        products=_projections(spec, z, rates) + inner,
        attention=attention,
        streams=Seconds(streams_s + moved_s, 2 * streams_s + moved_s),
    )


def _projections(spec: ModelSpec, z: _Shape, rates: Rates) -> Seconds:
    """Of queries, keys and values, and of attention's output."""
    if spec.latent is not None:
        return _latent_projections(spec.latent, z, rates)
    q_kv = (z.heads + 2 * z.kv_heads) * z.head_dim
    into = rates.layer_product(z.tokens, q_kv, z.hidden)
    return into + rates.layer_product(z.tokens, z.hidden, z.heads * z.head_dim)


def _latent_projections(latent: LatentAttention, z: _Shape, rates: Rates) -> Seconds:
    """Down to the latents, of the tokens that this rank holds between regions; up to the heads; the output."""
    total = rates.product(z.b * z.between, (latent.q_lora_rank or 0) + latent.kv_down_size, z.hidden)
    total += rates.product(z.tokens, z.heads * z.head_dim, latent.q_lora_rank or z.hidden)
    total += rates.product(z.tokens, z.heads * latent.kv_up_size, latent.kv_lora_rank)
    return total + rates.product(z.tokens, z.hidden, z.heads * latent.v_head_dim)


def _mlp_products(z: _Shape, ffn: int, rates: Rates) -> Seconds:
    up = rates.layer_product(z.tokens, (z.num_matrices - 1) * ffn, z.hidden)
    return up + rates.layer_product(z.tokens, z.hidden, ffn)


def _expert_tokens(z: _Shape, cuts: tuple[int, int, float]) -> float:
    """Tokens of the ranks that share an expert's width, as many times as its rows exceed the mean."""
    tp, et, imbalance = cuts
    return _more(z.tokens * et / tp, imbalance)


def _expert_products(spec: ModelSpec, z: _Shape, cuts: tuple[int, int, float], rates: Rates) -> Seconds:
    """Of each expert of this rank the rows of all ranks that share them, equally many but for the imbalance; the
    router; what every token passes."""
    tp, et, _ = cuts
    ffn = -(-spec.expert_size // et)
    num = spec.num_experts // z.ep
    rows = _expert_tokens(z, cuts) * spec.experts_per_token / num
    matrices = 2 if spec.has_gated_experts else 1
    total = rates.layer_product(rows, matrices * ffn, z.hidden, num) + rates.layer_product(rows, z.hidden, ffn, num)
    total += Seconds(rates.narrowing_s(num * rows * (z.hidden + ffn)), 0.0)  # no kernel before writes them narrow
    total += rates.product(z.b * z.between, spec.num_experts, z.hidden)
    if spec.shared_ffn_size:
        total += _mlp_products(z, largest_part(spec, "ffn", spec.shared_ffn_size, tp), rates)
    return total


def _more(rows: float, imbalance: float) -> float:
    """So many times as many, aligned if they are: an imbalance is a mean over experts, not a number of rows."""
    unit = 1 if rows % ALIGNED_TO else ALIGNED_TO
    return rows if imbalance == 1 else unit * round(rows * imbalance / unit)


def _fused_attention(z: _Shape, rates: Rates, fusion: _Fusion) -> Seconds:
    """Half the scores, as the causal mask leaves them. Values of latent attention are as wide as keys."""
    profile = rates.profile
    reached = fusion.attention_share * profile.attention_efficiency
    share = reached * z.s / (z.s + profile.attention_half_keys)
    flops = 2 * z.b * z.heads * z.head_dim * z.own * z.s
    forward_s = flops / (rates.flops_per_s * share)
    return Seconds(forward_s, FUSED_BACKWARD * forward_s)


def _unfused_attention(z: _Shape, rates: Rates, fusion: _Fusion) -> Seconds:
    """All scores, masked or not."""
    batch = z.b * z.heads
    products = rates.product(z.own, z.s, z.head_dim, batch) + rates.product(z.own, z.head_dim, z.s, batch)
    counted_s = rates.stream_s(2 * batch * z.own * z.s)  # scores stand among the passes
    more = DROPOUT_PASSES * fusion.drops_scores
    forward_s, backward_s = (
        rates.stream_s((passes + more) * batch * z.own * z.s) for passes in (SCORE_PASSES, SCORE_PASSES_BACKWARD)
    )
    return products + Seconds(forward_s - counted_s, backward_s - 2 * counted_s)


def _stream_elements(
    spec: ModelSpec, z: _Shape, cuts: tuple[int, int, float], fusion: _Fusion, is_sparse: bool
) -> float:
    """Elements that the kernels between the products of a layer read and write, forward.

    Two norms (read, write), two residual sums (read both, write; with dropout a mask too), the activation (read one or
    two, write), and copies of q, k and v: rotation, or transposition for unfused attention. Of latent attention also
    two norms, k and v as they are put together, and the output as it is narrowed.
    """
    residual = 3.0 + 0.5 * fusion.dropout
    activation = 2.0 if z.num_matrices == 2 else 3.0
    copies = 2.0 * (spec.positions == "rope") + 2.0 * (not fusion.fused_attention)
    q_kv = (z.heads + z.kv_heads) * z.head_dim
    between = z.b * z.between * 2 * (2 + residual) * z.hidden
    if spec.latent is not None:
        between += z.b * z.between * 2 * ((spec.latent.q_lora_rank or 0) + spec.latent.kv_lora_rank)
        copies += 1.0 + 2.0 * spec.values_size / spec.heads_size
    moved = between + z.tokens * copies * q_kv
    if not is_sparse:
        return moved + z.tokens * activation * z.ffn
    inner = _expert_tokens(z, cuts) * spec.experts_per_token * (3 if spec.has_gated_experts else 2)
    inner *= -(-spec.expert_size // cuts[1])
    shared = z.tokens * activation * largest_part(spec, "ffn", spec.shared_ffn_size or 0, cuts[0])
    return moved + inner + shared


def moved_elements(spec: ModelSpec, ep: int, rows_once: bool = False) -> float:
    """Elements of a token that are read and written, each way, to bring its rows to their experts and back: copied in
    the order of experts, weighted and summed; where each travels by itself, also sorted on arrival, and back."""
    copies = ROW_COPIES + ARRIVAL_COPIES * (ep > 1 and not rows_once)
    return spec.experts_per_token * spec.hidden_size * copies


def head_kernels(spec: ModelSpec, job: Job, strategy: Strategy, rates: Rates) -> tuple[Seconds, Seconds]:
    """(the logits alone, all): final norm, logits and loss."""
    return _head(_shape(spec, job, strategy), rates)


@lru_cache(maxsize=4096)
def _head(z: _Shape, rates: Rates) -> tuple[Seconds, Seconds]:
    """The logits are written, read as maximum, exponentials and sum, and once more for the gradient, in fp32."""
    wide = rates.profile.stream_passes * 4 / rates.element_bytes
    norm = rates.profile.stream_passes * z.b * z.between * 2 * z.hidden
    streams = Seconds(
        rates.stream_s(norm + z.tokens * 4 * wide * z.vocab), rates.stream_s(2 * norm + z.tokens * 2 * wide * z.vocab)
    )
    product = rates.product(z.tokens, z.vocab, z.hidden)
    return product, product + streams
