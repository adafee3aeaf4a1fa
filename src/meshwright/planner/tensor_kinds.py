"""Ways to divide each layer over the same ranks, side by side: what one layer holds and sends on a rank.

Read off the real strategies' own cost functions, so that a row is what a run of it would measure. Bytes sent for a
micro-batch are linear in its tokens, so that the number at which one way overtakes another is exact.

Sources: Shoeybi et al. 2019 (1d), Korthikanti et al. 2022 (sp), Xu et al. 2021 (2d), Wang et al. 2021 (2.5d), Bian et
al. 2021 (3d), Li et al. 2021 (ring self-attention), Liu et al. 2023 (ring), Jacobs et al. 2023 (Ulysses).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.layouts import Context, ContextKind, Tensor
from meshwright.core.measures import Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.placement import placements
from meshwright.core.rules import violations
from meshwright.core.strategy import Precision, Strategy
from meshwright.core.units import counted
from meshwright.cost.activations import layer_terms, total_bytes
from meshwright.cost.traffic import micro_batch_traffic, step_traffic

FIRST = {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
"""Coordinates of the rank that is looked at."""


@dataclass(frozen=True, slots=True)
class Way:
    """One layer of one micro-batch on the first rank."""

    name: str
    strategy: Strategy
    refusal: str | None
    """Numbers of the rule that it breaks; then nothing else is known."""
    weights_bytes: int = 0
    activations_bytes: int = 0
    sent: Traffic | None = None
    """Forward and backward."""
    summed: Traffic | None = None
    """Once a step: sums of gradients."""

    @property
    def messages(self) -> int:
        return sum(row.calls for row in self.sent.rows.values()) if self.sent else 0


def ways(model: ModelSpec, cluster: ClusterSpec, batch: int, seq: int, precision: Precision) -> list[Way]:
    """All ways over the devices of `cluster`, each with a micro-batch of `batch` sequences of `seq` tokens."""
    job = Job(seq_length=seq, global_batch_size=batch)
    return [
        _way(name, strategy, model, cluster, job)
        for name, strategy in _strategies(cluster.num_devices, batch, precision)
    ]


def _strategies(ranks: int, batch: int, precision: Precision) -> Iterator[tuple[str, Strategy]]:
    alone = Strategy(precision=precision, micro_batch_size=batch)
    for name, changes in _layouts(ranks):
        yield name, alone.model_copy(update={"tp": ranks, **changes})


def _layouts(ranks: int) -> tuple[tuple[str, dict[str, object]], ...]:
    """Name → fields of the strategy, in the order of the table."""
    depth = best_depth(ranks)
    return (
        ("1d", {}),
        ("1d sp", {"sequence": "megatron"}),
        ("2d", {"tensor": Tensor(kind="2d")}),
        (f"2.5d ({depth} deep)", {"tensor": Tensor(kind="2.5d", depth=depth)}),
        ("3d", {"tensor": Tensor(kind="3d")}),
        *((kind, {"tp": 1, "context": Context(kind=kind, degree=ranks)}) for kind in _CONTEXTS),
    )


_CONTEXTS: tuple[ContextKind, ...] = ("ring", "ring-self-attention", "ulysses")
MAX_TRIED = 400
"""Numbers of ranks that are looked at for one that a refused way can have."""


def remedies(
    found: Sequence[Way], model: ModelSpec, cluster: ClusterSpec, batch: int, seq: int, precision: Precision
) -> dict[str, str]:
    """Name of each refused way → the nearest number of ranks, and sequences, that it can have; none where there is none
    near."""
    lines = {}
    for at, way in enumerate(found):
        near = _nearest(at, model, cluster, batch, seq, precision) if way.refusal else None
        if near is not None:
            ranks, sequences = near
            lines[way.name] = f"legal with {counted(ranks, 'rank')} and {counted(sequences, 'sequence')}"
    return lines


def _nearest(
    at: int, model: ModelSpec, cluster: ClusterSpec, batch: int, seq: int, precision: Precision
) -> tuple[int, int] | None:
    """(ranks, sequences of a micro-batch) with which way `at` is legal: first the ranks, then the batch as they are."""
    asked = cluster.num_devices
    for ranks in sorted(range(2, 2 * asked + 1), key=lambda n: (abs(n - asked), n))[:MAX_TRIED]:
        changes = {"tp": ranks, **_layouts(ranks)[at][1], "precision": precision}
        whole = Strategy().model_copy(update=changes)
        parts = whole.grid.parts(whole.grid.batch_axes)
        sequences = max(1, round(batch / parts)) * parts
        strategy = whole.model_copy(update={"micro_batch_size": sequences})
        there = cluster.model_copy(update={"num_nodes": 1, "devices_per_node": ranks})
        if not violations(strategy, model, there, Job(seq_length=seq, global_batch_size=sequences)):
            return ranks, sequences
    return None


def best_depth(ranks: int) -> int:
    """The least depth above 1 that leaves squares of at least that side, or 2 where there is none."""
    for depth in range(2, ranks + 1):
        side = isqrt(ranks // depth)
        if depth * side * side == ranks and depth <= side:
            return depth
    return 2


def _way(name: str, strategy: Strategy, model: ModelSpec, cluster: ClusterSpec, job: Job) -> Way:
    broken = violations(strategy, model, cluster, job)
    if broken:
        return Way(name, strategy, broken[0].numbers)
    held = sum(place.box.numel for place in placements(model, strategy, FIRST) if place.layer == 0)
    one, two = (model.model_copy(update={"num_layers": count}) for count in (1, 2))
    return Way(
        name,
        strategy,
        None,
        weights_bytes=held * strategy.recipe.parameter_bytes,
        activations_bytes=total_bytes(layer_terms(model, strategy, strategy.micro_batch_size, job.seq_length)),
        sent=_less(*(micro_batch_traffic(spec, job, strategy, 0) for spec in (two, one))),
        summed=_less(*(_gradients(step_traffic(spec, strategy, FIRST)) for spec in (two, one))),
    )


def _gradients(traffic: Traffic) -> Traffic:
    return Traffic({key: row for key, row in traffic.rows.items() if key[2] == "gradients"})


def _less(of_two: Traffic, of_one: Traffic) -> Traffic:
    """What one layer more sends more."""
    more = Traffic()
    for key, row in of_two.rows.items():
        before = of_one.rows.get(key)
        total = more.rows.setdefault(key, type(row)())
        total.calls = row.calls - (before.calls if before else 0)
        total.payload_bytes = row.payload_bytes - (before.payload_bytes if before else 0)
        total.wire_bytes = row.wire_bytes - (before.wire_bytes if before else 0)
    return Traffic({key: row for key, row in more.rows.items() if row.payload_bytes or row.calls})


def crossovers(
    found: Sequence[Way], model: ModelSpec, cluster: ClusterSpec, batch: int, seq: int, precision: Precision
) -> list[str]:
    """One sentence for each way that is not the first legal one: from how many tokens it sends less than that."""
    more = {way.name: way for way in ways(model, cluster, 2 * batch, seq, precision)}
    lines = {}
    for way in found:
        twice = more[way.name].sent
        if way.sent is not None and twice is not None:
            slope = (twice.wire_bytes - way.sent.wire_bytes) / (batch * seq)
            lines[way.name] = slope, way.sent.wire_bytes - slope * batch * seq
    if len(lines) < 2:
        return []
    (base, (base_slope, base_start)), *others = lines.items()
    return [_sentence(name, base, slope - base_slope, start - base_start) for name, (slope, start) in others]


def _sentence(name: str, base: str, slope: float, start: float) -> str:
    """Of the difference of two lines over tokens: `slope`·T + `start`."""
    if slope == start == 0:
        return f"{name} sends as much as {base}"
    if slope >= 0 and start >= 0:
        return f"{name} sends more than {base}, whatever the tokens of a micro-batch"
    if slope <= 0 and start <= 0:
        return f"{name} sends less than {base}, whatever the tokens of a micro-batch"
    tokens = round(-start / slope)
    return f"{name} sends {'less' if slope < 0 else 'more'} than {base} from {tokens:,} tokens of a micro-batch on"
