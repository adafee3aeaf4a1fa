"""Every legal small layout, and a few of them that together cover all pairs of choices."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from meshwright.core.layouts import Tensor, grid
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.rules import violations
from meshwright.core.strategy import Strategy
from tests.parallel.layouts import SEQ_LENGTH, gpt2, llama, make_job, make_plan, qwen3

MAX_RANKS = 8
DEGREES = ("dp", "tp", "pp")
ZERO_STAGES = ("0", "1", "2", "3", "3 kept", "2 each", "3 each")
"""`kept`: blocks stay gathered until the step ends; `each`: beside a pipeline, reduced in each micro-batch."""

MODELS: dict[str, ModelSpec] = {
    "llama": llama(num_layers=3),
    "qwen3": qwen3(num_layers=5),
    "gpt2": gpt2(num_layers=2),
    # Odd degrees: heads that 3 divides, wider together than the hidden size, biases on q, k, v only.
    "qwen2": llama(family="qwen2", name="tiny-qwen2", num_layers=4, num_heads=6, num_kv_heads=3, qkv_bias=True),
    # High degrees: eight heads over two key/value heads, and a layer for each of eight stages.
    "deep": qwen3(name="tiny-deep", num_heads=8, num_kv_heads=2, num_layers=8, ffn_size=16),
}

FURTHER_SCHEDULES = ("interleaved-1f1b v2", "bfs v2", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")
"""Several stages per rank (v: as many as a strategy says), split backwards, two directions."""
MET_BY_FURTHER_SCHEDULES = ("tp", "tensor", "zero", "recompute", "sequence")
"""The factors that they are paired with; with all there would be too many layouts to test."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "dp": tuple(range(1, MAX_RANKS + 1)),
    "tp": tuple(range(1, MAX_RANKS + 1)),
    "pp": tuple(range(1, MAX_RANKS + 1)),
    "tensor": ("1d", "2d", "2.5d", "3d"),
    "zero": ZERO_STAGES,
    "schedule": (*("naive", "gpipe", "1f1b"), *FURTHER_SCHEDULES),
    "num_micro_batches": (1, 2, 3, 4, 5),
    "micro_batch_size": (1, 2),
    "recompute": ("none", "full"),
    "sequence": ("none", "megatron"),
    "stages": ("even", "last heavy"),
    "bucket_bytes": (1, 4000, 25 * 2**20),
}

GRIDS = {"2d": (4, Tensor(kind="2d")), "2.5d": (8, Tensor(kind="2.5d", depth=2)), "3d": (8, Tensor(kind="3d"))}
"""Kind → the one size of tp that it is tried with, and how the ranks lie."""
MET_BY_GRIDS = {
    "2d": ("model", "zero", "schedule", "recompute"),
    "2.5d": ("model", "recompute"),
    "3d": ("model", "recompute"),
}
"""The factors that they are paired with, as above; those of eight ranks leave none for other axes."""

MET_BY: dict[str, Mapping[str, Sequence[str]]] = {
    "schedule": dict.fromkeys(FURTHER_SCHEDULES, MET_BY_FURTHER_SCHEDULES),
    "tensor": MET_BY_GRIDS,
}

Case = Mapping[str, Any]
"""Factor → value."""


def stage_list(case: Case) -> tuple[int, ...] | None:
    """Layers of each stage: None leaves the split to the strategy; otherwise the last stage takes all extra ones."""
    if case["stages"] == "even":
        return None
    stages = strategy_of(case).num_parts
    return (1,) * (stages - 1) + (MODELS[case["model"]].num_layers - stages + 1,)


def strategy_of(case: Case) -> Strategy:
    """Its degrees, schedule, micro-batches and ZeRO stage: all that decides whether it is legal for a model.

    A micro-batch has as many sequences as a grid cuts it into, so that `micro_batch_size` counts those of a rank.
    """
    schedule, _, chunks = case["schedule"].partition(" v")
    names = ("dp", "tp", "pp", "num_micro_batches")
    zero = {"zero": int(case["zero"][0]), "keep_gathered": "kept" in case["zero"]}
    zero["reduce_each"] = "each" in case["zero"]
    values = {name: case[name] for name in names}
    return Strategy(schedule=schedule, num_chunks=int(chunks or 1), **zero, **_tensor(case), **values)


def _tensor(case: Case) -> dict[str, Any]:
    """How its tp ranks lie, and the micro-batch that they share."""
    if case["tensor"] == "1d":
        return {"micro_batch_size": case["micro_batch_size"]}
    tp, tensor = GRIDS[case["tensor"]]
    lies = grid(tensor, tp)
    return {"tensor": tensor, "micro_batch_size": case["micro_batch_size"] * lies.parts(lies.batch_axes)}


def plan_of(case: Case, precision: str = "fp64") -> Plan:
    """The plan of a case."""
    chosen = strategy_of(case).model_dump(exclude_unset=True)
    split = {factor: case[factor] for factor in ("recompute", "sequence", "bucket_bytes")}
    layers = stage_list(case)
    return make_plan(MODELS[case["model"]], layers_per_stage=layers, precision=precision, **split, **chosen)


def legal_cases() -> list[Case]:
    """All combinations that no rule forbids, in a fixed order."""
    names = list(FACTORS)
    rest = [dict(zip(names[5:], values, strict=True)) for values in product(*(FACTORS[name] for name in names[5:]))]
    cases: list[Case] = []
    legal: dict[tuple[Any, ...], bool] = {}
    for model, dp, tp, pp, tensor in product(*(FACTORS[name] for name in names[:5])):
        degrees = {"model": model, "dp": dp, "tp": tp, "pp": pp, "tensor": tensor}
        is_of_size = tensor not in GRIDS or tp == GRIDS[tensor][0]
        if dp * tp * pp > MAX_RANKS or not is_of_size or not _is_legal(degrees):
            continue
        here = (case for other in rest if _is_for(case := {**degrees, **other}))
        cases += [case for case in here if case["schedule"] not in FURTHER_SCHEDULES or _is_legal_order(case, legal)]
    return cases


def _is_for(case: Case) -> bool:
    """Whether a choice is there at these degrees: some only with a pipeline, and tokens are divided evenly over tp."""
    tp, is_grid = case["tp"], case["tensor"] in GRIDS
    if case["sequence"] != "none" and (tp == 1 or SEQ_LENGTH % tp or is_grid):
        return False
    return case["pp"] > 1 or (case["stages"] == "even" and "each" not in case["zero"])


def _is_legal_order(case: Case, known: dict[tuple[Any, ...], bool]) -> bool:
    """Whether the schedule can be had here; remembered, since most factors don't matter."""
    key = tuple(case[factor] for factor in ("model", "pp", "schedule", "num_micro_batches", "zero"))
    if key not in known:
        split = strategy_of({**case, "dp": 1, "tp": 1, "tensor": "1d"})
        known[key] = not violations(split, MODELS[case["model"]], *make_job(split))
    return known[key]


def _is_legal(degrees: Case) -> bool:
    """Whether a model can be split to these degrees, in this kind of tensor parallelism."""
    plain = {"zero": "0", "schedule": "1f1b", "num_micro_batches": 1, "micro_batch_size": 1}
    split = strategy_of({**degrees, **plain})
    return not violations(split, MODELS[degrees["model"]], *make_job(split))


def pairs_of(case: Case) -> Iterator[tuple[Any, ...]]:
    """What a case covers: its degrees together, and each pair of choices (of degrees, those up to 4)."""
    yield "degrees", case["dp"], case["tp"], case["pp"], case["tensor"]
    for a, b in pairs_that_meet(case):
        if all(factor not in DEGREES or case[factor] <= 4 for factor in (a, b)):
            yield a, case[a], b, case[b]


def pairs_that_meet(case: Case) -> Iterator[tuple[str, str]]:
    """Of which factors pairs count: all, but where a choice is paired with a few others only."""
    limits = {factor: met[case[factor]] for factor, met in MET_BY.items() if case[factor] in met}
    for a, b in combinations(case, 2):
        if not limits or ((a not in limits or b in limits[a]) and (b not in limits or a in limits[b])):
            yield a, b


def all_pairs(cases: Iterable[Case]) -> set[tuple[Any, ...]]:
    """What any of them covers: :func:`pairs_of` each, but column by column, of many cases."""
    alike: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for case in cases:
        alike[tuple(case[factor] for factor in MET_BY)].append(case)
    found: set[tuple[Any, ...]] = set()
    for members in alike.values():
        columns = {factor: [case[factor] for case in members] for factor in members[0]}
        together = zip(*(columns[factor] for factor in ("dp", "tp", "pp", "tensor")), strict=True)
        found.update(("degrees", *values) for values in set(together))
        for a, b in pairs_that_meet(members[0]):
            pairs = set(zip(columns[a], columns[b], strict=True))
            is_large = [factor in DEGREES for factor in (a, b)]
            found.update((a, x, b, y) for x, y in pairs if not (is_large[0] and x > 4) and not (is_large[1] and y > 4))
    return found


def work(case: Case) -> float:
    """Processor time of comparing a case with one process, roughly: what each rank needs to start, and its layers."""
    layers = MODELS[case["model"]].num_layers / case["pp"] * (1.5 if case["recompute"] == "full" else 1.0)
    return num_ranks(case) * (20 + case["num_micro_batches"] * layers)


def num_ranks(case: Case) -> int:
    return case["dp"] * case["tp"] * case["pp"]


def covering(cases: Sequence[Case], seed: int = 0, num_candidates: int = 10_000, breadth: int = 400) -> list[Case]:
    """A few cases, little work in sum, that cover every pair which any candidate covers. Greedy, the same on every
    machine.

    Args:
        cases: from which to choose.
        seed: of the candidates and their order; other seeds give other subsets.
        num_candidates: a random part of the cases, so large that each pair occurs in it; besides, one case of every
            schedule at every tp degree, since some of these are rare.
        breadth: candidates compared per choice.
    """
    candidates = random.Random(seed).sample(cases, min(num_candidates, len(cases)))
    candidates += {(case["tp"], case["tensor"], case["schedule"]): case for case in cases}.values()
    holders: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for case in candidates:
        for pair in pairs_of(case):
            holders[pair].append(case)
    missing = dict.fromkeys(sorted(holders, key=lambda pair: (len(holders[pair]), str(pair))))
    chosen = []
    while missing:
        nearest = holders[next(iter(missing))][:breadth]
        best = max(nearest, key=lambda case: sum(pair in missing for pair in pairs_of(case)) / work(case))
        chosen.append(best)
        for pair in pairs_of(best):
            missing.pop(pair, None)
    return chosen


def jobs(plans: Sequence[Plan], per_job: int) -> Iterator[tuple[int, list[Plan]]]:
    """(ranks, plans for so many ranks): several plans share one start of the process group."""
    by_world: dict[int, list[Plan]] = defaultdict(list)
    for plan in plans:
        by_world[plan.strategy.world_size].append(plan)
    for world, members in sorted(by_world.items()):
        yield from ((world, members[at : at + per_job]) for at in range(0, len(members), per_job))
