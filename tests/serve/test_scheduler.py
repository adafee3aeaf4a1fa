"""The scheduler beside a model that is one function of the tokens, over random traces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import InputError
from meshwright.serve.blocks import BlockManager
from meshwright.serve.metrics import Metrics
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams, Sequence, derived_seed, sequences, uniform
from meshwright.serve.scheduler import Scheduler


class Cache:
    """What the blocks hold, token by token; the next token is a function of all of them as read from the cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.num_computed = 0

    def move(self) -> None:
        """What is swapped: all that leaves, then all that comes back."""
        moves, size = self.scheduler.take_moves(), self.scheduler.blocks.block_size
        assert not (moves.out and moves.back)
        for pairs, into, source in ((moves.out, self.host, self.slots), (moves.back, self.slots, self.host)):
            targets = [pair[pairs is moves.out] for pair in pairs]
            assert len(set(targets)) == len(targets), "two blocks go to one place"
            for block, kept in pairs:
                to, at = (kept, block) if pairs is moves.out else (block, kept)
                for slot in range(size):
                    into.pop(to * size + slot, None)
                    if at * size + slot in source:
                        into[to * size + slot] = source[at * size + slot]

    def slot(self, sequence: Sequence, position: int) -> int:
        size = self.scheduler.blocks.block_size
        return sequence.blocks[position // size] * size + position % size

    def step(self) -> None:
        """One step: write, then read back the whole prefix, then choose."""
        scheduler = self.scheduler
        chunks = scheduler.step()
        self.move()
        assert sum(chunk.count for chunk in chunks) <= scheduler.options.step_tokens
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            self.num_computed += chunk.count
            tokens = chunk.sequence.tokens(chunk.start, chunk.start + chunk.count)
            for position, token in enumerate(tokens, start=chunk.start):
                self.slots[self.slot(chunk.sequence, position)] = token
        last = []
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            seen = [self.slots[self.slot(sequence, position)] for position in range(end)]
            assert seen == sequence.tokens(0, end), "the cache holds another sequence's tokens"
            last += [(sequence, seen)] if chunk.is_last else []
        scheduler.computed(chunks)
        for sequence, seen in last:
            scheduler.append(sequence, next_token(seen))
            if sequence.num_tokens >= sequence.max_length:
                scheduler.finish(sequence, "length")


def next_token(tokens: list[int]) -> int:
    return (sum((at + 1) * token for at, token in enumerate(tokens)) + len(tokens)) % 3


def expected(sequence: Sequence) -> list[int]:
    tokens = list(sequence.prompt)
    while len(tokens) < sequence.max_length:
        tokens.append(next_token(tokens))
    return tokens[len(sequence.prompt) :]


def make(
    num_blocks: int = 8,
    block_size: int = 2,
    clock=lambda: 0.0,
    num_host_blocks: int = 0,
    pays=lambda num_tokens: True,
    **change: object,
) -> Scheduler:
    options = ServeOptions.model_validate({"block_size": block_size, **change})
    host = BlockManager(num_host_blocks, block_size, share=False) if num_host_blocks else None
    return Scheduler(options, BlockManager(num_blocks, block_size, options.prefix_cache), clock, host, pays)


def one(number: int, prompt: list[int], new: int, order: float | None = None) -> Sequence:
    params = SamplingParams(max_tokens=new)
    return sequences(number, prompt, params, 0, 10**6, number if order is None else order, None)[0]


def run(scheduler: Scheduler, cache: Cache | None = None, limit: int = 2000) -> None:
    cache = cache or Cache(scheduler)
    for _ in range(limit):
        if scheduler.is_idle:
            return
        cache.step()
    raise AssertionError("the scheduler does not come to an end")


def tables(scheduler: Scheduler, more: list[Sequence]) -> list[list[int]]:
    return [s.blocks for s in {id(s): s for s in [*scheduler.running, *scheduler.waiting, *more]}.values()]


def test_decoding_goes_first_and_prompts_fill_the_step():
    scheduler = make(num_blocks=32, step_tokens=4)
    cache = Cache(scheduler)
    short, long = one(0, [1, 2], 4), one(1, list(range(9)), 2)
    scheduler.add(short)
    cache.step()
    scheduler.add(long)
    sizes = []
    for _ in range(3):
        sizes.append([(chunk.sequence.id, chunk.count) for chunk in scheduler.step()])
        chunks = scheduler.step()
        scheduler.computed(chunks)
        for chunk in chunks:
            if chunk.is_last:
                scheduler.append(chunk.sequence, 0)
    assert sizes == [[(0, 1), (1, 3)], [(0, 1), (1, 3)], [(0, 1), (1, 3)]]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_sequences_give_the_same_tokens(prefix_cache: bool):
    scheduler = make(num_blocks=8, block_size=2, prefix_cache=prefix_cache)
    asked = [one(i, [i % 2, 1, 0], 10) for i in range(4)]
    for sequence in asked:
        scheduler.add(sequence)
    run(scheduler)
    assert scheduler.counts.preemptions >= 3
    assert [s.output for s in asked] == [expected(s) for s in asked]


def computed_tokens(num_host_blocks: int, pays=lambda num_tokens: True) -> tuple[int, int]:
    """(tokens that steps computed, blocks swapped out) where four sequences fight for a cache."""
    scheduler = make(num_blocks=8, prefix_cache=False, num_host_blocks=num_host_blocks, pays=pays)
    cache, asked = Cache(scheduler), [one(i, [i % 2, 1, 0], 10) for i in range(4)]
    for sequence in asked:
        scheduler.add(sequence)
    run(scheduler, cache)
    assert [s.output for s in asked] == [expected(s) for s in asked]
    assert scheduler.counts.preemptions >= 3
    if scheduler.host is not None:
        scheduler.host.check([])
    return cache.num_computed, scheduler.counts.swapped_out


def test_what_is_swapped_is_not_computed_again():
    again, none = computed_tokens(0)
    swapped, blocks = computed_tokens(16)
    assert none == 0 < blocks
    assert swapped < again
    assert computed_tokens(16, lambda num_tokens: False) == (again, 0), "where it does not pay nothing is swapped"


def test_what_finds_no_room_on_the_host_is_computed_again():
    """One block holds nothing of use to sequences of two."""
    few, blocks = computed_tokens(1)
    assert few <= computed_tokens(0)[0]
    assert blocks <= 16


def test_what_the_prefix_cache_has_does_not_come_back_from_the_host():
    scheduler = make(num_blocks=8, block_size=2, num_host_blocks=8, step_tokens=64)
    cache = Cache(scheduler)
    first, last = one(0, [1, 1, 0], 12), one(1, [2, 2, 2, 2, 2], 5)
    for sequence in (first, last):
        scheduler.add(sequence)
    while not scheduler.counts.preemptions:
        cache.step()
    assert last.num_swapped > 0
    assert len(last.host_blocks) == scheduler.counts.swapped_out
    run(scheduler, cache)
    assert last.output == expected(last)
    assert scheduler.counts.swapped_back <= scheduler.counts.swapped_out


def test_a_sequence_that_ends_while_it_is_swapped_frees_the_host():
    scheduler = make(num_blocks=8, num_host_blocks=8, prefix_cache=False)
    cache, asked = Cache(scheduler), [one(i, [i % 2, 1, 0], 10) for i in range(4)]
    for sequence in asked:
        scheduler.add(sequence)
    while not any(s.host_blocks for s in asked):
        cache.step()
    (swapped,) = [s for s in asked if s.host_blocks]
    scheduler.finish(swapped, "abort")
    assert scheduler.host is not None
    scheduler.host.check([])
    run(scheduler, cache)
    assert [s.output for s in asked if s is not swapped] == [expected(s) for s in asked if s is not swapped]


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_a_prompt_that_is_cached_whole_is_computed_from_its_last_token(length: int):
    scheduler = make(block_size=4)
    cache = Cache(scheduler)
    twice = [one(i, list(range(length)), 1) for i in range(2)]
    for sequence in twice:
        scheduler.add(sequence)
        run(scheduler, cache)
        assert sequence.output == expected(sequence)
    assert twice[1].num_cached == (length - 1) // 4 * 4


def test_answers_to_one_prompt_share_its_blocks():
    scheduler = make(num_blocks=16, block_size=2)
    for sequence in sequences(0, [1, 2, 0, 1, 2], SamplingParams(n=3, max_tokens=2), 7, 100, 0.0, None):
        scheduler.add(sequence)
    run(scheduler)
    assert scheduler.counts.prefix_hits == 8


def test_the_first_in_the_queue_is_not_passed():
    scheduler = make(num_blocks=6, block_size=2, step_tokens=64)
    cache = Cache(scheduler)
    scheduler.add(one(0, [1] * 8, 3))
    cache.step()
    large, small = one(1, [2] * 8, 2), one(2, [1], 1)
    scheduler.add(large)
    scheduler.add(small)
    cache.step()
    assert [s.id for s in scheduler.running] == [0]
    assert [s.id for s in scheduler.waiting] == [1, 2]
    run(scheduler, cache)
    assert large.output == expected(large)


def test_priority_is_a_head_start():
    scheduler = make(max_running=1)
    for number, order in ((0, 5.0), (1, 1.0), (2, 3.0)):
        scheduler.add(one(number, [number], 1, order))
    seen = []
    while not scheduler.is_idle:
        seen += [s.id for s in scheduler.waiting[:1]]
        Cache(scheduler).step()
    assert seen == [1, 2, 0]


def test_a_full_queue_refuses():
    scheduler = make(max_waiting=2)
    scheduler.check_room(2)
    scheduler.add(one(0, [1], 1))
    with pytest.raises(InputError, match="1 requests wait already and 2 may"):
        scheduler.check_room(2)


def test_deadlines_by_the_clock():
    now = [0.0]
    scheduler = make(clock=lambda: now[0])
    late = sequences(0, [1], SamplingParams(), 0, 10, 0.0, 2.0)[0]
    scheduler.add(late)
    assert list(scheduler.late()) == []
    now[0] = 2.0
    assert list(scheduler.late()) == [late]
    scheduler.finish(late, "deadline")
    scheduler.finish(late, "abort")
    assert scheduler.is_idle
    assert scheduler.counts.finished == {"deadline": 1}


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_random_traces(data: st.DataObject):
    """Arrivals, cancellations and preemptions in any order: right tokens, no block lost, an end."""
    block_size = data.draw(st.integers(1, 4))
    num_blocks = data.draw(st.integers(-(-18 // block_size), 24))
    sizes = {name: data.draw(st.integers(1, 9)) for name in ("step_tokens", "max_running")}
    sizes["num_host_blocks"] = data.draw(st.integers(0, 12))
    scheduler = make(num_blocks, block_size, prefix_cache=data.draw(st.booleans()), max_waiting=999, **sizes)
    cache, asked = Cache(scheduler), []
    for number in range(25):
        what = data.draw(st.sampled_from(["add", "step", "step", "abort"]))
        if what == "add":
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
            asked.append(one(number, prompt, data.draw(st.integers(1, 10)), data.draw(st.integers(0, 9))))
            scheduler.add(asked[-1])
        elif what == "abort" and asked:
            scheduler.finish(data.draw(st.sampled_from(asked)), "abort")
        else:
            cache.step()
        scheduler.blocks.check(tables(scheduler, asked))
        if scheduler.host is not None:
            scheduler.host.check([s.host_blocks for s in asked])
    run_on = 0
    while not scheduler.is_idle:
        cache.step()
        run_on += 1
        assert run_on < 5000
    for sequence in asked:
        assert sequence.finish in ("length", "abort")
        assert sequence.finish == "abort" or sequence.output == expected(sequence)
    scheduler.blocks.check([])
    assert scheduler.blocks.num_free == num_blocks
    assert scheduler.host is None or scheduler.host.num_held == 0


def test_draws_depend_on_seed_and_place_alone():
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(seed, index) for seed in range(9) for index in range(9)}) == 81
    assert all(0 <= uniform(0, index) < 1 for index in range(99))
    assert derived_seed(5, 0) == 5
    assert len({derived_seed(5, answer) for answer in range(9)}) == 9


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -1}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"), ({"seed": 2**63}, "seed"), ({"stop": ("",)}, "empty stop"), ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {-1: 1.0}}, "token -1"), ({"logit_bias": {1: 1000.0}}, "bias 1000"), ({"top": 1}, "top"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens 9"), ({"logprobs": 21}, "logprobs"),
    ],
)  # fmt: skip
def test_params_that_are_none_are_refused_in_one_line(wrong: dict[str, object], says: str):
    with pytest.raises(InputError, match=says) as error:
        SamplingParams(**wrong)
    assert "\n" not in str(error.value)


def test_times_of_a_step_are_counted_together():
    """Three answers that run, one that begins: as if each had been counted alone."""
    now = [10.0]
    metrics = Metrics([Scheduler(ServeOptions(num_blocks=8), BlockManager(8, 4, False))], "m", clock=lambda: now[0])
    some = [Sequence(at, (1,), SamplingParams(), 0, 9, 0.0) for at in range(4)]
    for sequence in some:
        sequence.arrived_s, sequence.started_s = 9.0, 9.5
    metrics.tokens(some[:3])
    now[0] = 10.03
    metrics.tokens(some)
    text = metrics.text().decode()
    for line in (
        'inter_token_latency_seconds_count{model_name="m"} 3.0',
        'inter_token_latency_seconds_bucket{le="0.02",model_name="m"} 0.0',
        'inter_token_latency_seconds_bucket{le="0.04",model_name="m"} 3.0',
        'inter_token_latency_seconds_bucket{le="+Inf",model_name="m"} 3.0',
        'time_to_first_token_seconds_count{model_name="m"} 4.0',
        'time_to_first_token_seconds_bucket{le="1.0",model_name="m"} 3.0',
        'request_prefill_time_seconds_bucket{le="0.5",model_name="m"} 3.0',
    ):
        assert f"vllm:{line}\n" in text, line
    total = next(line for line in text.splitlines() if line.startswith("vllm:inter_token_latency_seconds_sum"))
    assert float(total.split()[-1]) == pytest.approx(0.09)
