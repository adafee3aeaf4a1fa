"""Who holds which block of the key/value cache. Free of torch.

A block holds the keys and values of `block_size` consecutive tokens of one sequence. Sequences that begin with the
same tokens share blocks; a shared block is always full, so nobody writes to it.

    free ──take──▶ held by 1 or more sequences ──release──▶ free, or cached where its content is known
      ▲                      ▲                                      │
      └──── evicted, least recently used first ◀── cached ──────────┘ and held again on a match

A full block is known by its tokens and by the *serial* of the block before it. A serial names one content, is never
given twice, and outlives the block: equal (serial, tokens) means equal tokens from the first on, compared one by one;
no hash decides.

Source: Kwon et al. 2023 (PagedAttention); techniques, §11.3 and §11.5.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from meshwright.core.errors import InputError

ROOT = 0
"""Serial before the first block of every sequence."""

Key = tuple[int, tuple[int, ...]]
"""(serial of the block before, the block's tokens)."""


class BlockManager:
    """The blocks of one cache.

    Args:
        num_blocks: how many there are.
        block_size: tokens of one.
        share: whether full blocks are remembered for other sequences.
    """

    def __init__(self, num_blocks: int, block_size: int, share: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InputError(f"a cache of {num_blocks} blocks of {block_size} tokens: both are at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.share = share
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached and held by nobody, least recently used first."""
        self._holders = [0] * num_blocks
        self._by_key: dict[Key, tuple[int, int]] = {}
        """Content → (block, serial)."""
        self._key_of: dict[int, Key] = {}
        self._next_serial = ROOT + 1

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks whose content is known, held or not."""
        return len(self._key_of)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """The cached blocks that `tokens` begin with, and their serials; not held yet.

        The block of the last token is never among them: its logits are wanted, so it is computed.
        """
        blocks: list[int] = []
        chain: list[int] = []
        if not self.share:
            return blocks, chain
        serial, size = ROOT, self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            found = self._by_key.get((serial, tuple(tokens[start : start + size])))
            if found is None:
                break
            block, serial = found
            blocks.append(block)
            chain.append(serial)
        return blocks, chain

    def hold(self, blocks: Sequence[int]) -> None:
        """One more sequence holds these blocks, which :meth:`match` found."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] += 1

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody holds: holding them leaves so many fewer to take."""
        return sum(block in self._idle for block in blocks)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for one sequence, or None where there are not so many; then nothing changes."""
        if count > self.num_free:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._by_key[self._key_of.pop(block)]
        return block

    def remember(self, block: int, before: int, tokens: Sequence[int]) -> int:
        """A held block is full and computed: sequences that begin alike may share it.

        Args:
            block: what holds `tokens`.
            before: serial of the block before it, `ROOT` for the first.

        Returns:
            the serial of the content. Where another block has the same content already, this one stays unknown.
        """
        if not self.share:
            return ROOT
        key = before, tuple(tokens)
        assert len(key[1]) == self.block_size
        found = self._by_key.get(key)
        if found is not None:
            return found[1]
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        self._by_key[key] = block, serial
        self._key_of[block] = key
        return serial

    def release(self, blocks: Sequence[int]) -> None:
        """One sequence gives up its blocks. The last ones are evicted first, since they need those before them."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is released more often than it was taken"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def clear(self) -> None:
        """Forget every prefix that nobody holds."""
        while self._idle:
            self._free.append(self._evict())

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless the sequences' block tables account for every block, for tests."""
        held = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a sequence holds a block twice: {table}"
            for block in table:
                held[block] += 1
        assert held == self._holders, "holders differ from the tables"
        free = [*self._free, *self._idle]
        assert len(set(free)) == len(free), "a block is free twice"
        assert sorted(free) == [block for block, count in enumerate(held) if not count], "a block is lost"
        assert set(self._idle) <= set(self._key_of), "a block waits that nobody could find"
        assert {block: key for key, (block, _) in self._by_key.items()} == self._key_of
        shared = [block for block, count in enumerate(held) if count > 1]
        assert all(block in self._key_of for block in shared), "a block is shared whose content is not known"
