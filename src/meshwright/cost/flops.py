"""Floating-point operations of a training step, each a list of named terms with its source.

    per token   forward    2·N_mm + 4·L·a·d·s_eff      N_mm: parameters in matrix products (cost.params); of latent
                                                       attention d is the mean of its keys' and its values'
                training   3 × forward                 backward multiplies by weights and by activations
                recompute  + forward of the layers     (full: each layer runs a second time; the head does not)
                           + attention's core          (selective: scores and values, 4·L·a·d·s_eff)

`s_eff` is the number of keys that a query meets: s under the full mask, s/2 under the causal one (a sliding window is
not discounted). A multiply and an add count as two; softmax, norms, biases and activations are left out. MODEL FLOPs
are those of the algorithm, counted under the full mask as the papers do; HARDWARE FLOPs include what is computed again.

Sources: Narayanan et al. 2021, §5.1 and appendix; Korthikanti et al. 2022, appendix A; Chowdhery et al. 2022 (PaLM),
appendix B (model FLOPs utilisation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.placement import largest_part
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import imbalance_of
from meshwright.cost.context import score_share

NARAYANAN = "Narayanan et al. 2021, appendix"
GQA = "Ainslie et al. 2023, §2.2"
GATED = "Shazeer 2020, eq. 6"
MLA = "DeepSeek-AI 2024 (V2), §2.1"
MOE = "Jiang et al. 2024, §2.1"
EXPERTS, SCORES, VALUES = "experts", "attention scores", "attention over values"
WITHOUT_WEIGHTS = (SCORES, VALUES)
"""Terms whose products are of activations with activations."""


@dataclass(frozen=True, slots=True)
class FlopTerm:
    """One named part of a count of FLOPs."""

    name: str
    flops: int
    source: str


def total_flops(terms: Iterable[FlopTerm]) -> int:
    """Sum of terms."""
    return sum(term.flops for term in terms)


def layer_forward_terms(
    spec: ModelSpec, seq_length: int, *, causal: bool = False, tp: int = 1, layer: int = 0
) -> tuple[FlopTerm, ...]:
    """Forward FLOPs of one layer for one token, on rank 0 of a tp axis (which holds the largest pieces).

    Args:
        spec: the model.
        seq_length: tokens of a sequence, s.
        causal: count half of the score matrix, as kernels with a causal mask compute it.
        tp: size of the tensor-parallel axis. Key and value projections are repeated where tp exceeds the key/value
            heads; the router always is.
        layer: which; all are alike but for a mixture's dense ones.
    """
    h, heads = spec.hidden_size, largest_part(spec, "heads", spec.heads_size, tp)
    values = largest_part(spec, "heads", spec.values_size, tp)
    terms = [
        *_projection_terms(spec, tp),
        FlopTerm(SCORES, 2 * heads * seq_length // (2 if causal else 1), NARAYANAN),
        FlopTerm(VALUES, 2 * values * seq_length // (2 if causal else 1), NARAYANAN),
        FlopTerm("output projection", 2 * h * values, NARAYANAN),
        *(_expert_terms(spec, tp) if spec.is_sparse(layer) else _mlp_terms(spec, "mlp", spec.ffn_size, tp)),
    ]
    return tuple(terms)


def layer_weights(spec: ModelSpec, strategy: Strategy, layer: int = 0) -> int:
    """Weights of one layer's products on the first rank of tp: half the FLOPs of a token, but of experts all that the
    rank holds, not those that a token is sent to."""
    total = 0
    for term in layer_forward_terms(spec, 0, tp=strategy.tp, layer=layer):
        share = 1.0
        if term.name == EXPERTS:
            share = spec.num_experts / spec.experts_per_token / strategy.ep * strategy.tp / strategy.et
        total += round(term.flops * share) // 2
    return total


def _projection_terms(spec: ModelSpec, tp: int) -> Iterator[FlopTerm]:
    """To queries, keys and values; those to latents are whole on every rank of tp."""
    h, heads = spec.hidden_size, largest_part(spec, "heads", spec.heads_size, tp)
    if spec.latent is None:
        kv = largest_part(spec, "kv_heads", spec.kv_size, tp)
        yield FlopTerm("query projection", 2 * h * heads, NARAYANAN)
        yield FlopTerm("key and value projections", 2 * h * 2 * kv, GQA)
        return
    latent, up = spec.latent, largest_part(spec, "heads", spec.num_heads * spec.latent.kv_up_size, tp)
    yield FlopTerm("latents", 2 * h * ((latent.q_lora_rank or 0) + latent.kv_down_size), MLA)
    yield FlopTerm("query projection", 2 * (latent.q_lora_rank or h) * heads, MLA)
    yield FlopTerm("key and value projections", 2 * latent.kv_lora_rank * up, MLA)


def _mlp_terms(spec: ModelSpec, name: str, ffn_size: int, tp: int) -> tuple[FlopTerm, ...]:
    ffn, matrices = largest_part(spec, "ffn", ffn_size, tp), 3 if spec.gated_mlp else 2
    flops = 2 * spec.hidden_size * ffn * matrices
    return (FlopTerm(name, flops, GATED if spec.gated_mlp else NARAYANAN),)


def _expert_terms(spec: ModelSpec, tp: int) -> Iterator[FlopTerm]:
    """The experts of one token, the router's product with all, what every token passes."""
    h, ffn, matrices = spec.hidden_size, largest_part(spec, "ffn", spec.expert_size, tp), 2 + spec.has_gated_experts
    yield FlopTerm(EXPERTS, 2 * h * ffn * matrices * spec.experts_per_token, MOE)
    yield FlopTerm("router", 2 * h * spec.num_experts * (1 + (spec.gate.noise == "gaussian")), MOE)
    if spec.shared_ffn_size:
        yield from _mlp_terms(spec, "shared experts", spec.shared_ffn_size, tp)
    if spec.shared_gate:
        yield FlopTerm("shared gate", 2 * h, MOE)


def head_forward_terms(spec: ModelSpec, *, tp: int = 1) -> tuple[FlopTerm, ...]:
    """Forward FLOPs of the output head for one token, on rank 0 of a tp axis. The look-up of tokens costs none."""
    vocab = largest_part(spec, "vocab", spec.vocab_size, tp)
    return (FlopTerm("head", 2 * spec.hidden_size * vocab, NARAYANAN),)


# --- one token of the whole model --------------------------------------------------------------------------


def forward_terms(spec: ModelSpec, seq_length: int, *, causal: bool = False) -> tuple[FlopTerm, ...]:
    """Forward FLOPs of the model for one token; the terms of a layer are multiplied by the layers."""
    return (*layers_forward_terms(spec, range(spec.num_layers), seq_length, causal=causal), *head_forward_terms(spec))


def layers_forward_terms(
    spec: ModelSpec, layers: range, seq_length: int, *, causal: bool = False, tp: int = 1
) -> tuple[FlopTerm, ...]:
    """Forward FLOPs of several layers for one token; terms of the same name are added up."""
    sparse = next(filter(spec.is_sparse, layers), None)
    dense = next((layer for layer in layers if not spec.is_sparse(layer)), None)
    num_sparse = sum(map(spec.is_sparse, layers)) if spec.num_experts else 0
    total: dict[str, FlopTerm] = {}
    for layer, count in ((sparse, num_sparse), (dense, len(layers) - num_sparse)):
        if layer is None:
            continue
        for term in layer_forward_terms(spec, seq_length, causal=causal, tp=tp, layer=layer):
            before = total[term.name].flops if term.name in total else 0
            total[term.name] = FlopTerm(term.name, before + term.flops * count, term.source)
    return tuple(total.values())


def forward_flops_per_token(spec: ModelSpec, seq_length: int, *, causal: bool = False) -> int:
    """2·N_mm + 4·L·a·d·s_eff."""
    return total_flops(forward_terms(spec, seq_length, causal=causal))


def training_flops_per_token(spec: ModelSpec, seq_length: int, recompute: str = "none", *, causal: bool = False) -> int:
    """Forward, backward (twice forward), and what every layer runs once more with `recompute`."""
    terms = layers_forward_terms(spec, range(spec.num_layers), seq_length, causal=causal)
    again = StageFlops(total_flops(terms), 0, _scores(terms)).again(recompute)
    return 3 * forward_flops_per_token(spec, seq_length, causal=causal) + again


# --- one step of a job -------------------------------------------------------------------------------------


def model_flops(spec: ModelSpec, job: Job, *, causal: bool = False) -> int:
    """FLOPs that one step of the algorithm needs, over all ranks."""
    return training_flops_per_token(spec, job.seq_length, causal=causal) * job.tokens_per_step


def hardware_flops(spec: ModelSpec, job: Job, recompute: str, *, causal: bool = False) -> int:
    """FLOPs that one step computes, over all ranks: those of the model and those of recomputation."""
    return training_flops_per_token(spec, job.seq_length, recompute, causal=causal) * job.tokens_per_step


@dataclass(frozen=True, slots=True)
class StageFlops:
    """Forward FLOPs of one micro-batch on one rank of a pipeline stage. Backward counts twice as many."""

    layers: int
    head: int
    scores: int = 0
    """Of the layers', those of attention scores and values, which have no weights."""

    @property
    def forward(self) -> int:
        return self.layers + self.head

    @property
    def weight_gradients(self) -> int:
        """Of backward, what W computes where it is run apart: as much as forward in products with weights.

        Source: Qi et al. 2024 (zero bubble), table 1.
        """
        return self.layers - self.scores + self.head

    def training(self, recompute: str) -> int:
        """Forward, backward and recomputation of one micro-batch."""
        return 3 * self.forward + self.again(recompute)

    def again(self, recompute: str) -> int:
        """Recomputation, where it is of all layers."""
        return {"none": 0, "full": self.layers, "selective": self.scores}[recompute]


def _scores(terms: Iterable[FlopTerm]) -> int:
    return total_flops(term for term in terms if term.name in WITHOUT_WEIGHTS)


def stage_flops(spec: ModelSpec, job: Job, strategy: Strategy, stage: int, *, causal: bool = True) -> StageFlops:
    """What the step-time model prices: FLOPs that rank 0 of the tp axis computes on a stage; of the ranks of a cp axis
    the one with most scores.

    Causal by default: the attention kernels leave out the masked half.
    """
    grid, tokens = strategy.grid, strategy.micro_batch_size * job.seq_length // strategy.cp
    tokens = tokens * grid.side // strategy.tp  # a grid cuts heads and columns by its side, and sequences by the rest
    layers = strategy.stage_layers(spec.num_layers)[stage]
    terms = layers_forward_terms(spec, layers, job.seq_length, causal=causal, tp=grid.side)
    even = _scores(terms)
    scores = round(even * score_share(strategy, job.seq_length)) if causal else even
    _, is_last = strategy.stage_ends(stage)
    head = total_flops(head_forward_terms(spec, tp=grid.side)) if is_last else 0
    experts = total_flops(term for term in terms if term.name == EXPERTS)
    work = total_flops(terms) - even + scores + round(experts * (imbalance_of(job, strategy, spec) - 1))
    return StageFlops(layers=tokens * work, head=tokens * head, scores=tokens * scores)


# --- utilisation -------------------------------------------------------------------------------------------


def mfu(spec: ModelSpec, job: Job, step_s: float, num_devices: int, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation: the step's model FLOPs (full mask) over what the devices could do in `step_s`.

    Source: Chowdhery et al. 2022, appendix B.
    """
    return model_flops(spec, job) / (step_s * num_devices * peak_flops_per_s)
