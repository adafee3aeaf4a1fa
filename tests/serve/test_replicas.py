"""Several engines behind one loop: which one a request goes to, and what all are told when one fails.

Both engines of these tests compute in this process; over ranks they are tested in `test_ranks` and `test_death`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from meshwright.core.errors import UnsupportedError
from meshwright.core.plan import Plan
from meshwright.core.strategy import Expert, Strategy
from meshwright.serve.engine import Engine, Event
from meshwright.serve.loop import EngineFailure, EngineLoop, Ticket
from meshwright.serve.metrics import Metrics
from meshwright.serve.options import ServeOptions
from meshwright.serve.ranks import InStep
from meshwright.serve.request import SamplingParams
from meshwright.serve.servable import served_strategy
from tests.models.tiny import SPECS, random_model

GREEDY = SamplingParams(max_tokens=3, temperature=0)


def two(**change: object) -> Engine:
    """An engine with another beside it."""
    options = ServeOptions.model_validate({"block_size": 4, "num_blocks": 40, "step_tokens": 8, **change})
    first, second = (Engine(random_model(SPECS["llama"]), options=options) for _ in range(2))
    first.replicas = (first, second)
    return first


async def ended(ticket: Ticket) -> list[int]:
    """The tokens of an answer."""
    tokens: list[int] = []
    while True:
        for found in await ticket.mailbox.take():
            if isinstance(found, EngineFailure):
                raise found
            _, event = found
            tokens += [] if event.token is None else [event.token]
            if event.finish is not None:
                return tokens


def driven(engine: Engine, work: Callable[[EngineLoop], Awaitable[None]]) -> EngineLoop:
    """A loop that runs while `work` does."""
    loop = EngineLoop(engine)

    async def run() -> None:
        loop.start()
        await work(loop)
        await loop.stop()

    asyncio.run(run())
    return loop


def place(loop: EngineLoop, ticket: Ticket) -> int:
    return loop.engine.replicas.index(ticket.engine)


def test_a_request_goes_where_the_least_is_to_compute():
    engine = two()
    loop = EngineLoop(engine)  # nobody computes: all that is asked stays
    lengths = (30, 5, 5, 5, 30, 1)
    places = [place(loop, loop.submit([1] * length, GREEDY)) for length in lengths]
    assert places == [0, 1, 1, 1, 1, 0], "30 | 5 10 15 | 45 | 31, by eights"


def test_among_equals_the_longest_cached_prefix_decides():
    engine, prompt = two(), list(range(20))
    found = {}

    async def work(loop: EngineLoop) -> None:
        held = loop.submit([9] * 30, SamplingParams(max_tokens=200, temperature=0))
        found["first"] = loop.submit(prompt, GREEDY)
        found["tokens"] = await ended(found["first"])
        loop.cancel(held)
        while loop._open or not all(each.is_idle for each in engine.replicas):
            await asyncio.sleep(0.01)
        found["again"], found["other"] = loop.submit(prompt, GREEDY), loop.submit([7] * 9, GREEDY)
        found["same"] = await ended(found["again"])
        await ended(found["other"])

    loop = driven(engine, work)
    assert [place(loop, found[name]) for name in ("first", "again", "other")] == [1, 1, 0]
    assert found["same"] == found["tokens"]
    assert engine.replicas[1].scheduler.counts.prefix_hits == 16
    assert not loop._open


def test_requests_for_all_of_an_answer_stay_together_and_count():
    loop = EngineLoop(two())
    ticket = loop.submit([1] * 10, GREEDY.model_copy(update={"n": 3}))
    assert ticket.num_left == 30
    assert place(loop, loop.submit([1] * 20, GREEDY)) == 1


def test_one_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch):
    engine = two()
    failures: list[EngineFailure] = []

    def fail(batch: object) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(engine.replicas[1].runner, "run", fail)
    loop = EngineLoop(engine, on_failure=failures.append)

    async def run() -> None:
        loop.start()
        tickets = [loop.submit([1] * 9, SamplingParams(max_tokens=None, ignore_eos=True)) for _ in range(2)]
        for ticket in tickets:
            with pytest.raises(EngineFailure, match="RuntimeError: gone"):
                await ended(ticket)
        with pytest.raises(EngineFailure):
            loop.submit([1], GREEDY)
        for driver in loop._drivers:
            await asyncio.to_thread(driver.join)

    asyncio.run(run())
    assert [str(failure) for failure in failures] == ["the engine has failed: RuntimeError: gone"]


def test_a_client_that_leaves_frees_the_replica_that_answers_it():
    engine = two()

    async def work(loop: EngineLoop) -> None:
        tickets = [loop.submit([1] * 9, SamplingParams(max_tokens=None, ignore_eos=True)) for _ in range(2)]
        for ticket in tickets:
            assert all(isinstance(event, Event) for _, event in await ticket.mailbox.take())
            loop.cancel(ticket)

    driven(engine, work)
    assert [each.scheduler.counts.finished for each in engine.replicas] == [{"abort": 1}] * 2
    assert [each.scheduler.blocks.num_held for each in engine.replicas] == [0, 0]


def test_metrics_tell_replicas_apart_where_there_are_several():
    engine = two()
    engine.replicas[1].scheduler.counts.generation_tokens = 7
    several = Metrics([each.scheduler for each in engine.replicas], "m").text().decode()
    assert 'vllm:generation_tokens_total{model_name="m",replica="1"} 7.0' in several
    assert 'vllm:num_requests_running{model_name="m",replica="0"} 0.0' in several
    one = Metrics([engine.scheduler], "m").text().decode()
    assert 'vllm:generation_tokens_total{model_name="m"} 0.0' in one
    assert "replica" not in one


def test_how_many_replicas():
    assert served_strategy(None, "bf16", None).dp == 1
    assert served_strategy(None, "bf16", 3).world_size == 3
    plan = Plan.model_construct(strategy=Strategy(dp=4, tp=2))
    assert [served_strategy(plan, "", count).world_size for count in (None, 2)] == [8, 4]
    shared = Plan.model_construct(strategy=Strategy(dp=4, expert=Expert(degree=2)))
    assert served_strategy(shared, "", 2).world_size == 2
    with pytest.raises(UnsupportedError, match=r"--replicas 3: in the plan ep=2 replicas .* nearest: --replicas 2"):
        served_strategy(shared, "", 3)


def test_replicas_that_step_together_share_a_thread_and_tell_each_other_how_many_tokens_they_have():
    engine, told = two(), []
    engine.num_sharing, group = 2, []
    for each in engine.replicas:
        start = each.ranks.start
        each.ranks.start = lambda batch, start=start: (told.append(batch.shared.tolist()), start(batch))
        each.ranks = InStep(each.ranks, group)
    found: list[list[int]] = []

    async def work(loop: EngineLoop) -> None:
        assert len(loop._drivers) == 1
        tickets = [loop.submit([1] * length, GREEDY) for length in (8, 3)]
        assert [place(loop, ticket) for ticket in tickets] == [0, 1]
        found.extend([await ended(ticket) for ticket in tickets])

    driven(engine, work)
    plain = Engine(random_model(SPECS["llama"]))
    assert found == [answers[0].tokens for answers in plain.generate([[1] * 8, [1] * 3], GREEDY)]
    assert told[::2] == told[1::2], "both hear the same"
    assert [sum(counts) for counts in zip(*told[::2], strict=True)] == [8 + 2, 3 + 2]
