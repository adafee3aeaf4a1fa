"""Mixtures of experts, and legal layouts of them in which every choice about experts meets every other choice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from tests.parallel.layouts import make_plan, mixture

MAX_RANKS = 8

MIXTURES = {
    "mixture": mixture(),
    "batch": mixture({"balance_over": "batch"}),
    "shared": mixture(shared_ffn_size=16, shared_gate=True, dense_layers=None),
    "sigmoid": mixture(
        {"score": "sigmoid", "bias": True, "bias_rate": 0.01, "scale": 2.5, "num_groups": 4, "groups_per_token": 2},
        shared_ffn_size=8, qk_norm=True,
    ),
    "capacity": mixture(
        {"capacity_factor": 0.75, "renormalise": "after_drop", "noise": "gaussian"}, gated_mlp=False, activation="gelu"
    ),
    "switch": mixture(
        {"renormalise": "none", "capacity_factor": 1.0, "noise": "jitter", "jitter": 0.5},
        experts_per_token=1, tied_embeddings=True,
    ),
    "empty": mixture({"capacity_factor": 0.0, "renormalise": "after_drop"}, num_layers=2),
    "choice": mixture({"chooses": "experts", "balance_loss": 0.0}),
}  # fmt: skip

OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "moments": {"optimizer": "cpu", "gradients": "cpu", "group_numel": 64},
    "states": {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu", "group_numel": 64},
    "activations": {"activations": "cpu"},
}
CONTEXTS: dict[str, dict[str, Any]] = {
    "none": {},
    "ring zigzag": {"degree": 2, "balance": "zigzag"},
    "ulysses striped": {"degree": 2, "kind": "ulysses", "balance": "striped"},
}

FACTORS: dict[str, tuple[Any, ...]] = {
    "gate": tuple(MIXTURES),
    "degree": (1, 2, 4, 8),
    "tensor": (None, 1, 2, 4),
    "dp": (1, 2, 4, 8),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "context": tuple(CONTEXTS),
    "zero": (0, 1, 2, 3),
    "schedule": ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"),
    "num_micro_batches": (1, 2, 3, 4),
    "micro_batch_size": (1, 2),
    "recompute": ("none", "full", "selective"),
    "sequence": ("none", "megatron"),
    "offload": tuple(OFFLOADS),
}
ABOUT_EXPERTS = ("gate", "degree", "tensor")
"""Pairs with degree or tensor are covered; those of other factors are by `tests.parallel.cases`."""
DEGREES = ("degree", "tensor", "dp", "tp", "pp")
MET_BY_GATES = ("degree", "tensor", "context", "sequence", "recompute")
"""What gates are paired with: what divides their tokens, or runs them again; with all there would be too many."""
MOST_PAIRED = 2
"""Degree up to which pairs count: with larger ones there would be too many."""

Case = Mapping[str, Any]
"""Factor → value."""


def plan_of(case: Case) -> Plan:
    """The plan of a case. Raises MeshwrightError where it is not legal."""
    split = {name: case[name] for name in FACTORS if name not in (*ABOUT_EXPERTS, "context", "offload")}
    return make_plan(
        MIXTURES[case["gate"]],
        expert={"degree": case["degree"], "tensor": case["tensor"]},
        context=CONTEXTS[case["context"]],
        offload=OFFLOADS[case["offload"]],
        num_chunks=2 if case["schedule"] == "interleaved-1f1b" else 1,
        **split,
    )


def legal_cases(seed: int, tries: int) -> list[Case]:
    """Those of so many random cases that no rule forbids. Degrees are drawn so that they fit the ranks."""
    draw, found = random.Random(seed), list[Case]()
    for _ in range(tries):
        case = {name: draw.choice(values) for name, values in FACTORS.items()}
        ranks = case["dp"] * case["tp"] * (1 if case["context"] == "none" else 2)
        if ranks * case["pp"] > MAX_RANKS or ranks % (case["degree"] * (case["tensor"] or 1)):
            continue
        if case["pp"] == 1 and case["schedule"] not in ("gpipe", "1f1b"):
            continue
        try:
            plan_of(case)
        except MeshwrightError:
            continue
        found.append(case)
    return found


def pairs_of(case: Case) -> Iterator[tuple[Any, ...]]:
    """Each pair of choices of a case of which one is about experts, of degrees those that count."""
    for a, b in combinations(FACTORS, 2):
        is_small = all(name not in DEGREES or (case[name] or 1) <= MOST_PAIRED for name in (a, b))
        if a in ABOUT_EXPERTS and is_small and (a != "gate" or b in MET_BY_GATES):
            yield a, case[a], b, case[b]


def work(case: Case) -> float:
    """Processor time of a case, roughly: what each rank needs to start, and its micro-batches."""
    ranks = case["dp"] * case["tp"] * case["pp"] * (1 if case["context"] == "none" else 2)
    return ranks * (10.0 + case["num_micro_batches"])


def covering(cases: Sequence[Case]) -> list[Case]:
    """A few of the cases, little work in sum, with every pair that any of them has. Greedy."""
    missing, chosen = {pair for case in cases for pair in pairs_of(case)}, list[Case]()
    while missing:
        best = max(cases, key=lambda case: sum(pair in missing for pair in pairs_of(case)) / work(case))
        chosen.append(best)
        missing.difference_update(pairs_of(best))
    return chosen
