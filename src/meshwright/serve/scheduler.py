"""Which tokens run next: continuous batching, prompts in chunks, preemption. Free of torch.

    add ─▶ waiting ──(blocks and tokens left)──▶ running ──▶ finished
              ▲                                     │
              └──── preempted: blocks given up ─────┘   tokens are kept; keys and values are computed again later,
                                                        or wait in the host's memory (swap)

A step computes one token of every running sequence that decodes, and fills what is left of its `step_tokens` with
chunks of prompts. The order is that of arrival, moved by priorities: the first in the queue is never passed by one that
comes later, so that nobody starves; who came last is preempted first.

Sources: Yu et al. 2022 (Orca); Agrawal et al. 2024 (Sarathi-Serve); Kwon et al. 2023, §4.5.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from time import monotonic

from meshwright.core.errors import InputError
from meshwright.serve.blocks import ROOT, BlockManager
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import Finish, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether a token is chosen after it: all tokens that are known are computed then."""
        return self.start + self.count == self.sequence.num_tokens


@dataclass(slots=True)
class Moves:
    """Blocks that are copied before a step computes: (block of the cache, block of the host). First all that leave."""

    out: list[tuple[int, int]] = field(default_factory=list)
    back: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.out or self.back)


@dataclass(slots=True)
class Counts:
    """What has happened since the start."""

    preemptions: int = 0
    swapped_out: int = 0
    """Blocks copied to the host."""
    swapped_back: int = 0
    """Blocks copied from there."""
    prefix_queries: int = 0
    """Tokens of prompts that were looked for in the prefix cache."""
    prefix_hits: int = 0
    """Tokens of prompts that were found there."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class Scheduler:
    """The sequences of one engine.

    Args:
        options: sizes.
        blocks: of the cache.
        clock: seconds; another one makes tests exact.
        host: blocks of the host's memory, shared by nobody; None: preempted sequences are computed again.
        pays: whether so many tokens are swapped rather than computed again.
    """

    def __init__(
        self,
        options: ServeOptions,
        blocks: BlockManager,
        clock: Callable[[], float] = monotonic,
        host: BlockManager | None = None,
        pays: Callable[[int], bool] = lambda num_tokens: True,
    ) -> None:
        self.options = options
        self.blocks = blocks
        self.host = host
        self._pays = pays
        self._moves = Moves()
        self.clock = clock
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counts = Counts()

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def num_left(self) -> int:
        """Tokens of all sequences that are known and not computed yet."""
        return sum(sequence.num_left for sequence in (*self.running, *self.waiting))

    @property
    def longest(self) -> int:
        """Tokens that the whole cache holds."""
        return self.blocks.num_blocks * self.blocks.block_size

    def check_room(self, count: int) -> None:
        """Raises InputError where `count` more sequences would make the queue too long."""
        if len(self.waiting) + count > self.options.max_waiting:
            raise InputError(
                f"{len(self.waiting)} requests wait already and {self.options.max_waiting} may; try again later"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        assert 0 < len(sequence.prompt) <= sequence.max_length <= self.longest
        insort(self.waiting, sequence, key=_place)

    def finish(self, sequence: Sequence, why: Finish) -> None:
        """End a sequence wherever it stands, and give up its blocks. Does nothing where it has ended."""
        if sequence.finish is not None:
            return
        sequence.finish = why
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._give_up(sequence)
        self._leave_host(sequence)
        self.counts.finished[why] = self.counts.finished.get(why, 0) + 1

    def late(self) -> Iterator[Sequence]:
        """Sequences whose deadline has passed."""
        now = self.clock()
        return (s for s in [*self.running, *self.waiting] if s.deadline_s is not None and now >= s.deadline_s)

    def step(self) -> list[Chunk]:
        """What is computed next, decoding sequences first; empty where nothing is to be done.

        Blocks for all of it are taken.
        """
        chunks: list[Chunk] = []
        budget = self.options.step_tokens
        preempted = False
        for sequence in sorted(self.running, key=_is_prompt):
            count = min(budget, sequence.num_left)
            if count == 0 or (preempted and sequence not in self.running):
                continue
            while not self._grow(sequence, sequence.num_computed + count):
                preempted = True
                victim = self.running[-1]
                budget += self._preempt(victim, chunks)
                if victim is sequence:
                    break
            else:
                chunks.append(Chunk(sequence, sequence.num_computed, count))
                budget -= count
        if not preempted:
            self._admit(budget, chunks)
        return chunks

    def take_moves(self) -> Moves:
        """What is copied before the step that was planned last; every rank does, also where it computes nothing."""
        moves, self._moves = self._moves, Moves()
        return moves

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        while budget and len(self.running) < self.options.max_running:
            sequence = next((s for s in self.waiting if not _waits_for_leader(s)), None)
            if sequence is None or not self._start(sequence):
                return
            count = min(budget, sequence.num_left)
            chunks.append(Chunk(sequence, sequence.num_computed, count))
            budget -= count

    def _start(self, sequence: Sequence) -> bool:
        """Take a waiting sequence in, with what the prefix cache has of it, if all its tokens find room."""
        tokens = sequence.tokens(0, sequence.num_tokens)
        cached, chain = self.blocks.match(() if sequence.params.prompt_logprobs else tokens)
        needed = self.blocks.blocks_for(len(tokens)) - len(cached) + self.blocks.num_idle(cached)
        spare = len(self.running)  # each may need a further block soon
        if needed + min(spare, self.blocks.num_blocks - needed) > self.blocks.num_free:
            return False
        self.blocks.hold(cached)
        sequence.blocks, sequence.chain = list(cached), list(chain)
        sequence.num_computed = max(len(cached) * self.blocks.block_size, sequence.num_swapped)
        grown = self._grow(sequence, len(tokens))
        assert grown
        self._swap_back(sequence, len(cached))
        if sequence.started_s is None:
            sequence.started_s = self.clock()
            sequence.num_cached = sequence.num_computed
            self.counts.prefix_queries += len(tokens)
            self.counts.prefix_hits += sequence.num_cached
            self.counts.prompt_tokens += len(sequence.prompt)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_place)
        return True

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for so many tokens; whether there were enough."""
        missing = self.blocks.blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        taken = self.blocks.take(missing)
        if taken is not None:
            sequence.blocks += taken
        return taken is not None

    def _preempt(self, victim: Sequence, chunks: list[Chunk]) -> int:
        """Send the victim back to the queue; the tokens that it would have computed in this step."""
        back = sum(chunk.count for chunk in chunks if chunk.sequence is victim)
        chunks[:] = [chunk for chunk in chunks if chunk.sequence is not victim]
        self.running.remove(victim)
        self._swap_out(victim)
        self._give_up(victim)
        victim.num_preemptions += 1
        self.counts.preemptions += 1
        insort(self.waiting, victim, key=_place)
        return back

    def _swap_out(self, victim: Sequence) -> None:
        """Keep what is computed of it on the host, where there is room and it pays."""
        count = self.blocks.blocks_for(victim.num_computed)
        if self.host is None or not count or not self._pays(victim.num_computed):
            return
        taken = self.host.take(count)
        if taken is not None:
            victim.host_blocks, victim.num_swapped = taken, victim.num_computed
            self._moves.out += zip(victim.blocks, taken, strict=False)
            self.counts.swapped_out += count

    def _swap_back(self, sequence: Sequence, num_cached: int) -> None:
        """What the host has of it, but for so many first blocks that the prefix cache has too."""
        pairs = list(zip(sequence.blocks, sequence.host_blocks, strict=False))[num_cached:]
        self._moves.back += pairs
        self.counts.swapped_back += len(pairs)
        self._leave_host(sequence)

    def _leave_host(self, sequence: Sequence) -> None:
        """Others may have its blocks there: what leaves in a step was planned before anything that comes back."""
        if self.host is not None:
            self.host.release(sequence.host_blocks)
        sequence.host_blocks, sequence.num_swapped = [], 0

    def _give_up(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.chain, sequence.num_computed = [], [], 0

    def computed(self, chunks: Ordered[Chunk]) -> None:
        """The keys and values of these chunks are in the cache now. Sequences that ended meanwhile are passed over."""
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.finish is None:
                sequence.num_computed = chunk.start + chunk.count
                self._remember(sequence)

    def _remember(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full now."""
        size = self.blocks.block_size
        while (at := len(sequence.chain)) < sequence.num_computed // size:
            before = sequence.chain[-1] if sequence.chain else ROOT
            tokens = sequence.tokens(at * size, (at + 1) * size)
            sequence.chain.append(self.blocks.remember(sequence.blocks[at], before, tokens))

    def append(self, sequence: Sequence, token: int) -> None:
        """A token was chosen for a running sequence."""
        sequence.append(token)
        self.counts.generation_tokens += 1


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.order, sequence.id


def _is_prompt(sequence: Sequence) -> bool:
    """Whether it comes after those that decode."""
    return not sequence.is_decoding


def _waits_for_leader(sequence: Sequence) -> bool:
    """Whether another answer's prompt is still to be computed, which this one will share."""
    leader = sequence.leader
    return leader is not None and leader.finish is None and not leader.output
