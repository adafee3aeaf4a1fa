"""Blocks of the cache: none lost, none freed twice, shared only where all tokens from the first on are equal."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import InputError
from meshwright.serve.blocks import ROOT, BlockManager


def fill(manager: BlockManager, tokens: list[int]) -> tuple[list[int], list[int]]:
    """A table for `tokens`, with all full blocks remembered; (table, chain)."""
    size = manager.block_size
    table, chain = manager.match(tokens)
    manager.hold(table)
    taken = manager.take(manager.blocks_for(len(tokens)) - len(table))
    assert taken is not None
    table += taken
    for at in range(len(chain), len(tokens) // size):
        before = chain[-1] if chain else ROOT
        chain.append(manager.remember(table[at], before, tokens[at * size : (at + 1) * size]))
    return table, chain


def test_a_prefix_is_shared_up_to_the_block_before_the_last_token():
    manager = BlockManager(8, 4)
    first, _ = fill(manager, list(range(10)))
    for length, shared in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (10, 2)):
        assert manager.match(list(range(length)))[0] == first[:shared], length
    assert manager.match([0, 1, 2, 99, 4])[0] == []
    manager.check([first])


def test_equal_tokens_after_another_beginning_are_another_content():
    manager = BlockManager(8, 2)
    fill(manager, [1, 1, 5, 5])
    table, _ = fill(manager, [2, 2, 5, 5, 9])
    assert manager.match([2, 2, 5, 5, 0])[0] == table[:2]
    assert manager.match([3, 3, 5, 5, 0])[0] == []


def test_a_prefix_whose_beginning_was_evicted_is_not_found_by_another_beginning():
    manager = BlockManager(2, 2)
    first, _ = fill(manager, [1, 1, 2, 2])
    manager.release(first)
    (taken,) = manager.take(1) or []
    assert taken == first[1], "the end of a prefix goes first"
    manager.release([taken])
    other, _ = fill(manager, [7, 7, 2, 2])
    assert manager.match([1, 1, 2, 2, 0])[0] == []
    assert manager.match([7, 7, 2, 2, 0])[0] == other


def test_what_cannot_be_taken_changes_nothing():
    manager = BlockManager(3, 2)
    table, _ = fill(manager, [1, 2, 3])
    assert manager.take(2) is None
    assert (manager.num_free, manager.num_held) == (1, 2)
    manager.release(table)
    manager.clear()
    assert (manager.num_free, manager.num_cached) == (3, 0)


def test_without_sharing_nothing_is_remembered():
    manager = BlockManager(4, 2, share=False)
    table, _ = fill(manager, [1, 2, 3, 4])
    assert manager.match([1, 2, 3, 4, 5]) == ([], [])
    manager.release(table)
    assert manager.num_cached == 0


def test_a_cache_has_blocks():
    with pytest.raises(InputError, match="0 blocks"):
        BlockManager(0, 16)


def test_the_check_sees_a_block_that_is_lost_or_held_twice():
    manager = BlockManager(4, 2)
    table = manager.take(2)
    assert table is not None
    for wrong in ([], [table[:1]], [[*table, table[0]]], [table, table]):
        with pytest.raises(AssertionError):
            manager.check(wrong)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_traces_account_for_every_block(data: st.DataObject):
    size = data.draw(st.integers(1, 4))
    manager = BlockManager(data.draw(st.integers(1, 12)), size)
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(40):
        if live and data.draw(st.booleans()):
            table, _ = live.pop(data.draw(st.integers(0, len(live) - 1)))
            manager.release(table)
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
            found, _ = manager.match(tokens)
            if manager.blocks_for(len(tokens)) - len(found) + manager.num_idle(found) <= manager.num_free:
                live.append((fill(manager, tokens)[0], tokens))
        manager.check([table for table, _ in live])
        for table, tokens in live:
            for other, others in live:
                for at in range(min(len(table), len(other))):
                    if table[at] == other[at]:
                        assert tokens[: (at + 1) * size] == others[: (at + 1) * size]
    for table, _ in live:
        manager.release(table)
    manager.check([])
    assert manager.num_free == manager.num_blocks


def test_blocks_and_scheduler_need_no_torch():
    light = ("options", "request", "blocks", "scheduler", "text", "servable", "workload", "bench")
    names = [f"meshwright.serve.{name}" for name in light]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names!r}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
