"""What leaves a device between its uses: which tensors, in which groups, and the count of bytes that pass.

A rank's part of a bucket is cut into groups. Tiers keep groups; an update takes one after the other:

    read     | 0 | 1 | 2 | 3 | 4 |            three working buffers: one group comes in,
    compute      | 0 | 1 | 2 | 3 | 4 |        one is computed,
    write            | 0 | 1 | 2 | 3 | 4 |    one goes out

Read by the runtime (`parallel.offload`) and by the forecasts (`cost.offload`). Sources: Ren et al. 2021 §4
(ZeRO-Offload), Rajbhandari et al. 2021 §5.2, §6.2 (ZeRO-Infinity).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

from meshwright.core.cluster import Tier
from meshwright.core.errors import InputError
from meshwright.core.flat import Segment
from meshwright.core.precision import DTYPE_BYTES, NUM_MOMENTS, Recipe
from meshwright.core.sharding import Range
from meshwright.core.strategy import Offload

NUM_WORKING_BUFFERS = 3
GROUP_NUMEL = Offload().group_numel
"""Elements of a group, unless a strategy says otherwise: 4 MiB of fp32 in one read or write."""
BLOCK_BYTES = 4096
"""Groups begin on a multiple of it in a file, so that no two share a block."""
CUT_NUMEL = 64
"""A run of elements is cut at multiples of it only. Kernels round the last few elements of a run, those that fill no
vector, in another way; so the same elements must be the last ones, or the update is not the same to the bit."""
NUM_SYNCHRONOUS_STEPS = 40
"""Steps before the delayed update begins: early on, gradients change too fast to be late (Ren et al. 2021 §5.2)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One kind of tensor on a tier, and what an update does with it."""

    kind: str
    """master, moment1, moment2, gradients or parameters; as checkpoints name them."""
    tier: Tier
    dtype: str
    is_read: bool
    is_written: bool
    is_copy: bool = False
    """Whether it also stays in memory."""

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


def stored_kinds(recipe: Recipe, optimizer: str, offload: Offload) -> tuple[Stored, ...]:
    """What is kept on tiers instead of the device.

    A delayed update must not touch the parameters that the step beside it computes with. So it has a master copy also
    where the recipe has none, and a copy of the gradients, both on the optimizer's tier.

    Args:
        recipe: dtype of each copy.
        optimizer: a key of NUM_MOMENTS.
        offload: which kinds, and where to.

    Raises InputError for a delayed update of an optimizer that is not offloaded.
    """
    if offload.delayed and offload.optimizer == "none":
        raise InputError("offload: delayed needs the optimizer offloaded: set optimizer to cpu or disk")
    found: list[Stored] = []
    if offload.optimizer != "none":
        if recipe.master or offload.delayed:
            found.append(Stored("master", offload.optimizer, recipe.master or recipe.parameter, True, True))
        moments = (f"moment{i + 1}" for i in range(NUM_MOMENTS[optimizer]))
        found += [Stored(kind, offload.optimizer, recipe.moment, True, True) for kind in moments]
    gradients = offload.optimizer if offload.delayed and offload.gradients == "none" else offload.gradients
    if gradients != "none":
        is_copy = offload.gradients == "none"
        found.append(Stored("gradients", gradients, recipe.gradient, True, False, is_copy))
    if offload.parameters != "none":
        is_master = not any(each.kind == "master" for each in found)
        found.append(Stored("parameters", offload.parameters, recipe.parameter, is_master, not offload.delayed))
    return tuple(found)


def cut_groups(
    segments: tuple[Segment, ...], start: int, stop: int, group_numel: int = GROUP_NUMEL
) -> tuple[Range, ...]:
    """Cut bucket elements [start, stop) into groups of at most `group_numel`, which follow one another without gaps.

    A segment is cut at multiples of CUT_NUMEL from its own start only, so that an update of the groups is that of the
    whole, to the bit.

    Args:
        segments: runs within [start, stop) that the update treats alike, in order.

    Raises InputError for groups smaller than CUT_NUMEL.
    """
    sizes = (size for size, count in _runs(segments, start, stop, group_numel) for _ in range(count))
    return tuple(pairwise(accumulate(sizes, initial=start)))


@lru_cache(maxsize=4096)
def count_groups(
    segments: tuple[Segment, ...], start: int, stop: int, group_numel: int = GROUP_NUMEL
) -> Mapping[int, int]:
    """Elements of a group → how many groups of :func:`cut_groups` have them. Not to be changed."""
    total: Counter[int] = Counter()
    for size, count in _runs(segments, start, stop, group_numel):
        total[size] += count
    return total


def _runs(segments: Sequence[Segment], start: int, stop: int, group_numel: int) -> Iterator[tuple[int, int]]:
    """Groups alike that follow one another: (elements of each, how many)."""
    if group_numel < CUT_NUMEL:
        raise InputError(f"groups of {group_numel} elements: at least {CUT_NUMEL} are needed")
    following, edge = iter(segments), start
    segment = next(following, None)
    while edge < stop:
        limit = edge + group_numel
        while segment is not None and segment.stop <= limit:
            segment = next(following, None)
        size, count = min(group_numel, stop - edge), 1
        if segment is None or segment.start >= limit:
            until = stop if segment is None else min(segment.start, stop)
            count = max(count, (until - edge) // group_numel)
        elif limit < stop:
            size -= (limit - segment.start) % CUT_NUMEL
            is_aligned = edge >= segment.start and (edge - segment.start) % CUT_NUMEL == 0
            count = -(-(min(segment.stop, stop) - limit) // size) if is_aligned else 1
        yield size, count
        edge += size * count


@dataclass(slots=True)
class TierRow:
    """Sum over the transfers of one kind of tensor."""

    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0


@dataclass(slots=True)
class TierTraffic:
    """What one rank reads from a tier and writes to it, by kind. Padding to whole blocks does not count."""

    rows: dict[str, TierRow] = field(default_factory=dict)

    def add_reads(self, kind: str, num_bytes: int, count: int = 1) -> None:
        """Record `count` reads of `num_bytes` together. Reading nothing is no read."""
        if num_bytes:
            row = self.rows.setdefault(kind, TierRow())
            row.reads += count
            row.read_bytes += num_bytes

    def add_writes(self, kind: str, num_bytes: int, count: int = 1) -> None:
        """Likewise of writes."""
        if num_bytes:
            row = self.rows.setdefault(kind, TierRow())
            row.writes += count
            row.written_bytes += num_bytes

    def forget_reads(self, kind: str) -> None:
        """A kind's reads do not count."""
        if (row := self.rows.pop(kind, None)) is not None:
            self.add_writes(kind, row.written_bytes, row.writes)

    @property
    def read_bytes(self) -> int:
        return sum(row.read_bytes for row in self.rows.values())

    @property
    def written_bytes(self) -> int:
        return sum(row.written_bytes for row in self.rows.values())


def working_set_bytes(stored: Sequence[Stored], largest: int) -> int:
    """Memory of an update's working buffers: NUM_WORKING_BUFFERS times the `largest` group's elements, of all kinds it
    streams."""
    return NUM_WORKING_BUFFERS * largest * sum(each.element_bytes for each in streamed(stored))


def staging_bytes(stored: Sequence[Stored], own: Sequence[Range]) -> int:
    """Memory in which gradients that lie on a tier are added up: as much as the largest of a rank's parts of buckets
    (`own`) takes."""
    sizes = (each.element_bytes for each in stored if each.kind == "gradients" and not each.is_copy)
    return max((stop - start for start, stop in own), default=0) * sum(sizes)


def streamed(stored: Sequence[Stored]) -> tuple[Stored, ...]:
    """Those that an update reads or writes."""
    return tuple(each for each in stored if each.is_read or each.is_written)


def tier_bytes(stored: Sequence[Stored], num_of_size: Mapping[int, int]) -> dict[Tier, int]:
    """Tier → bytes that a rank takes there; on disk every group fills whole blocks.

    Args:
        stored: what is kept away from the device.
        num_of_size: elements of a group → how many groups have them.
    """
    total: Counter[Tier] = Counter()
    for each in stored:
        block = BLOCK_BYTES if each.tier == "disk" else 1
        sizes = num_of_size.items()
        total[each.tier] += sum(count * -(-numel * each.element_bytes // block) * block for numel, count in sizes)
    return dict(total)
