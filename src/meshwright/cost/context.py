"""What context parallelism sends, keeps and computes on a rank.

Per layer and micro-batch, in elements (P ranks, b sequences, n = s/P tokens, a heads, g key/value heads, d head dim):

                          forward                          backward
    ring                  P − 1 messages of 2·b·n·g·d      P − 1 of the same, P of the gradients' accumulators
    ring-self-attention   2·(P − 1) messages of b·n·g·d    2·(P − 1) of the same, 2 reduce-scatters of b·s·g·d
    ulysses               all-to-all of b·n·(a + 2·max(g, P))·d, and of b·n·a·d; backward both again

A ring's messages of a step are under way while the step's block is computed, so that of P blocks all but the last hide
some; the gradients of the last block travel home with nothing beside them. The exchanges of Ulysses are waited for.

Sources: Liu et al. 2023 (ring); Li et al. 2021, §3 (ring self-attention); Jacobs et al. 2023, §3.2 (Ulysses).
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.core.axes import CP
from meshwright.core.job import Job
from meshwright.core.layouts import Balance
from meshwright.core.measures import Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.placement import largest_part
from meshwright.core.strategy import Strategy
from meshwright.core.tokens import runs

ATTENTION_PRIMITIVES = ("send", "reduce_scatter", "all_to_all")
"""Of what goes over cp, what attention sends."""


def exposed_s(strategy: Strategy, sent_s: float, attention_s: float, *, is_backward: bool) -> float:
    """Seconds that attention's messages of one pass add to it, where ranks compute while messages travel.

    Args:
        sent_s: of all messages of the pass, one after the other.
        attention_s: of attention's products on the rank that has most.
    """
    if strategy.cp == 1 or strategy.context.kind == "ulysses":
        return sent_s
    home_s = sent_s * _share_home(strategy) if is_backward and strategy.context.kind == "ring" else 0.0
    return home_s + max(0.0, sent_s - home_s - attention_s * (strategy.cp - 1) / strategy.cp)


def _share_home(strategy: Strategy) -> float:
    """Of a backward's bytes, the last hop of the gradients."""
    size, recipe = strategy.cp, strategy.recipe
    keys, sums = (size - 1) * recipe.parameter_bytes, size * recipe.statistic_bytes
    return sums / size / (keys + sums)


def local_heads(model: ModelSpec, tp: int) -> tuple[int, int]:
    """Heads and key/value heads of the first tp rank."""
    heads = largest_part(model, "heads", model.heads_size, tp) // model.head_dim
    return heads, largest_part(model, "kv_heads", model.kv_size, tp) // model.head_dim


def add_attention(total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, num_layers: int) -> None:
    """What the attention of a stage of `num_layers` layers exchanges over cp in a step: in each forward, in each
    backward, and in each forward that is run again."""
    if strategy.cp == 1:
        return
    m = strategy.micro_batches_per_stage
    for phase, count in (("forward", num_layers), ("recompute", strategy.num_recomputed(num_layers))):
        _add(total, model, job, strategy, m * count, phase, is_backward=False)
    _add(total, model, job, strategy, m * num_layers, "backward", is_backward=True)


def _add(
    total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, num_layers: int, phase: str, *, is_backward: bool
) -> None:
    size, recipe = strategy.cp, strategy.recipe
    heads, kv = local_heads(model, strategy.tp)
    rows = strategy.micro_batch_size * (job.seq_length // size) * model.head_dim
    element, sums = rows * recipe.parameter_bytes, rows * recipe.statistic_bytes
    match strategy.context.kind:
        case "ring":
            total.add("send", CP, phase, 2 * kv * element, size, num_layers * (size - 1))
            total.add("send", CP, phase, 2 * kv * sums, size, num_layers * size * is_backward)
        case "ring-self-attention":
            total.add("send", CP, phase, kv * element, size, num_layers * 2 * (size - 1))
            total.add("reduce_scatter", CP, phase, kv * sums * size, size, num_layers * 2 * is_backward)
        case "ulysses":
            total.add("all_to_all", CP, phase, (heads + 2 * max(kv, size)) * element, size, num_layers)
            total.add("all_to_all", CP, phase, heads * element, size, num_layers)


@lru_cache(maxsize=4096)
def busiest_pairs(balance: Balance, length: int, num_ranks: int) -> int:
    """Unmasked scores of a sequence on the rank that has most, under the causal mask."""
    return max(_pairs(balance, length, num_ranks, rank) for rank in range(num_ranks))


def _pairs(balance: Balance, length: int, num_ranks: int, rank: int) -> int:
    """Token t sees t + 1 keys."""
    found = 0
    for run in runs(balance, length, num_ranks, rank):
        found += run.count * (run.start + 1) + run.step * run.count * (run.count - 1) // 2
    return found


def score_share(strategy: Strategy, seq_length: int) -> float:
    """Of what an even division of attention would give each rank, what the busiest has: 1 where heads or pairs are
    divided evenly, nearly 2 of contiguous tokens."""
    if strategy.cp == 1 or strategy.context.kind == "ulysses":
        return 1.0
    even = seq_length * (seq_length + 1) / 2 / strategy.cp
    return busiest_pairs(strategy.context.balance, seq_length, strategy.cp) / even
