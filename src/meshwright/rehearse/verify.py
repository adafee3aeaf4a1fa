"""Verify: what each rank measured, or a rehearsal counted, beside what was forecast for it.

Traffic must agree to the byte, memory exactly but for activations. Times are shown, not judged: they depend
on how well the cluster's description fits the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from meshwright.core.axes import EP, is_first_device
from meshwright.core.errors import InputError
from meshwright.core.measures import MemoryBreakdown, Traffic, TrafficRow
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.core.units import counted
from meshwright.cost.activations import expert_rows
from meshwright.cost.experts import exchange_bytes
from meshwright.cost.memory import memory
from meshwright.cost.traffic import traffic

ACTIVATION_TOLERANCE = 0.05
"""Activations are counted by what autograd keeps, and forecast by formula."""
REHEARSED_TOLERANCE = 0.03
"""The same between rehearsal and forecast: both leave out what only some device's kernels keep."""


Follows = Literal["no", "at most", "freely"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity of one rank that is not as forecast."""

    rank: int
    witness: Literal["traffic", "memory"]
    what: str
    """Primitive, axis and phase, or the category of memory."""
    forecast: int
    measured: int
    unit: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}: {self.forecast:,} {self.unit} forecast, {self.measured:,} measured"


def differences(plan: Plan, records: Iterable[RankRecord]) -> list[Difference]:
    """Everything that is not as forecast, over all ranks.

    Raises:
        InputError: the records are not those of the plan's ranks.
    """
    records = list(records)
    found, wanted = {record.rank for record in records}, set(range(plan.strategy.world_size))
    for kind, ranks in (("no measurements of", wanted - found), ("measurements of too many ranks:", found - wanted)):
        if ranks:
            listed = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
            raise InputError(f"{kind} {listed}: the plan has {counted(len(wanted), 'rank')}; train it to its end again")
    return [difference for record in records for difference in rank_differences(plan, record)]


def rank_differences(plan: Plan, record: RankRecord) -> list[Difference]:
    """Everything that is not as forecast on one rank."""
    held = memory(plan.model, plan.job, plan.strategy, record.coordinates)
    sent = traffic(plan.model, plan.job, plan.strategy, record.coordinates)
    is_moved = plan.strategy.offload.moves_activations
    return record_differences(held, sent, record, follows_loads=_follows_loads(plan), moves_activations=is_moved)


def _follows_loads(plan: Plan) -> Follows:
    """How what a rank keeps and sends depends on where tokens go."""
    gate = plan.model.gate
    if plan.strategy.ep > 1:
        return "freely"
    is_part = plan.strategy.et < plan.strategy.cp * plan.strategy.tp  # of a sequence, that an expert's ranks see
    is_bound = gate.capacity_factor is not None or (gate.has_capacity and is_part)
    return "at most" if plan.model.num_experts and is_bound else "no"


def rehearsed_differences(plan: Plan, records: Iterable[RankRecord]) -> list[Difference]:
    """Everything in a rehearsal of some ranks that is not as forecast."""
    model, strategy = plan.model, plan.strategy
    job = plan.job.model_copy(update={"imbalance": 1.0})  # no token chooses
    return [
        difference
        for r in records
        for difference in record_differences(
            memory(model, job, strategy, r.coordinates),
            traffic(model, job, strategy, r.coordinates),
            r,
            REHEARSED_TOLERANCE,
            odd_row_bytes=_odd_row_bytes(plan),
        )
    ]


def _odd_row_bytes(plan: Plan) -> int:
    """Of a row, where the ranks of ep cannot have equally many: a rehearsal gives some of them one more."""
    model, strategy = plan.model, plan.strategy
    if (
        strategy.ep == 1
        or expert_rows(model, strategy, strategy.micro_batch_size, plan.job.seq_length) % strategy.ep == 0
    ):
        return 0
    return exchange_bytes(1, model.hidden_size, strategy.recipe.parameter_bytes)


def record_differences(
    held: MemoryBreakdown,
    sent: Traffic,
    record: RankRecord,
    tolerance: float = ACTIVATION_TOLERANCE,
    *,
    follows_loads: Follows = "no",
    moves_activations: bool = False,
    odd_row_bytes: int = 0,
) -> list[Difference]:
    """Everything on one rank that is not as these forecasts say.

    Args:
        tolerance: relative, of activations.
        follows_loads: whether loads of experts decide; then forecasts hold for even ones. `at most`: activations are
            forecast for experts that are full, and may be less. `freely`: rows travel to other ranks, so that
            activations and bytes over ep are not judged, but the calls are.
        moves_activations: whether what layers keep is on the host, and follows loads there.
        odd_row_bytes: by so many a call over ep may differ.
    """
    return [
        *_traffic(sent, record, follows_loads, odd_row_bytes),
        *_memory(held, record, tolerance, follows_loads, moves_activations),
    ]


def _traffic(sent: Traffic, record: RankRecord, follows_loads: Follows, odd_row_bytes: int) -> Iterator[Difference]:
    forecast, measured = sent.rows, record.traffic.rows
    for key in sorted({*forecast, *measured}):
        rows = [witness.get(key, TrafficRow()) for witness in (forecast, measured)]
        allowed_bytes = inf if follows_loads == "freely" else odd_row_bytes * rows[0].calls
        off_bytes = abs(rows[0].wire_bytes - rows[1].wire_bytes)
        if key[1] == EP and rows[0].calls == rows[1].calls and off_bytes <= allowed_bytes:
            continue
        if rows[0] != rows[1]:
            unit = "bytes" if rows[0].wire_bytes != rows[1].wire_bytes else "calls"
            expected, found = (row.wire_bytes if unit == "bytes" else row.calls for row in rows)
            yield Difference(record.rank, "traffic", " ".join(key), expected, found, unit)


def _memory(
    held: MemoryBreakdown, record: RankRecord, tolerance: float, follows_loads: Follows, moves_activations: bool
) -> Iterator[Difference]:
    expected = held.to_dict()
    for category, measured in record.memory.to_dict().items():
        allowed = tolerance * expected[category] if category == "activations_bytes" else 0
        is_kept = category == "activations_bytes" or (category == "host_bytes" and moves_activations)
        if is_kept and follows_loads != "no":
            allowed = inf if follows_loads == "freely" or measured < expected[category] else allowed
        if abs(measured - expected[category]) > allowed:
            name = category.removesuffix("_bytes")
            yield Difference(record.rank, "memory", name, expected[category], measured, "bytes")


def measured_imbalance(loads: Mapping[str, Sequence[int]], ep: int) -> tuple[float, str]:
    """(rows of the fullest of `ep` ranks over their mean, the layer where they are) of each layer's loads by expert.

    A layer that no token came to is even.
    """
    found = {}
    for layer, by_expert in loads.items():
        num = len(by_expert) // ep
        by_rank = [sum(by_expert[at : at + num]) for at in range(0, len(by_expert), num)]
        found[layer] = max(by_rank) * ep / sum(by_rank) if sum(by_rank) else 1.0
    worst = max(found, key=found.__getitem__)
    return found[worst], worst


def measured_bubble(records: Iterable[RankRecord]) -> float | None:
    """Idle share of the pipeline's ranks in the measured step: 1 − busy / makespan, over one pipeline."""
    row = [r for r in records if is_first_device(r.coordinates)]
    makespan_s = max(r.pipeline_s for r in row)
    return 1 - sum(r.busy_s for r in row) / (len(row) * makespan_s) if makespan_s else None
