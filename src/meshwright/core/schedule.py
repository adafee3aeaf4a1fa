"""Schedule: what one file of the folder `schedule/orders` declares, and the search for those files.

    schedule/orders/gpipe.py    SCHEDULE = Schedule(name="gpipe", order=order, ...)

The file is the whole price of a schedule: strategies, programs, memory, the planner and the documentation read what
it declares. Closed forms are a short cut: where a schedule has none, its program is counted and timed instead.
No schedule is imported here; a file counts by being in the folder.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

from meshwright.core.errors import InputError, ProgramError
from meshwright.core.program import Action, Kind, Program
from meshwright.core.units import counted
from meshwright.core.values import read_text

FOLDER = "meshwright.schedule.orders"
"""The package whose modules each declare a `SCHEDULE`."""

FILE_SUFFIX = ".csv"
"""A name with this ending is the file of a user's own table."""

Rows = tuple[tuple[Action, ...], ...]
"""One row of compute actions per pipeline rank."""


@dataclass(frozen=True, slots=True)
class PipelineSize:
    """What a timetable is made for."""

    num_ranks: int
    """p: pipeline ranks."""
    num_micro_batches: int
    """m: per step and pipeline."""
    num_chunks: int = 1
    """v: stages of each rank (virtual stages)."""
    num_steps: int = 1
    """Steps that the table runs without a flush in between; their micro-batches are numbered through."""

    @property
    def num_in_all(self) -> int:
        """Micro-batches of the table: of all its steps."""
        return self.num_steps * self.num_micro_batches

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks


def looped(size: PipelineSize) -> tuple[int, ...]:
    """Rank of each stage: round and round, stage s on rank s % p (Narayanan et al. 2021, SC21, section 2.2)."""
    return tuple(stage % size.num_ranks for stage in range(size.num_stages))


def looped_slots(size: PipelineSize) -> int:
    """Slots of one stage's forward and backward that orders of whole backwards take in loops: v·m, and p−1 idle ones.

    With fewer micro-batches than ranks a loop ends before the next can begin, and the stages are as good as a line.
    """
    fewer, more = sorted((size.num_ranks, size.num_micro_batches))
    return more * size.num_chunks + fewer - 1


def folded(size: PipelineSize) -> tuple[int, ...]:
    """Rank of each stage: to the last rank and back again (and so on), so that two neighbours stand on one rank."""
    p = size.num_ranks
    return tuple(place if place < p else 2 * p - 1 - place for place in (s % (2 * p) for s in range(size.num_stages)))


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch, where every rank has one stage."""

    forward_s: tuple[float, ...]
    """Per stage."""
    backward_s: tuple[float, ...]
    """Per stage."""
    boundaries_s: tuple[float, ...]
    """Transfer over each boundary between two stages, in each direction."""

    @property
    def work_s(self) -> tuple[float, ...]:
        """Forward and backward, per stage."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))

    @property
    def links_s(self) -> tuple[float, ...]:
        """Transfer behind each stage; there is none behind the last."""
        return (*self.boundaries_s, 0.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One pipeline schedule. Only `name` and `order` must be there."""

    name: str
    order: Callable[[PipelineSize], Rows]
    """Compute actions of each rank; no communication."""
    chunks: int | None = 1
    """Stages of each rank; None: as many as a strategy says."""
    num_directions: int = 1
    """2 where micro-batches enter at both ends, so that the model stands on the ranks twice."""
    stage_ranks: Callable[[PipelineSize], tuple[int, ...]] = looped
    """Rank of each stage."""
    fault: Callable[[PipelineSize], str | None] | None = None
    """Why there is no timetable of a size, with the numbers and what to take instead; None: there is one."""
    is_offered: bool = True
    """Whether the planner looks at it unasked."""
    fills_bubbles: bool = False
    """Whether the planner looks at it unasked on accelerators, too: it idles less than 1F1B, at the price of messages
    or memory. CPU ranks share cores, so that another's idle slots are not lost there."""
    is_asynchronous: bool = False
    """Whether weights are updated while micro-batches are under way, by UPDATE in the rows, so that no step is flushed;
    the order then makes tables of any number of steps."""
    version: Callable[[PipelineSize, Action], int] | None = None
    """Which weights a compute action uses: those that have seen so many updates of its stage. If `is_asynchronous`."""
    num_versions: Callable[[PipelineSize, int], int] = lambda size, rank: 1
    """Weights of so many versions a rank keeps at once, the latest among them."""
    num_slots: Callable[[PipelineSize], int] | None = None
    """Makespan on equal stages with free transfers, in units of one forward and backward of a stage, whatever the two
    take; None: time the program."""
    num_live: Callable[[PipelineSize, int], int] | None = None
    """Stages times micro-batches whose activations a rank holds at its peak, until nothing of their backward is left;
    of v chunks each is 1/v of the rank's layers. None: count them in the program."""
    file: str | None = None
    """The user's own table that it was read from; its program is verified before it is used."""
    only_size: PipelineSize | None = None
    """The one size that such a table is good for."""
    further_s: Callable[[StageTimes, int], Sequence[float]] | None = None
    """Per stage, the seconds that all micro-batches (their number is given) after the first add at least before the
    stage ends: a lower bound, so that the planner times few programs. None: it times each."""

    def size(
        self, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None, num_steps: int = 1
    ) -> PipelineSize:
        """What its timetable is made for. `num_chunks` may be left out: it is the schedule's own number, or 1.

        Raises InputError for a number of chunks that the schedule does not have.
        """
        if self.chunks is not None and num_chunks not in (None, self.chunks):
            stages = "one stage" if self.chunks == 1 else f"{self.chunks} stages"
            raise InputError(
                f"schedule `{self.name}` puts {stages} on a rank, but {num_chunks} chunks are asked for; take "
                f"{self.chunks} chunk{'s' * (self.chunks > 1)}, or a schedule that has as many as it is told"
            )
        return PipelineSize(num_ranks, num_micro_batches, num_chunks or self.chunks or 1, num_steps)


def schedules() -> dict[str, Schedule]:
    """Name → schedule, by name, for each file of the folder.

    Raises InputError for a file that declares none, or a name that is taken.
    """
    return dict(_here())


def find_schedule(name: str) -> Schedule:
    """The schedule of that name, or the table in that file, if the name ends with `.csv`.

    Raises InputError for a name that is not known, and lists those that are, or for a file that cannot be read;
    ProgramError for a file that is no table.
    """
    if name.endswith(FILE_SUFFIX):
        return own_schedule(name)
    found = _here().get(name)
    if found is None:
        raise InputError(f"schedule `{name}` is not known; {choices()}")
    return found


def choices() -> str:
    """`choose one of 1f1b, gpipe, ...`, for errors."""
    return f"choose one of {', '.join(schedules())}"


def own_schedule(file: str) -> Schedule:
    """A user's own table (:meth:`~meshwright.core.program.Program.from_csv`), good for exactly its own size.

    The table holds compute actions alone, or everything that its ranks do. Raises InputError and ProgramError.
    """
    return _own_schedule(file, read_text(file))


@lru_cache(maxsize=8)
def _own_schedule(file: str, text: str) -> Schedule:
    table = Program.from_csv(text, file)
    if any(action.kind is Kind.UPDATE for row in table.rows for action in row):
        raise ProgramError(f"{file}: UPDATE is not for tables from a file; write one step, without it")
    num_chunks, rest = divmod(table.num_stages, table.num_ranks)
    if rest or {table.stage_ranks.count(rank) for rank in range(table.num_ranks)} != {num_chunks}:
        raise ProgramError(
            f"{file}: {table.num_stages} stages on {table.num_ranks} ranks; every rank needs as many as the others"
        )
    size = PipelineSize(table.num_ranks, table.num_micro_batches, num_chunks)

    def fault(asked: PipelineSize) -> str | None:
        p, m = counted(size.num_ranks, "rank"), counted(size.num_micro_batches, "micro-batch", "micro-batches")
        return None if asked == size else f"the file is for {p} and {m}; take these"

    return Schedule(
        name=file,
        order=lambda asked: table.rows,
        chunks=num_chunks,
        num_directions=table.num_directions,
        stage_ranks=lambda asked: table.stage_ranks,
        fault=fault,
        is_offered=False,
        file=file,
        only_size=size,
    )


def _here() -> Mapping[str, Schedule]:
    """Asked for by the hundred thousand: a module that is imported is not looked for again."""
    folder = sys.modules.get(FOLDER) or import_module(FOLDER)
    return _declared(tuple(folder.__path__))


@lru_cache(maxsize=8)
def _declared(folders: tuple[str, ...]) -> dict[str, Schedule]:
    """What the files in these folders declare; the folders are read once."""
    found: dict[str, Schedule] = {}
    for file in sorted(module.name for module in pkgutil.iter_modules(folders)):
        schedule = getattr(import_module(f"{FOLDER}.{file}"), "SCHEDULE", None)
        if not isinstance(schedule, Schedule):
            raise InputError(
                f"schedule/orders/{file}.py declares no schedule; write SCHEDULE = Schedule(name=..., ...)"
            )
        if schedule.name in found:
            raise InputError(f"schedule/orders/{file}.py: the name `{schedule.name}` is taken; give it another one")
        found[schedule.name] = schedule
    return dict(sorted(found.items()))
