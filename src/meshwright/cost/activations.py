"""What autograd keeps between forward and backward, tensor by tensor.

Per layer and token, in elements (h hidden, a query heads, g key/value heads, d head dim, f feed-forward, t = tp):

    norm inputs                     2h
    norm statistics                 2 (RMSNorm) or 4 (LayerNorm), at least fp32
    inputs of attention and mlp     2h
    q/k before their norms          (a+g)d/t, and a/t + g/t statistics; only with qk_norm
    q, k, v                         (a+2g)d/t
    attention output                ad/t
    log-sum-exp of the scores       a/t, at least fp32
    gate, up, product               3f/t; plain MLP: 2f/t (before and after the activation)

    latent attention                2(r_q + r_kv) + r + 2 statistics, 3ad/t of q, k and v, and av/t of what o takes,
                                    where values are narrower (ranks r_q and r_kv, r rotary dims, v of values)
    experts instead of an MLP       1h + E logits + k·(2h + 3f/t) and a few numbers; with the shared experts' 3f/t

with RMSNorm and SwiGLU:  4h + 2(a+g)d/t + 3f/t + a/t + 2. Biases, rotary positions and dropout (there is none) add
nothing; a score matrix s² is never kept (flash attention), but for ring self-attention's rows, b·a·s²/cp. Of c = cp
ranks each keeps these terms of s/c tokens. Tensors of hidden size are whole on every tp rank: the input
of a column-parallel region is not copied, and the all-reduced output is kept by nobody. With sequence="megatron" they,
and the norms' statistics, are of 1/t of the tokens: (4h + 2 + 2(a+g)d + 3f + a)/t, everything divided.

On a grid a rank keeps its block of each. A cube keeps inputs of products q times, as it gathered them, and gathered
weights with them (`Strategy.keeps_operands`).

Counted per micro-batch; the schedule says how many of them live at once. `tests/cost/test_activations.py` counts the
same on the real modules.

Source: Korthikanti et al. 2022 §4.1, redone for RMSNorm, SwiGLU, grouped heads and flash attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.core.axes import TP_DEPTH
from meshwright.core.job import Job
from meshwright.core.latent import LatentAttention
from meshwright.core.model import ModelSpec
from meshwright.core.placement import largest_part
from meshwright.core.strategy import Strategy

_INDEX_BYTES = 8
_FLAG_BYTES = 1
_SHARE_BYTES = 8


@dataclass(frozen=True, slots=True)
class ByteTerm:
    """One named part of a memory footprint."""

    name: str
    bytes: int


def total_bytes(terms: Iterable[ByteTerm]) -> int:
    """Sum of terms."""
    return sum(term.bytes for term in terms)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Elements per token on the first tp rank (no rank holds more), and bytes of an element."""

    tokens: int
    between: int
    """Tokens outside of the tensor-parallel regions: this rank's."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    values: int
    """Of attention's output."""
    ffn: int
    expert_ffn: int
    shared_ffn: int
    vocab: int
    element_bytes: int
    statistic_bytes: int
    gathered: int
    """Blocks of an operand of a product that are kept: 1, or the side of a cube."""

    def kept(self, name: str, elements: int) -> ByteTerm:
        """A tensor in the dtype of the parameters."""
        return ByteTerm(name, self.tokens * elements * self.element_bytes)

    def statistics(self, name: str, elements: int) -> ByteTerm:
        """A tensor in at least fp32."""
        return ByteTerm(name, self.tokens * elements * self.statistic_bytes)

    def operand(self, name: str) -> ByteTerm:
        """The input of a product, of hidden size."""
        return self.own(name, self.hidden * self.gathered)

    def hidden_state(self, name: str) -> ByteTerm:
        """A tensor of hidden size between the regions."""
        return self.own(name, self.hidden)

    def inner_operand(self, name: str, elements: int) -> ByteTerm:
        """The input of a product, that is made in a region."""
        return self.kept(name, elements * self.gathered)

    def own(self, name: str, elements: int) -> ByteTerm:
        """A tensor between the regions."""
        return ByteTerm(name, self.between * elements * self.element_bytes)

    def own_statistics(self, name: str, elements: int) -> ByteTerm:
        """Likewise in at least fp32."""
        return ByteTerm(name, self.between * elements * self.statistic_bytes)


def _sizes(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> _Sizes:
    grid = strategy.grid
    tokens = b * s // grid.parts(grid.batch_axes)

    def local(dim: str, size: int) -> int:
        return largest_part(spec, dim, size, grid.side)

    return _Sizes(
        tokens=tokens // strategy.cp,
        between=tokens // strategy.hidden_parts[1],
        hidden=spec.hidden_size // grid.parts(grid.hidden_axes),
        heads=local("heads", spec.heads_size) // spec.head_dim,
        kv_heads=local("kv_heads", spec.kv_size) // spec.head_dim,
        head_dim=spec.head_dim,
        values=local("heads", spec.values_size),
        ffn=local("ffn", spec.ffn_size),
        expert_ffn=-(-spec.expert_size // (strategy.et if strategy.tensor.kind == "1d" else grid.side)),
        shared_ffn=local("ffn", spec.shared_ffn_size or 0),
        vocab=local("vocab", spec.vocab_size),
        element_bytes=strategy.recipe.parameter_bytes,
        statistic_bytes=strategy.recipe.statistic_bytes,
        gathered=grid.side if strategy.keeps_operands else 1,
    )


def _norm_terms(spec: ModelSpec, z: _Sizes, name: str) -> list[ByteTerm]:
    statistics = 2 if spec.norm == "layernorm" else 1
    of_rows = ByteTerm(f"{name} statistics", z.between * statistics * z.statistic_bytes)
    return [z.hidden_state(f"{name} input"), of_rows]


def _mlp_terms(spec: ModelSpec, z: _Sizes) -> list[ByteTerm]:
    num_first = 2 if spec.gated_mlp else 1
    return [
        z.operand("mlp input"),
        *_inner_terms(spec, z, z.ffn, spec.gated_mlp),
        *_weight_terms(z, "mlp", (num_first + 1) * z.ffn),
    ]


def _weight_terms(z: _Sizes, name: str, width: int) -> list[ByteTerm]:
    """Of weights [width, h] together, if they are kept as they were gathered."""
    return [ByteTerm(f"{name} weights, gathered", width * z.hidden * z.element_bytes)] if z.gathered > 1 else []


def _inner_terms(spec: ModelSpec, z: _Sizes, ffn: int, is_gated: bool) -> list[ByteTerm]:
    """Between the first and the last product of an MLP."""
    if not is_gated:
        return _plain_terms(z, ffn)
    terms = _gated_terms(z, ffn)
    return terms if spec.activation == "silu" else [*terms, z.kept("activated gate", ffn)]


def _plain_terms(z: _Sizes, ffn: int) -> list[ByteTerm]:
    return [z.kept("up", ffn), z.inner_operand("activated", ffn)]


def _gated_terms(z: _Sizes, ffn: int) -> list[ByteTerm]:
    """Of SwiGLU, and of experts with any activation."""
    return [z.kept("gate", ffn), z.kept("up", ffn), z.inner_operand("product", ffn)]


def choices_per_token(spec: ModelSpec) -> int:
    """Of how many experts a router says whether, and with what weight, they take a token."""
    return spec.experts_per_token if spec.gate.chooses == "tokens" else spec.num_experts


def expert_tokens(strategy: Strategy, b: int, s: int) -> int:
    """Tokens whose rows pass a rank's experts of a layer, of `b` sequences of `s` tokens: those of all ranks that share
    an expert's width."""
    return b * s * strategy.et // (strategy.cp * strategy.tp)


def expert_rows(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> int:
    """Rows of them, if their loads are even; where a capacity is of sequences that lie elsewhere too, as many as there
    may be."""
    gate, k, tokens = spec.gate, spec.experts_per_token, expert_tokens(strategy, b, s)
    if not gate.has_capacity:
        return tokens * k
    return min(tokens * choices_per_token(spec), _room(spec, strategy, b, s))


def imbalance_of(job: Job, strategy: Strategy, spec: ModelSpec) -> float:
    """Rows of the fullest rank over their mean: 1 where every rank has all experts, and no more than where one rank
    gets all rows, or all tokens choose each of its experts."""
    if strategy.ep == 1 or not spec.num_experts:
        return 1.0
    return min(job.imbalance, float(strategy.ep), spec.num_experts / choices_per_token(spec))


def fullest_rows(spec: ModelSpec, strategy: Strategy, b: int, s: int, imbalance: float) -> int:
    """:func:`expert_rows` that come to the fullest rank: no more than all tokens choose, or its experts take."""
    rows = expert_rows(spec, strategy, b, s)
    own = min(choices_per_token(spec), spec.num_experts // strategy.ep)
    most = expert_tokens(strategy, b, s) * strategy.ep * own
    if spec.gate.has_capacity:
        most = min(most, _room(spec, strategy, b, s))
    return max(rows, min(round(rows * imbalance), most))


def _room(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> int:
    """Rows that a rank's experts take of all ranks that share them; as many as all experts of one rank's tokens."""
    capacity = spec.gate.capacity(s, spec.num_experts, spec.experts_per_token)
    return b * strategy.sequences_together * spec.num_experts * capacity


def _rows(z: _Sizes, count: int) -> _Sizes:
    return replace(z, tokens=count, between=count)


def _expert_terms(spec: ModelSpec, strategy: Strategy, z: _Sizes, b: int, s: int, imbalance: float) -> list[ByteTerm]:
    """Router, rows by expert with what is inside and behind the experts, shared experts. The router's are of this
    rank's tokens, the experts' of those of all tp ranks."""
    rows, gate = _rows(z, expert_rows(spec, strategy, b, s)), spec.gate
    come = _rows(z, fullest_rows(spec, strategy, b, s, imbalance))
    choices = expert_tokens(strategy, b, s) * choices_per_token(spec)
    inside = _gated_terms(come, z.expert_ffn) if spec.has_gated_experts else _plain_terms(come, z.expert_ffn)
    terms = [
        *_router_terms(spec, strategy, z, b),
        ByteTerm("weights of choices", choices * z.statistic_bytes),
        ByteTerm("order of rows", rows.tokens * _INDEX_BYTES),
        ByteTerm("kept flags", z.between * choices_per_token(spec))
        if gate.has_capacity
        else ByteTerm("rows of tokens", choices * _INDEX_BYTES),
        come.kept("rows", z.hidden),
        *(ByteTerm(f"experts' {term.name}", term.bytes) for term in inside),
        rows.kept("experts' output", z.hidden),
    ]
    if spec.shared_ffn_size:
        shared = _inner_terms(spec, z, z.shared_ffn, spec.gated_mlp)
        terms += [ByteTerm(f"shared experts' {term.name}", term.bytes) for term in shared]
    if spec.shared_gate:
        terms += [z.hidden_state("shared experts' output"), z.own("shared gate", 1)]
    return terms


def _router_terms(spec: ModelSpec, strategy: Strategy, z: _Sizes, b: int) -> list[ByteTerm]:
    """Of it, those that are there until its gradient is."""
    own_choices = z.between * choices_per_token(spec)
    has_shares = strategy.hidden_parts[1] > 1 and spec.gate.balances_sequences
    return [
        z.hidden_state("mlp input"),
        z.own_statistics("router logits", spec.num_experts),
        ByteTerm("choices", own_choices * _INDEX_BYTES),
        ByteTerm("shares of whole sequences", b * spec.num_experts * _SHARE_BYTES * has_shares),
        *_noise_terms(spec, z),
    ]


def router_gradient_terms(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> list[ByteTerm]:
    """What is left of :func:`mlp_half_terms` of a layer of experts when these have their gradients and the router has
    not, with what that gradient takes: its mathematics is done again then."""
    z, gate = _sizes(spec, strategy, b, s), spec.gate
    per_choice = 1 + (gate.renormalise != "none")
    return [
        *_norm_terms(spec, z, "mlp norm"),
        *_router_terms(spec, strategy, z, b),
        z.own_statistics("scores", spec.num_experts * (1 + (gate.balance_loss > 0))),
        z.own_statistics("weights and their gradients", choices_per_token(spec) * per_choice),
        z.own_statistics("sums", (gate.renormalise != "none") + (gate.z_loss > 0)),
        ByteTerm("shares of sequences", b * spec.num_experts * z.statistic_bytes * (gate.balance_loss > 0)),
    ]


def _noise_terms(spec: ModelSpec, z: _Sizes) -> list[ByteTerm]:
    """Of a gate with noise, in training. What the router multiplies under jitter is not what shared experts do."""
    if spec.gate.noise == "gaussian":
        return [z.own_statistics("noise", spec.num_experts), z.own_statistics("deviation of noise", spec.num_experts)]
    if spec.gate.noise == "none":
        return []
    own = [z.hidden_state("router input")] if spec.shared_ffn_size else []
    return [ByteTerm("jitter", z.between * z.hidden * z.statistic_bytes), *own]


def layer_terms(
    spec: ModelSpec, strategy: Strategy, b: int, s: int, layer: int = 0, imbalance: float = 1.0
) -> list[ByteTerm]:
    """What one layer keeps of one micro-batch on one rank when nothing is recomputed.

    Args:
        spec: the model; of a mixture, experts are taken to be evenly loaded. On one process, without a capacity, it
            keeps as much whatever their loads.
        strategy: read for tp, sequence parallelism and precision.
        b: sequences of the micro-batch.
        s: tokens of a sequence.
        layer: which; all are alike but for a mixture's dense ones.
        imbalance: rows of the fullest of the ranks that share experts, over their mean.
    """
    z = _sizes(spec, strategy, b, s)
    return [
        *_norm_terms(spec, z, "attention norm"),
        z.operand("attention input"),
        *(_projection_terms(spec, strategy, z) if spec.latent is None else _latent_terms(spec.latent, z)),
        *recomputed_core_terms(spec, strategy, b, s),
        *mlp_half_terms(spec, strategy, b, s, layer, imbalance),
    ]


def _projection_terms(spec: ModelSpec, strategy: Strategy, z: _Sizes) -> list[ByteTerm]:
    """Between attention's input and its core."""
    q, kv = z.heads * z.head_dim, z.kv_heads * z.head_dim
    qk_norm = [
        z.kept("q and k before their norms", q + kv),
        z.statistics("q and k norm statistics", z.heads + z.kv_heads),
    ]
    return [
        *(qk_norm if spec.qk_norm else []),
        z.kept("q", q),
        z.kept("k", _exchanged_kv(strategy, z)),
        z.kept("v", _exchanged_kv(strategy, z)),
        *_weight_terms(z, "attention", 2 * (q + kv)),
    ]


def _latent_terms(latent: LatentAttention, z: _Sizes) -> list[ByteTerm]:
    """Likewise: latents before and behind their norms; values are as wide as keys."""
    latents = {"queries' latent": (latent.q_lora_rank or 0, latent.q_lora_rank or 0),
               "latent of keys and values": (latent.kv_down_size, latent.kv_lora_rank)}  # fmt: skip
    return [
        *(term for name, (whole, normed) in latents.items() if whole
          for term in (z.own(name, whole), z.own(f"{name}, normed", normed),
                       ByteTerm(f"{name}, statistics", z.between * z.statistic_bytes))),
        *(z.kept(name, z.heads * z.head_dim) for name in ("q", "k", "v")),
    ]  # fmt: skip


def recomputed_core_terms(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> list[ByteTerm]:
    """Of :func:`layer_terms`, what selective recompute does not keep: what comes out of attention's core."""
    z = _sizes(spec, strategy, b, s)
    kind = strategy.context.kind if strategy.cp > 1 else None
    is_copied = spec.values_size < spec.heads_size and z.heads > 1  # of one head, the narrow part is a view
    output, for_o = (z.kept("attention output", width) for width in (z.heads * z.head_dim, z.values))
    if kind == "ring-self-attention":
        return [for_o, z.kept("probabilities", z.heads * s)]
    if kind == "ulysses":
        return [for_o, replace(output, name="attention output on its way"), z.statistics("log-sum-exp", z.heads)]
    further = [replace(for_o, name="attention output, narrowed")] if is_copied else []
    if z.gathered > 1:
        further = [z.inner_operand("attention output, gathered", z.values)]
    return [output, *further, z.statistics("log-sum-exp", z.heads)]


def _exchanged_kv(strategy: Strategy, z: _Sizes) -> int:
    """Elements of k, or v, per token. Ulysses keeps them as attention sees them: of all ranks' tokens fewer heads, as
    many in all, unless ranks exceed the heads and each is repeated."""
    is_repeated = strategy.cp > 1 and strategy.context.kind == "ulysses"
    return (max(z.kv_heads, strategy.cp) if is_repeated else z.kv_heads) * z.head_dim


def layer_input_terms(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> list[ByteTerm]:
    """What is kept of a group of layers under full recompute: the input of the first. Their :func:`layer_terms`, less
    that input, live besides while the group's backward runs. Source: Chen et al. 2016."""
    return [_sizes(spec, strategy, b, s).hidden_state("layer input")]


def mlp_half_terms(
    spec: ModelSpec, strategy: Strategy, b: int, s: int, layer: int = 0, imbalance: float = 1.0
) -> list[ByteTerm]:
    """Of :func:`layer_terms`, those of the mlp and its norm: free when backward comes to attention."""
    z = _sizes(spec, strategy, b, s)
    mlp = _expert_terms(spec, strategy, z, b, s, imbalance) if spec.is_sparse(layer) else _mlp_terms(spec, z)
    return [*_norm_terms(spec, z, "mlp norm"), *mlp]


def postponed_mlp_half_terms(
    spec: ModelSpec, strategy: Strategy, b: int, s: int, layer: int = 0, imbalance: float = 1.0
) -> list[ByteTerm]:
    """Of :func:`postponed_layer_terms`, those of the mlp, and what o then adds."""
    z = _sizes(spec, strategy, b, s)
    if spec.is_sparse(layer):
        mlp = _postponed_expert_terms(spec, z, fullest_rows(spec, strategy, b, s, imbalance))
    else:
        mlp = _postponed_mlp_terms(spec, z, z.ffn)
    return [*mlp, z.kept("gradient of o", z.hidden)]


def router_input_bytes(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> int:
    """What a router and shared experts both keep for their gradients; 0 where they read different things."""
    if not spec.shared_ffn_size or spec.gate.noise == "jitter":
        return 0
    return _sizes(spec, strategy, b, s).hidden_state("mlp input").bytes


def output_gradient_bytes(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> int:
    """The gradient of a layer's output, as its last product sees it."""
    z = _sizes(spec, strategy, b, s)
    return z.kept("gradient of down", z.hidden).bytes


def postponed_layer_terms(
    spec: ModelSpec, strategy: Strategy, b: int, s: int, layer: int = 0, imbalance: float = 1.0
) -> list[ByteTerm]:
    """What one layer keeps of one micro-batch from I to W, where a schedule runs them apart: of each linear layer its
    input and the gradient of its output. No less than :func:`layer_terms`, but for statistics.

    Source: Qi et al. 2024 (zero bubble), table 1.
    """
    z = _sizes(spec, strategy, b, s)
    q, kv = z.heads * z.head_dim, z.kv_heads * z.head_dim
    plain = [z.kept("gradients of q, k and v", q + 2 * kv)]
    return [
        z.operand("attention input"),
        *(plain if spec.latent is None else _postponed_latent_terms(spec.latent, z)),
        z.inner_operand("attention output", z.values),
        *postponed_mlp_half_terms(spec, strategy, b, s, layer, imbalance),
    ]


def _postponed_latent_terms(latent: LatentAttention, z: _Sizes) -> list[ByteTerm]:
    """Inputs of the layers behind the latents, and gradients of what comes out of all."""
    q_rank = latent.q_lora_rank or 0
    return [
        z.own("latents, normed", q_rank + latent.kv_lora_rank),
        z.own("gradients of latents", q_rank + latent.kv_down_size),
        z.kept("gradients of q, k and v", z.heads * (z.head_dim + latent.kv_up_size)),
    ]


def _postponed_mlp_terms(spec: ModelSpec, z: _Sizes, ffn: int) -> list[ByteTerm]:
    inner = [z.inner_operand("down input", ffn), z.kept("gradient of up", ffn), z.kept("gradient of down", z.hidden)]
    gate = [z.kept("gradient of gate", ffn)] if spec.gated_mlp else []
    return [z.operand("mlp input"), *inner, *gate]


def _postponed_expert_terms(spec: ModelSpec, z: _Sizes, num_rows: int) -> list[ByteTerm]:
    """The router's gradient is a part of I."""
    rows = _rows(z, num_rows)
    inner = _postponed_mlp_terms(spec.model_copy(update={"gated_mlp": spec.has_gated_experts}), rows, z.expert_ffn)
    shared = _postponed_mlp_terms(spec, z, z.shared_ffn) if spec.shared_ffn_size else []
    return [ByteTerm(f"{whose} {term.name}", term.bytes)
            for whose, terms in (("experts'", inner), ("shared experts'", shared)) for term in terms]  # fmt: skip


def postponed_head_terms(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> list[ByteTerm]:
    """Likewise the head: its input, and the gradient of the logits."""
    z = _sizes(spec, strategy, b, s)
    return [z.operand("head input"), z.kept("gradient of logits", z.vocab)]


def embedding_terms(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> list[ByteTerm]:
    """What the vocabulary-parallel embedding keeps: the ids it looked up and which of them lie on other ranks.

    On a grid every rank looks up the ids of its whole grid; of cp ranks each its own.
    """
    tokens = b * s // strategy.cp // strategy.grid.sizes.get(TP_DEPTH, 1)
    terms = [ByteTerm("token ids", tokens * _INDEX_BYTES), ByteTerm("ids of other ranks", tokens * _FLAG_BYTES)]
    positions = s // strategy.hidden_parts[1]
    return [*terms, ByteTerm("positions", positions * _INDEX_BYTES)] if spec.positions == "learned" else terms


def head_terms(spec: ModelSpec, strategy: Strategy, b: int, s: int) -> list[ByteTerm]:
    """What the final norm and the head keep; the logits are the loss's."""
    z = _sizes(spec, strategy, b, s)
    return [*_norm_terms(spec, z, "final norm"), z.operand("head input"), *_weight_terms(z, "head", z.vocab)]


def loss_terms(spec: ModelSpec, strategy: Strategy, b: int, s: int, num_sums: int = 2) -> list[ByteTerm]:
    """What the vocabulary-parallel cross entropy keeps: exponentials in the logits' place, and five numbers a token.

    Args:
        num_sums: numbers of a token that are summed over tp, and kept (`Job.num_loss_sums`), with another for the
            z-loss.
    """
    z = _sizes(spec, strategy, b, s)
    return [
        z.statistics("exponentials", z.vocab),
        z.statistics("sums and target logits", num_sums),
        ByteTerm("targets", z.tokens * _INDEX_BYTES),
        ByteTerm("target flags", 2 * z.tokens * _FLAG_BYTES),
    ]
