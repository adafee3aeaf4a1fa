"""Swapping on real caches: copies that lose nothing, and when they pay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.core.errors import InputError
from meshwright.models.generate import generate
from meshwright.serve.batch import Batch, make_batch
from meshwright.serve.engine import Engine
from meshwright.serve.metrics import Metrics
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams
from meshwright.serve.scheduler import Moves
from meshwright.serve.swap import HostTier, Pace
from tests.models.tiny import SPECS, random_model, random_tokens

SMALL = {"block_size": 4, "num_blocks": 14, "step_tokens": 9, "swap_bytes": 2**20}


def prompts_of(name: str) -> list[list[int]]:
    return [random_tokens(SPECS[name], 1, n, seed=n)[0].tolist() for n in (1, 5, 9, 12)]


def moved(out: list[tuple[int, int]], back: list[tuple[int, int]]) -> Batch:
    """A step that computes nothing."""
    return make_batch([], 4, Moves(out, back))


@pytest.mark.parametrize("shape", [(2, 24, 3, 5), (24, 7)])
def test_blocks_come_back_to_the_bit_wherever_they_are_put(shape: tuple[int, ...]):
    cache = [torch.randn(shape) for _ in range(2)]
    before = [layer.clone() for layer in cache]
    tier = HostTier(cache, 3, 4)
    tier.move(moved([(5, 0), (1, 2)], []))
    for layer in cache:
        layer[..., : 2 * 4, *(slice(None),) * (layer.dim() - 2 if layer.dim() == 4 else 1)].zero_()
    tier.move(moved([], [(0, 2), (3, 0)]))
    for layer, old in zip(cache, before, strict=True):
        blocks, olds = (x.reshape(-1, 6, 4, *x.shape[-2 if x.dim() == 4 else -1 :]) for x in (layer, old))
        assert torch.equal(blocks[:, 0], olds[:, 1])
        assert torch.equal(blocks[:, 3], olds[:, 5])
        assert not blocks[:, 1].any(), "a control: what was not copied back is gone"
    assert tier.moved_bytes == 4 * tier.block_bytes == 4 * sum(layer.nbytes // 6 for layer in cache)


def test_moves_travel_with_a_step():
    batch = moved([(5, 0), (1, 2)], [(0, 2)])
    found = Batch.from_vector(batch.to_vector())
    assert found.num_tokens == 0
    assert np.array_equal(found.out, [5, 0, 1, 2])
    assert np.array_equal(found.back, [0, 2])


@pytest.mark.parametrize("preempt", ["swap", "auto"])
@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_swapped_answers_are_those_of_the_model_alone(name: str, preempt: str):
    model = random_model(SPECS[name])
    engine = Engine(model, options=ServeOptions.model_validate({**SMALL, "preempt": preempt}))
    found = engine.generate(prompts_of(name), SamplingParams(max_tokens=10, temperature=0))
    expected = [generate(model, torch.tensor([p]), 10, temperature=0)[0, len(p) :].tolist() for p in prompts_of(name)]
    assert [answers[0].tokens for answers in found] == expected
    counts, host = engine.scheduler.counts, engine.scheduler.host
    assert counts.preemptions > 0
    assert (counts.swapped_out > 0) or preempt == "auto"
    assert host is not None
    host.check([])
    assert engine.scheduler.blocks.num_held == 0
    text = Metrics([engine.scheduler], "m", engine.runner.block_bytes).text().decode()
    both = counts.swapped_out + counts.swapped_back
    assert f'vllm:swapped_bytes_total{{model_name="m"}} {float(both * engine.runner.block_bytes)}' in text
    assert engine.runner.host is not None
    assert engine.runner.host.moved_bytes == both * engine.runner.block_bytes
    assert engine.runner.host.nbytes <= SMALL["swap_bytes"]


def test_draws_do_not_depend_on_swapping():
    model = random_model(SPECS["llama"])
    params = SamplingParams(max_tokens=10, temperature=0.9, seed=3)
    found = []
    for change in ({"preempt": "swap"}, {"num_blocks": 99}):
        engine = Engine(model, options=ServeOptions.model_validate({**SMALL, **change}))
        found.append([a[0].tokens for a in engine.generate(prompts_of("llama"), params)])
        assert (engine.scheduler.counts.swapped_out > 0) is ("preempt" in change)
    assert found[0] == found[1]


def test_keys_and_values_that_are_spoilt_on_the_host_show(monkeypatch: pytest.MonkeyPatch):
    """A control: what comes back is what is read."""
    model = random_model(SPECS["llama"])
    engine = Engine(model, options=ServeOptions.model_validate({**SMALL, "preempt": "swap", "prefix_cache": False}))
    tier = engine.runner.host
    assert tier is not None
    move = tier.move

    def spoilt(batch: Batch) -> None:
        for side in tier._host:
            side.fill_(1e3)
        move(batch)

    monkeypatch.setattr(tier, "move", spoilt)
    found = engine.generate(prompts_of("llama"), SamplingParams(max_tokens=10, temperature=0))
    right = Engine(model).generate(prompts_of("llama"), SamplingParams(max_tokens=10, temperature=0))
    assert [a[0].tokens for a in found] != [a[0].tokens for a in right]


def test_swapping_pays_where_its_copies_take_less_than_computing():
    pace = Pace(block_s=1e-3, block_size=4)
    assert pace.swap_pays(4), "nothing is known of prompts"
    pace.saw(0, 0.010)
    pace.saw(100, 0.110)
    assert pace.swap_pays(8), "two blocks both ways in 4 ms, 8 tokens in 8 ms"
    assert not pace.swap_pays(1), "one block both ways in 2 ms, a token in 1 ms"
    slow = Pace(block_s=3e-3, block_size=4)
    slow.saw(100, 0.1)
    assert not slow.swap_pays(8)


def test_a_host_that_holds_no_block_is_refused():
    with pytest.raises(InputError, match="swap_bytes=100: one block of 4 tokens takes"):
        Engine(random_model(SPECS["llama"]), options=ServeOptions(block_size=4, preempt="swap", swap_bytes=100))
