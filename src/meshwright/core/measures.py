"""What all witnesses report: forecast, rehearsal and measurement return these same types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

PRIMITIVES = {
    "all_reduce": "the tensor",
    "reduce_scatter": "the tensor before it is reduced",
    "all_gather": "the gathered tensor",
    "all_to_all": "one rank's whole buffer",
    "broadcast": "the tensor",
    "reduce": "the tensor",
    "send": "the message",
}
"""Name → what its payload bytes are the bytes of."""

PHASES = {
    "count": "counted tokens of the step",
    "forward": "within layers and between stages, forward",
    "recompute": "within layers, when full recompute runs them again",
    "backward": "within layers and between stages, backward",
    "router": "loads of the experts, over all ranks",
    "gather": "blocks of parameters gathered, each time they are needed, with ZeRO-3",
    "gradients": "reduction of gradients",
    "norm": "gradient norm and loss",
    "parameters": "gathering of updated parameters, with ZeRO",
    "evaluate": "sums of an evaluation",
    "other": "outside a step",
}
"""Name → what is communicated in this part of a step; in the order in which tables show them."""
_PHASE_ORDER = {phase: place for place, phase in enumerate(PHASES)}

_BLOCKS_SENT = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "broadcast": 1, "reduce": 1}
"""How often a rank sends each of the size − 1 blocks that are not its own. A broadcast and a reduction are passed on by
all ranks but one: the mean over the ranks, and over calls whose roots take turns what each rank sends."""


def wire_bytes(primitive: str, payload_bytes: int, size: int) -> int:
    """Bytes one rank sends for one call over `size` ranks, by bandwidth-optimal (ring) algorithms.

    Args:
        primitive: one of PRIMITIVES.
        payload_bytes: bytes of what PRIMITIVES says.
        size: number of ranks in the group.

    Source: Patarasuk & Yuan 2009; Chan et al. 2007.
    """
    if size == 1:
        return 0
    if primitive == "send":
        return payload_bytes
    return _BLOCKS_SENT[primitive] * (size - 1) * payload_bytes // size


@dataclass(slots=True)
class TrafficRow:
    """Sum over the calls of one (primitive, axis, phase) on one rank."""

    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0


@dataclass(slots=True)
class Traffic:
    """What one rank sends in one step, by (primitive, axis, phase). Groups of one rank send nothing."""

    rows: dict[tuple[str, str, str], TrafficRow] = field(default_factory=dict)

    def add(
        self,
        primitive: str,
        axis: str,
        phase: str,
        payload_bytes: int,
        size: int,
        calls: int = 1,
        *,
        sent_bytes: int | None = None,
    ) -> None:
        """Record `calls` equal calls. A call over one rank is not a call.

        Args:
            sent_bytes: wire bytes of each, where they do not follow from the payload: of uneven exchanges.
        """
        if size == 1 or calls == 0:
            return
        row = self.rows.setdefault((primitive, axis, phase), TrafficRow())
        row.calls += calls
        row.payload_bytes += calls * payload_bytes
        row.wire_bytes += calls * (wire_bytes(primitive, payload_bytes, size) if sent_bytes is None else sent_bytes)

    @property
    def wire_bytes(self) -> int:
        return sum(row.wire_bytes for row in self.rows.values())

    def by_axis(self) -> dict[str, int]:
        """Axis → wire bytes."""
        total: Counter[str] = Counter()
        for (_, axis, _), row in self.rows.items():
            total[axis] += row.wire_bytes
        return dict(total)

    def sorted_rows(self) -> Iterator[tuple[tuple[str, str, str], TrafficRow]]:
        """Rows in order of phase, axis, primitive."""
        return iter(sorted(self.rows.items(), key=lambda item: (_PHASE_ORDER[item[0][2]], item[0][1], item[0][0])))

    def to_list(self) -> list[dict[str, Any]]:
        """Plain data, one dict per row."""
        return [{"primitive": p, "axis": a, "phase": f, **asdict(row)} for (p, a, f), row in self.sorted_rows()]

    @classmethod
    def from_list(cls, rows: list[dict[str, Any]]) -> Traffic:
        """Inverse of :meth:`to_list`."""
        return cls(
            {
                (r["primitive"], r["axis"], r["phase"]): TrafficRow(r["calls"], r["payload_bytes"], r["wire_bytes"])
                for r in rows
            }
        )


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes on one rank at the peak of a step, by category; those of the tiers that it offloads to by themselves."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    """Constant tables, such as rotary positions. Memory that a backend takes for calls on their way is not counted."""

    working_bytes: int = 0
    """Blocks that ZeRO-3 has gathered, gradients that ZeRO-2 and 3 have not reduced yet, the working set of an
    offloaded update, and panels of products on square grids."""
    host_bytes: int = 0
    """What is offloaded to the memory of the host. Not a part of the total, which is the device's."""
    disk_bytes: int = 0
    """Likewise to a disk, in whole blocks."""

    @property
    def states_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        return self.states_bytes + self.activations_bytes + self.buffers_bytes + self.working_bytes

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step on the slowest rank, term by term."""

    pipeline_s: float
    """Makespan of the pipeline table: compute, tensor-parallel communication, transfers and bubble."""
    data_comm_exposed_s: float
    """Gradient reduction and parameter gathering that backward does not hide."""
    optimizer_s: float
    bubble_fraction: float
    """Idle share of the pipeline's makespan, over all ranks: (p−1)/(m+p−1) for equal stages
    under GPipe and 1F1B, (p−1)/p under the naive schedule."""

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.data_comm_exposed_s + self.optimizer_s

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "total_s": self.total_s}
