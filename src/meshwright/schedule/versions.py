"""Which weights each action of an asynchronous table uses, and how many versions a rank keeps.

Version n of a stage's weights has seen n of its updates.

F0 F1 B0 UPDATE0 F2 B1 UPDATE1 ...      F0, F1, B0, B1: version 0; F2: version 1; two are kept
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from meshwright.core.errors import UnsupportedError
from meshwright.core.program import COMPUTE_KINDS, Action, Kind, Program
from meshwright.core.schedule import PipelineSize, Schedule
from meshwright.schedule.draw import refused

Place = tuple[int, int]


def version_of(schedule: Schedule, size: PipelineSize) -> Callable[[Action], int]:
    """How many updates of its stage the weights of a compute action have seen.

    Raises UnsupportedError for a schedule that updates between steps alone.
    """
    version = schedule.version
    if version is None:
        raise UnsupportedError(f"schedule `{schedule.name}` is synchronous: a step has one version of the weights")
    return lambda action: version(size, action)


def check_versions(program: Program, schedule: Schedule, size: PipelineSize) -> None:
    """Prove that every action finds the weights it uses.

    Raises:
        ProgramError: a version that does not exist yet, a backward with other weights than its forward, or more
            versions at once than the schedule declares; one line, then the table with the cells marked.
    """
    version = version_of(schedule, size)
    for rank, row in enumerate(program.rows):
        num_updates: Counter[int] = Counter()
        forwards: dict[tuple[int, int | None], Place] = {}
        for index, action in enumerate(row):
            if action.kind is Kind.UPDATE:
                num_updates[action.stage] += 1
            elif action.kind in COMPUTE_KINDS:
                fault, used, latest = "", version(action), num_updates[action.stage]
                first = forwards.setdefault((action.stage, action.micro_batch), (rank, index))
                at_forward = version(program.rows[rank][first[1]])
                if not 0 <= used <= latest:
                    fault = f"{action} on rank {rank} uses version {used} of the weights, but the latest is {latest}"
                elif used != at_forward:
                    fault = f"{action} on rank {rank} uses version {used} of the weights, its forward {at_forward}"
                if fault:
                    raise refused(program, fault, {first, (rank, index)})
    for rank, (kept, place) in enumerate(_peaks(program, version)):
        declared = schedule.num_versions(size, rank)
        if kept > declared:
            raise refused(program, f"rank {rank} keeps {kept} versions of its weights, not {declared}", {place})


def peak_versions(program: Program, version: Callable[[Action], int]) -> tuple[int, ...]:
    """Versions of a stage's weights that a rank keeps at once: the latest, and those that some later action uses."""
    return tuple(kept for kept, _ in _peaks(program, version))


def _peaks(program: Program, version: Callable[[Action], int]) -> list[tuple[int, Place]]:
    """Per rank, the most versions of one stage, and where it is first so."""
    peaks = []
    for rank, row in enumerate(program.rows):
        used = Counter((a.stage, version(a)) for a in row if a.kind in COMPUTE_KINDS)
        latest = dict.fromkeys({action.stage for action in row}, 0)
        peak = (1, (rank, 0))
        for index, action in enumerate(row):
            if action.kind is Kind.UPDATE:
                latest[action.stage] += 1
            kept = {v for stage, v in used if stage == action.stage and v <= latest[stage]} | {latest[action.stage]}
            peak = max(peak, (len(kept), (rank, index)), key=lambda item: item[0])
            if action.kind in COMPUTE_KINDS:
                key = action.stage, version(action)
                used[key] -= 1
                if not used[key]:
                    del used[key]
        peaks.append(peak)
    return peaks
