"""A strategy that the rules allow, or the nearest one.

Read by whoever takes a strategy from a user: an illegal one is refused with what it breaks and what would do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from meshwright.core import context_rules
from meshwright.core.axes import DP, PP, TP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import RuleError
from meshwright.core.job import Job
from meshwright.core.layouts import Context, Expert, Tensor
from meshwright.core.model import ModelSpec
from meshwright.core.rules import MICRO_BATCH_RULES, RULES, Case, violations
from meshwright.core.strategy import Offload, Strategy


def check(strategy: Strategy, model: ModelSpec, cluster: ClusterSpec, job: Job) -> None:
    """Raise RuleError for an illegal strategy: the rule, the numbers, and the nearest legal strategy."""
    broken = violations(strategy, model, cluster, job)
    if not broken:
        return
    near = nearest_legal(strategy, model, cluster, job)
    hint = f"; nearest legal: {near.describe()}" if near else "; no split of this job over this cluster is legal"
    raise RuleError("; ".join(str(v) for v in broken) + hint, broken[0].rule.id)


def nearest_legal(strategy: Strategy, model: ModelSpec, cluster: ClusterSpec, job: Job) -> Strategy | None:
    """The legal strategy that changes degrees and micro-batch least (sum of larger over smaller, less 1), or None.

    First `num_chunks`, then kinds of layout and choices around ZeRO, then the schedule are given up, each only where
    nothing is legal with them.
    """

    whole = strategy.model_copy(update={"num_chunks": 1})
    plain = whole.model_copy(
        update={
            "tensor": Tensor(),
            "sequence": "none",
            "context": Context(),
            "expert": Expert(),
            "shard_over": "all",
            "keep_gathered": False,
            "reduce_each": False,
            "prefetch": 1,
            "tile": 1,
            "recompute_layers": None,
            "recompute_group": 1,
            "offload": Offload(),
        }
    )
    usual = plain.model_copy(update={"schedule": Strategy().schedule})

    def distance(other: Strategy) -> float:
        pairs = (
            (strategy.tp, other.tp),
            (strategy.pp, other.pp),
            (strategy.dp, other.dp),
            (strategy.micro_batch_size, other.micro_batch_size),
        )
        return sum(max(a, b) / min(a, b) - 1 for a, b in pairs)

    for choices in dict.fromkeys((strategy, whole, *context_rules.nearer(whole), plain, usual)):
        near = min(_legal_degrees(choices, model, cluster, job), key=distance, default=None)
        if near is not None:
            return near
    return None


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return [*small, *(n // d for d in reversed(small) if d * d != n)]


def all_degrees(num_devices: int, cp: int = 1) -> Iterator[dict[str, int]]:
    """Every size of dp, tp and pp whose product, with `cp`, is the number of devices."""
    if num_devices % cp:
        return
    num_devices //= cp
    sizes = divisors(num_devices)
    for tp in sizes:
        rest = num_devices // tp
        for pp in sizes:
            if rest % pp == 0:
                yield {DP: rest // pp, TP: tp, PP: pp}


def _legal_degrees(strategy: Strategy, model: ModelSpec, cluster: ClusterSpec, job: Job) -> Iterator[Strategy]:
    for degrees in all_degrees(cluster.num_devices, strategy.cp):
        per_rank, rest = divmod(job.global_batch_size, degrees[DP])
        keep = strategy.layers_per_stage if degrees[PP] == strategy.pp else None
        other = strategy.model_copy(
            update={**degrees, "micro_batch_size": 1, "num_micro_batches": per_rank, "layers_per_stage": keep}
        ).on(cluster)
        broken = {violation.rule.id for violation in violations(other, model, cluster, job)}
        if rest or broken.difference(MICRO_BATCH_RULES):
            continue
        for micro in divisors(per_rank):
            split = other.model_copy(update={"micro_batch_size": micro, "num_micro_batches": per_rank // micro})
            case = Case(split, model, cluster, job)
            if all(rule.broken(case) is None for rule in RULES if rule.id in MICRO_BATCH_RULES):
                yield split
