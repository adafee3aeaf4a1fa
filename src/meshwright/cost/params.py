"""How many parameters: by part of the model, in matrix products, and on one rank.

Everything is a sum over `ModelSpec.parameters()` or over a rank's placements; there is no second formula to keep in
step. `N` below is the total, `N_mm` the parameters that take part in matrix products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from meshwright.core.model import ModelSpec
from meshwright.core.placement import placements
from meshwright.core.strategy import Strategy

PARTS = ("embedding", "attention", "mlp", "router", "norm", "head")
"""Parts of a model in the order in which tables show them."""

MATMUL_PARTS = ("attention", "mlp", "router", "head")


def parameter_counts(spec: ModelSpec) -> dict[str, int]:
    """Part → number of parameters, for the parts that the model has. A tied head has none of its own."""
    counts = Counter[str]()
    for param in spec.parameters():
        counts[param.part] += param.numel
    return _ordered(counts)


def matmul_parameters(spec: ModelSpec) -> int:
    """N_mm: parameters that one token meets in a matrix product.

    The head counts, tied or not; the look-up of tokens and positions, biases and norms do not. Of the experts
    those count that one token is sent to.

    Source: Kaplan et al. 2020, table 1 (non-embedding parameters), with the head added as in Narayanan et al. 2021.
    """
    dense = experts = 0
    for param in spec.parameters():
        if param.part not in MATMUL_PARTS or len(param.shape) < 2:
            continue
        if "experts" in param.dims:
            experts += param.numel
        else:
            dense += param.numel
    tied_head = spec.vocab_size * spec.hidden_size if spec.tied_embeddings else 0
    active = experts * spec.experts_per_token // spec.num_experts if spec.num_experts else 0
    return dense + active + tied_head


def local_parameter_counts(spec: ModelSpec, strategy: Strategy, at: Mapping[str, int]) -> dict[str, int]:
    """Part → number of elements that the rank at mesh coordinates `at` holds (dp replicates them all).

    A tied embedding counts as embedding on both of the stages that hold a copy.
    """
    counts = Counter[str]()
    for placement in placements(spec, strategy, at):
        counts[placement.part] += placement.box.numel
    return _ordered(counts)


def local_parameters(spec: ModelSpec, strategy: Strategy, at: Mapping[str, int]) -> int:
    """Number of elements that the rank at mesh coordinates `at` holds."""
    return sum(local_parameter_counts(spec, strategy, at).values())


def _ordered(counts: Counter[str]) -> dict[str, int]:
    return {part: counts[part] for part in PARTS if part in counts}
