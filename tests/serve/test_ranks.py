"""Served over several ranks: the tokens of one process."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.core.strategy import Strategy
from meshwright.cost.kv_cache import kv_token_bytes
from meshwright.models.generate import generate
from meshwright.serve.engine import Engine
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams
from tests.models.tiny import SPECS, random_model, random_tokens

OPTIONS = ServeOptions(block_size=4, num_blocks=14, step_tokens=9)
LENGTHS = (1, 5, 9, 12)


def prompts_of(name: str) -> list[list[int]]:
    return [random_tokens(SPECS[name], 1, n, seed=n)[0].tolist() for n in LENGTHS]


def serve(rank: int, world: int, name: str, strategy: Strategy) -> tuple[list[list[int]], int, int]:
    """(tokens, preemptions, bytes of the cache)."""
    model = random_model(SPECS[name])
    engine = Engine(model, strategy, OPTIONS, mesh=Mesh.create(strategy.sizes))
    engine.beat()
    answers = engine.generate(prompts_of(name), SamplingParams(max_tokens=10, temperature=0))
    found = [answer.tokens for group in answers for answer in group]
    return found, engine.scheduler.counts.preemptions, engine.runner.cache_bytes


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [("llama", 2, 1), ("llama", 1, 2), ("gpt2", 2, 2), ("llama-tied-scaled", 4, 1), ("qwen3-wide-heads", 2, 2)],
)
def test_tokens_of_every_layout_are_those_of_one_process(ranks, name: str, tp: int, pp: int):
    strategy = Strategy(tp=tp, pp=pp)
    results = ranks(serve, tp * pp, name, strategy)
    model = random_model(SPECS[name])
    expected = [generate(model, torch.tensor([p]), 10, temperature=0)[0, len(p) :].tolist() for p in prompts_of(name)]
    found, preemptions, _ = results[0]
    assert found == expected
    assert preemptions > 0
    assert [tokens for tokens, _, _ in results[1:]] == [[]] * (tp * pp - 1)
    for rank, (_, _, cache_bytes) in enumerate(results):
        assert cache_bytes == 14 * 4 * kv_token_bytes(model.spec, strategy, rank // tp)
