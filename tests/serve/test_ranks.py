"""Served over several ranks: the tokens of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.core.errors import UnsupportedError
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Expert, Strategy
from meshwright.cost.kv_cache import kv_token_bytes
from meshwright.models.generate import generate
from meshwright.models.hf import export
from meshwright.run.served import open_model
from meshwright.serve.batch import Batch
from meshwright.serve.engine import Engine
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams
from meshwright.serve.servable import check_servable
from tests.models.tiny import SPECS, random_model, random_tokens

OPTIONS = ServeOptions(block_size=4, num_blocks=14, step_tokens=9)
LENGTHS = (1, 5, 9, 12)


def prompts_of(name: str) -> list[list[int]]:
    return [random_tokens(SPECS[name], 1, n, seed=n)[0].tolist() for n in LENGTHS]


def serve(
    rank: int, world: int, name: str, strategy: Strategy, preempt: str = "recompute"
) -> tuple[list[list[int]], int, int]:
    """(tokens, preemptions, bytes of the cache). One request more is left while it runs. All go to the first replica:
    others that share its experts take part with empty steps."""
    model = random_model(SPECS[name])
    options = OPTIONS.model_copy(update={"preempt": preempt, "swap_bytes": 2**20})
    engine = Engine(model, strategy, options, mesh=Mesh.create(strategy.sizes, ep=strategy.ep))
    engine.beat()
    if engine.mesh.rank:
        engine.follow()
        return [], 0, engine.runner.cache_bytes
    params = SamplingParams(max_tokens=10, temperature=0)
    first, *rest = prompts_of(name)
    (left,) = engine.submit(rest[-1], params)
    answers = {engine.submit(prompt, params)[0]: [] for prompt in (first, *rest)}
    while not engine.is_idle:
        if len(left.output) == 2:
            engine.cancel(left)
        for event in engine.step():
            if event.sequence is not left and event.token is not None:
                answers[event.sequence].append(event.token)
    for replica in engine.replicas:
        replica.stop()
    assert left.finish == "abort"
    assert engine.scheduler.blocks.num_held == 0
    assert (engine.scheduler.counts.swapped_back > 0) is (preempt == "swap")
    return list(answers.values()), engine.scheduler.counts.preemptions, engine.runner.cache_bytes


def test_who_is_alone_tells_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(Batch, "to_vector")
    engine = Engine(random_model(SPECS["llama"]), options=OPTIONS)
    assert [len(answer.tokens) for (answer,) in engine.generate([[1, 2]], SamplingParams(max_tokens=3))] == [3]


@pytest.mark.parametrize(
    ("name", "tp", "pp", "ep"),
    [
        ("llama", 2, 1, 1), ("llama", 1, 2, 1), ("gpt2", 2, 2, 1), ("llama-tied-scaled", 4, 1, 1),
        ("qwen3-wide-heads", 2, 2, 1), ("mixtral", 2, 1, 1), ("qwen3-moe", 1, 2, 2), ("deepseek", 2, 1, 2),
        ("deepseek-v2", 2, 2, 1), ("deepseek-v3", 2, 1, 2),
    ],
)  # fmt: skip
def test_tokens_of_every_layout_are_those_of_one_process(ranks, name: str, tp: int, pp: int, ep: int):
    strategy = Strategy(tp=tp, pp=pp, dp=ep, expert=Expert(degree=ep))
    results = ranks(serve, tp * pp * ep, name, strategy)
    model = random_model(SPECS[name])
    expected = [generate(model, torch.tensor([p]), 10, temperature=0)[0, len(p) :].tolist() for p in prompts_of(name)]
    found, preemptions, _ = results[0]
    assert found == expected
    assert preemptions > 0
    assert [tokens for tokens, _, _ in results[1:]] == [[]] * (tp * pp * ep - 1)
    for rank, (_, _, cache_bytes) in enumerate(results):
        assert cache_bytes == 14 * 4 * kv_token_bytes(model.spec, strategy, rank // (tp * ep))


def serve_replicas(rank: int, world: int, name: str, strategy: Strategy, params: SamplingParams) -> list[object]:
    """Of rank 0: (tokens of all prompts and samples, of each replica: answers, preemptions, blocks that are held)."""
    model = random_model(SPECS[name])
    options = OPTIONS.model_copy(update={"preempt": "swap", "swap_bytes": 2**20})
    engine = Engine(model, strategy, options, mesh=Mesh.create(strategy.sizes, ep=strategy.ep))
    for replica in engine.replicas:
        replica.beat()
    found = engine.generate(prompts_of(name) * 2, params)
    if rank:
        return [[], len(engine.replicas)]
    counts = [replica.scheduler.counts for replica in engine.replicas]
    held = [replica.scheduler.blocks.num_held for replica in engine.replicas]
    ends, preemptions = ([getattr(c, name) for c in counts] for name in ("finished", "preemptions"))
    return [[[a.tokens for a in answers] for answers in found], ends, preemptions, held]


@pytest.mark.parametrize(
    ("name", "dp", "tp", "pp", "ep"),
    [
        ("llama", 2, 1, 1, 1), ("mixtral", 2, 2, 1, 1), ("gpt2", 2, 1, 2, 1),
        ("mixtral", 2, 1, 1, 2), ("deepseek-v3", 4, 1, 1, 2), ("qwen3-moe", 2, 1, 2, 2), ("deepseek", 2, 2, 1, 2),
    ],
)  # fmt: skip
def test_replicas_answer_as_one_process_does(ranks, name: str, dp: int, tp: int, pp: int, ep: int):
    """With their own experts, and with those that neighbours share."""
    model, strategy = random_model(SPECS[name]), Strategy(dp=dp, tp=tp, pp=pp, expert=Expert(degree=ep))
    for params in (SamplingParams(max_tokens=10, temperature=0), SamplingParams(max_tokens=10, seed=5, n=2)):
        results = ranks(serve_replicas, dp * tp * pp, name, strategy, params)
        expected = Engine(model, options=OPTIONS).generate(prompts_of(name) * 2, params)
        found, ends, preemptions, held = results[0]
        assert found == [[a.tokens for a in answers] for answers in expected]
        answered = [sum(each.values()) for each in ends]
        assert sum(answered) == 8 * params.n
        assert min(answered) >= params.n, "each has answered some"
        assert sum(preemptions) > 0
        assert held == [0] * dp
        assert results[1:] == [[[], 1]] * (dp * tp * pp - 1)


def test_every_rank_swaps_its_own_part(ranks):
    strategy = Strategy(tp=2, pp=2)
    swapped, again = (ranks(serve, 4, "gpt2", strategy, preempt)[0] for preempt in ("swap", "recompute"))
    assert swapped[0] == again[0]
    assert swapped[1] > 0


def serve_folder(rank: int, world: int, folder: Path, strategy: Strategy) -> tuple[list[int], list[str]]:
    """(tokens, what the experts of a rank and its routers' biases are)."""
    served = open_model(folder)
    job = Job(seq_length=8, global_batch_size=strategy.dp)
    plan = Plan(model=served.spec, cluster=load_cluster("local:4"), job=job, strategy=strategy)
    engine = served.engine(plan, OPTIONS)
    shapes = [
        f"{name} {tuple(value.shape)}" for name, value in (*engine.runner._model.named_parameters(),)
        if name.endswith("experts.up.weight")
    ]  # fmt: skip
    answers = engine.generate([prompts_of("deepseek")[3]], SamplingParams(max_tokens=10, temperature=0))
    return (answers[0][0].tokens if answers else []), shapes


def test_each_rank_reads_its_own_experts_from_a_folder(ranks, tmp_path: Path):
    """Routers' biases too: without them other experts would be chosen."""
    model, strategy = random_model(SPECS["deepseek"]), Strategy(tp=2, dp=2, expert=Expert(degree=2))
    export(tmp_path / "model", model.spec, model.stored())
    results = ranks(serve_folder, 4, tmp_path / "model", strategy)
    prompt = prompts_of("deepseek")[3]
    expected = generate(model, torch.tensor([prompt]), 10, temperature=0)[0, len(prompt) :].tolist()
    assert results[0][0] == expected
    spec = model.spec
    held = (spec.num_experts // 2, spec.expert_size // 2, spec.hidden_size)
    assert all(shape.endswith(str(held)) for _, shapes in results for shape in shapes)
    assert results[0][1]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tp": 2, "expert": {"degree": 2, "tensor": 1}}, "expert.tensor=1 with tp=2: serving"),
        ({"dp": 2, "zero": 1, "expert": {"degree": 2}}, "zero=1: serving"),
    ],
)
def test_layouts_that_are_not_served(change: dict[str, object], fault: str):
    with pytest.raises(UnsupportedError, match=fault):
        check_servable(SPECS["mixtral"], Strategy.model_validate(change))
