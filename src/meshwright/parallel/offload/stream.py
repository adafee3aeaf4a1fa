"""States on tiers, and the update that passes through them group by group.

    buffer 0   read 0 | update 0 | write 0 | read 3 | ...
    buffer 1          | read 1   | update 1 | write 1 | ...        never more than the working set, whatever the
    buffer 2                     | read 2   | update 2 | ...       number of groups

What it costs: `core.offload.working_set_bytes`, `cost.offload`. Bitwise the update of tensors that stay in memory, as
long as it treats every element by itself. Source: Rajbhandari et al. 2021 §5.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from meshwright.core.errors import InputError
from meshwright.core.offload import NUM_WORKING_BUFFERS, Stored, streamed
from meshwright.core.sharding import Range
from meshwright.parallel.offload.tier import All, Handle, Tier

Tensors = dict[str, torch.Tensor]
"""Kind → a run of elements."""


class StoredState:
    """Elements [start, stop) of a bucket, of several kinds, on tiers, in groups. All zeros at first.

    Args:
        name: of the bucket, one of its own on these tiers.
        stored: the kinds.
        groups: follow one another without gaps, as :func:`core.offload.cut_groups` makes them.
        tiers: by the names that `stored` uses.
        dtypes: likewise.

    Raises InputError where a tier has no room.
    """

    def __init__(
        self,
        name: str,
        stored: Sequence[Stored],
        groups: Sequence[Range],
        tiers: Mapping[str, Tier],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        assert all(left[1] == right[0] for left, right in pairwise(groups)), "groups must follow one another"
        self.name = name
        self.stored = tuple(stored)
        self.groups = tuple(groups)
        self.dtypes = {each.kind: dtypes[each.dtype] for each in stored}
        self._tiers = {each.kind: tiers[each.tier] for each in stored}
        for each in stored:
            for index, (start, stop) in enumerate(groups):
                tiers[each.tier].allocate(self._key(each.kind, index), stop - start, self.dtypes[each.kind])

    def _key(self, kind: str, index: int) -> str:
        return f"{kind}/{self.name}/{index}"

    @property
    def start(self) -> int:
        return self.groups[0][0] if self.groups else 0

    @property
    def stop(self) -> int:
        return self.groups[-1][1] if self.groups else 0

    def run(self, kind: str) -> StoredRun:
        """All of one kind, as a flat tensor that lies elsewhere."""
        return StoredRun(self, kind, self.start, self.stop)

    def read_start(self, kind: str, start: int, out: torch.Tensor) -> Handle:
        """out [n] ← bucket elements [start, start + n)."""
        tier = self._tiers[kind]
        return All(
            [
                tier.read_start(self._key(kind, index), low - self.groups[index][0], out[low - start : high - start])
                for index, low, high in self._parts(start, start + out.numel())
            ]
        )

    def write_start(self, kind: str, start: int, x: torch.Tensor) -> Handle:
        """Bucket elements [start, start + n) ← x [n]."""
        tier = self._tiers[kind]
        return All(
            [
                tier.write_start(self._key(kind, index), low - self.groups[index][0], x[low - start : high - start])
                for index, low, high in self._parts(start, start + x.numel())
            ]
        )

    def near_device(self, kind: str) -> torch.device:
        """Where copies of a kind are made: memory of the host, unless there is none behind the tier."""
        device = self._tiers[kind].working_device
        return device if device.type == "meta" else torch.device("cpu")

    def reaches(self, kind: str, device: torch.device) -> bool:
        """Whether a kind's tier reads and writes a device's memory."""
        return self._tiers[kind].working_device == device

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(group, low, high) of what of [start, stop) lies in each group."""
        if not self.start <= start <= stop <= self.stop:
            raise ValueError(f"{self.name}: elements [{start}, {stop}) leave [{self.start}, {self.stop})")
        for index, (first, last) in enumerate(self.groups):
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield index, low, high


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Bucket elements [start, stop) of one kind: a flat tensor on a tier, cut and copied like one in memory.

    Checkpoints save from it and load into it a piece at a time.
    """

    state: StoredState
    kind: str
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return self.state.dtypes[self.kind]

    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def __getitem__(self, part: slice) -> StoredRun:
        low, high, step = part.indices(self.numel())
        if step != 1:
            raise ValueError(f"a run on a tier has no step {step}")
        return StoredRun(self.state, self.kind, self.start + low, self.start + max(low, high))

    def parts(self) -> Iterator[slice]:
        """What of it lies in each group, in order."""
        for start, stop in self.state.groups:
            low, high = max(start, self.start), min(stop, self.stop)
            if low < high:
                yield slice(low - self.start, high - self.start)

    def read(self) -> torch.Tensor:
        """A copy in memory of the host."""
        out = torch.empty(self.numel(), dtype=self.dtype, device=self.state.near_device(self.kind))
        self.state.read_start(self.kind, self.start, out).wait()
        return out

    def write(self, x: torch.Tensor) -> None:
        """Take over x [n], of any device and dtype."""
        self.write_start(x.to(self.dtype)).wait()

    def read_start(self, out: torch.Tensor) -> Handle:
        """Start to fill out [n], on any device. What a tier cannot reach goes by way of the host."""
        if self._reaches(out):
            return self.state.read_start(self.kind, self.start, out)
        staged = torch.empty(self.numel(), dtype=self.dtype)
        return _Then(self.state.read_start(self.kind, self.start, staged), lambda: out.copy_(staged))

    def write_start(self, x: torch.Tensor) -> Handle:
        """Start to take over x [n] of this dtype, on any device, which must not be changed until then."""
        near = x.contiguous() if self._reaches(x) else x.cpu()
        return self.state.write_start(self.kind, self.start, near)

    def _reaches(self, x: torch.Tensor) -> bool:
        return x.is_cpu or self.state.reaches(self.kind, x.device)


class WorkingSet:
    """The only memory that streaming takes: buffers for NUM_WORKING_BUFFERS groups.

    Attributes:
        lent_bytes: of buffers that are in use now: being filled, computed with, or emptied.
        peak_bytes: the most that were.
    """

    def __init__(self, states: Sequence[StoredState], device: torch.device) -> None:
        sizes: dict[tuple[str, torch.dtype], int] = {}
        for state in states:
            largest = max((stop - start for start, stop in state.groups), default=0)
            for each in streamed(state.stored):
                key = each.kind, state.dtypes[each.kind]
                sizes[key] = max(sizes.get(key, 0), largest)
        pin = device.type == "cpu" and torch.cuda.is_available()
        self._buffers = [
            {kind: torch.empty(n, dtype=dtype, device=device, pin_memory=pin) for (kind, dtype), n in sizes.items()}
            for _ in range(NUM_WORKING_BUFFERS)
        ]
        self._lent: dict[int, int] = {}
        self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Of all buffers."""
        return sum(x.nbytes for buffer in self._buffers for x in buffer.values())

    @property
    def lent_bytes(self) -> int:
        return sum(self._lent.values())

    def lend(self, place: int, kinds: Iterable[str], numel: int) -> Tensors:
        """The first `numel` elements of buffer `place`, which must be free."""
        assert place not in self._lent, f"buffer {place} is still in use"
        tensors = {kind: self._buffers[place][kind][:numel] for kind in kinds}
        self._lent[place] = sum(x.nbytes for x in tensors.values())
        self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
        return tensors

    def take_back(self, place: int) -> None:
        """Nobody uses buffer `place` any more."""
        self._lent.pop(place, None)


Update = Callable[[StoredState, Range, Tensors], None]
"""update(state, (start, stop), run): change `run`, bucket elements [start, stop) of all streamed kinds, in place."""


@torch.no_grad()
def stream(states: Sequence[StoredState], working: WorkingSet, update: Update) -> None:
    """Run `update` over every group of every state, while the next is read and the one before is written.

    Returns once all is written. After an error of a tier or of `update` nothing is on its way any more, and the states
    are updated in part.
    """
    work = [(state, group) for state in states for group in state.groups]
    flow = [_Passage(working, at % NUM_WORKING_BUFFERS, *each) for at, each in enumerate(work)]
    try:
        for at, passage in enumerate(flow):
            if at == 0:
                passage.read_start()
            if at + 1 < len(flow):
                if at + 1 >= NUM_WORKING_BUFFERS:
                    flow[at + 1 - NUM_WORKING_BUFFERS].end()
                flow[at + 1].read_start()
            passage.update(update)
        for passage in flow[-NUM_WORKING_BUFFERS:]:
            passage.end()
    finally:
        for passage in flow:
            passage.abandon()


class _Passage:
    """One group on its way through the working set."""

    def __init__(self, working: WorkingSet, place: int, state: StoredState, group: Range) -> None:
        self._working, self._place = working, place
        self._state, self._group = state, group
        self._run: Tensors = {}
        self._pending: list[Handle] = []

    def read_start(self) -> None:
        """Take the buffer, and start to fill it."""
        start, stop = self._group
        kinds = streamed(self._state.stored)
        self._run = self._working.lend(self._place, (each.kind for each in kinds), stop - start)
        self._pending = [self._state.read_start(k.kind, start, self._run[k.kind]) for k in kinds if k.is_read]

    def update(self, update: Update) -> None:
        """Once it is filled, compute, and start to write what has changed."""
        self._wait()
        update(self._state, self._group, self._run)
        written = (each.kind for each in self._state.stored if each.is_written)
        self._pending = [self._state.write_start(kind, self._group[0], self._run[kind]) for kind in written]

    def end(self) -> None:
        """Once it is written, give the buffer back."""
        self._wait()
        self._run = {}
        self._working.take_back(self._place)

    def _wait(self) -> None:
        while self._pending:
            self._pending.pop(0).wait()

    def abandon(self) -> None:
        """Wait for what is on its way, whatever becomes of it, so that no thread uses the buffer any more."""
        while self._pending:
            try:
                self._wait()
            except InputError:  # the first is already on its way to the caller
                continue
        if self._run:
            self.end()


@dataclass(frozen=True, slots=True)
class _Then:
    handle: Handle
    follow: Callable[[], object]

    def wait(self) -> None:
        """For the transfer, and do what follows it."""
        self.handle.wait()
        self.follow()
