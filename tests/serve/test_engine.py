"""Many requests through one model give each the tokens that it would get alone."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.strategy import Strategy
from meshwright.cost.kv_cache import kv_token_bytes
from meshwright.models.decoder import Decoder
from meshwright.models.generate import generate
from meshwright.serve.engine import Answer, Engine
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams, sequences, uniform
from meshwright.serve.sampler import choose, draw
from tests.models.tiny import SPECS, random_model, random_tokens
from tests.serve.test_text import byte_level

GREEDY = SamplingParams(max_tokens=12, temperature=0)
SERVED = [name for name in SPECS if name != "switch"]


def make(model: Decoder, tokenizer: Tokenizer | None = None, **change: object) -> Engine:
    options = ServeOptions.model_validate({"block_size": 4, "num_blocks": 40, "step_tokens": 64, **change})
    return Engine(model, options=options, tokenizer=tokenizer)


def prompts_of(model: Decoder, *lengths: int) -> list[list[int]]:
    return [random_tokens(model.spec, 1, n, seed=n)[0].tolist() for n in lengths]


def alone(model: Decoder, prompt: list[int], count: int = 12) -> list[int]:
    return generate(model, torch.tensor([prompt]), count, temperature=0)[0, len(prompt) :].tolist()


def tokens(answers: list[list[Answer]]) -> list[list[int]]:
    return [answer.tokens for group in answers for answer in group]


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_of_every_family(name: str):
    model = random_model(SPECS[name])
    prompts = prompts_of(model, 1, 3, 7, 16, 20)
    expected = [alone(model, prompt) for prompt in prompts]
    engine = make(model, num_blocks=20, step_tokens=8)
    assert tokens(engine.generate(prompts, GREEDY)) == expected
    assert engine.scheduler.blocks.num_held == 0
    assert tokens(engine.generate(prompts, GREEDY)) == expected, "with prefixes of the cache"


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "qwen3-moe", "deepseek-v3"])
def test_greedy_tokens_are_those_of_transformers(tmp_path, name: str):
    transformers = pytest.importorskip("transformers")
    from meshwright.models.hf import export

    model = random_model(SPECS[name])
    export(tmp_path / "out", model.spec, model.stored())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompts = prompts_of(model, 2, 9, 17)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert tokens(make(model).generate(prompts, GREEDY)) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"step_tokens": 1},
        {"step_tokens": 5},
        {"max_running": 2},
        {"block_size": 1},
        {"num_blocks": 9, "step_tokens": 3},
        {"prefix_cache": False, "num_blocks": 9},
    ],
)
def test_tokens_do_not_depend_on_how_they_are_computed(change: dict[str, object]):
    model = random_model(SPECS["llama"])
    prompts = prompts_of(model, 5, 1, 12, 13, 9, 16)
    expected = [alone(model, prompt) for prompt in prompts]
    assert tokens(make(model, **change).generate(prompts, GREEDY)) == expected


def test_a_hit_of_the_prefix_cache_gives_the_logits_of_a_cold_run():
    model = random_model(SPECS["llama"], torch.float64)
    engine = make(model)
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=5)
    for length in (3, 4, 5, 8, 16):
        (prompt,) = prompts_of(model, length)
        cold, hit, again = (engine.generate([prompt], params)[0][0] for _ in range(3))
        assert cold.tokens == hit.tokens == again.tokens
        for one, other in zip(cold.logprobs, hit.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-10)
    assert engine.scheduler.counts.prefix_hits > 0


def test_draws_depend_on_the_own_seed_alone():
    model = random_model(SPECS["llama"])
    prompts = prompts_of(model, 6, 6, 3)
    params = [SamplingParams(max_tokens=10, seed=seed, top_p=0.9, temperature=2) for seed in (3, 3, 4)]
    together = tokens(make(model, num_blocks=9).generate(prompts, params))
    apart = [tokens(make(model).generate([p], own))[0] for p, own in zip(prompts, params, strict=True)]
    assert together == apart
    assert together[0] == together[1]
    other = params[0].model_copy(update={"seed": 5})
    assert tokens(make(model).generate(prompts[:1], other))[0] != together[0]


def test_several_answers_differ_and_each_can_be_drawn_again():
    model = random_model(SPECS["llama"])
    params = SamplingParams(max_tokens=8, n=3, seed=1, temperature=2)
    first, again = (tokens(make(model).generate(prompts_of(model, 5), params)) for _ in range(2))
    assert first == again
    assert len({tuple(answer) for answer in first}) == 3


def test_the_cache_takes_what_the_formula_says():
    for name in ("gpt2", "llama", "qwen3-wide-heads"):
        model = random_model(SPECS[name])
        engine = make(model, num_blocks=7)
        assert engine.runner.cache_bytes == 7 * 4 * kv_token_bytes(model.spec, Strategy())


def test_log_probabilities():
    model = random_model(SPECS["llama"], torch.float64)
    (prompt,) = prompts_of(model, 9)
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=True)
    engine, num_rows = make(model, step_tokens=4), []
    run = engine.runner.run
    engine.runner.run = lambda batch: num_rows.append(len(batch.wanted)) or run(batch)
    answer = engine.generate([prompt], params)[0][0]
    assert max(num_rows) == 4, "logits of one chunk at a time, not of the whole prompt"
    all_tokens = prompt + answer.tokens
    expected = model(torch.tensor([all_tokens]))[0].log_softmax(-1)
    found = [*answer.prompt_logprobs, *answer.logprobs]
    assert [one.token for one in found] == all_tokens[1:]
    for at, one in enumerate(found):
        assert one.logprob == pytest.approx(expected[at, all_tokens[at + 1]].item(), abs=1e-9)
        assert [token for token, _ in one.top] == expected[at].topk(3).indices.tolist()


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_log_probabilities_of_a_prompt_that_is_preempted_halfway_come_once(preempt: str):
    model = random_model(SPECS["llama"], torch.float64)
    first, prompt = prompts_of(model, 4, 16)
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=0, prompt_logprobs=True)
    engine = make(model, num_blocks=6, step_tokens=3, preempt=preempt)
    longer = SamplingParams(max_tokens=12, temperature=0)
    found = engine.generate([first, prompt], [longer, params])[1][0].prompt_logprobs
    assert engine.scheduler.counts.preemptions == 1
    alone = make(model).generate([prompt], params)[0][0].prompt_logprobs
    assert [one.token for one in found] == [one.token for one in alone] == prompt[1:]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in alone], abs=1e-9)


def test_stop_strings_and_end_tokens():
    model, tokenizer = random_model(SPECS["llama"]), byte_level()
    (prompt,) = prompts_of(model, 4)
    expected = alone(model, prompt, 16)
    text = tokenizer.decode(expected)
    engine = make(model, tokenizer)
    plain = engine.generate([prompt], SamplingParams(max_tokens=16, temperature=0))[0][0]
    assert (plain.text, plain.finish) == (text, "length")
    stop = text[5:8]
    answer = engine.generate([prompt], SamplingParams(max_tokens=16, temperature=0, stop=(stop,)))[0][0]
    assert (answer.text, answer.finish) == (text[: text.index(stop)], "stop")
    third = expected[2]
    for params in (SamplingParams(max_tokens=16, temperature=0, stop_token_ids=(third,)),):
        answer = engine.generate([prompt], params)[0][0]
        assert answer.tokens == expected[: expected.index(third) + 1]
        assert answer.finish == "stop"
    engine.end_tokens = frozenset({third})
    assert engine.generate([prompt], GREEDY)[0][0].finish == "stop"
    assert engine.generate([prompt], GREEDY.model_copy(update={"ignore_eos": True}))[0][0].tokens == expected[:12]
    least = GREEDY.model_copy(update={"min_tokens": 12})
    assert third not in engine.generate([prompt], least)[0][0].tokens[:11]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-30}])
def test_what_leaves_one_token_is_greedy(params: dict[str, float]):
    model = random_model(SPECS["llama"])
    prompts = prompts_of(model, 3, 4, 5)
    found = tokens(make(model).generate(prompts, SamplingParams(max_tokens=8, **params)))
    assert found == [alone(model, prompt, 8) for prompt in prompts]


def test_draws_follow_the_probabilities():
    model = random_model(SPECS["llama"])
    (prompt,) = prompts_of(model, 3)
    probabilities = (model(torch.tensor([prompt])).detach()[0, -1] / 1.5).softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=1.5, n=128)
    found = [tokens(make(model).generate([prompt], params.model_copy(update={"seed": s}))) for s in range(16)]
    counts = torch.bincount(torch.tensor(found).flatten(), minlength=61) / (16 * 128)
    assert float((counts - probabilities).abs().sum()) < 0.15
    assert float((counts - torch.full((61,), 1 / 61)).abs().sum()) > 0.15, "a control: not uniform"


def test_penalties_and_biases():
    model = random_model(SPECS["llama"])
    (prompt,) = prompts_of(model, 3)
    first = alone(model, prompt, 1)[0]
    banned = SamplingParams(max_tokens=12, temperature=0, logit_bias={first: -100})
    assert first not in make(model).generate([prompt], banned)[0][0].tokens
    wanted = SamplingParams(max_tokens=3, temperature=0, logit_bias={7: 100})
    assert make(model).generate([prompt], wanted)[0][0].tokens == [7, 7, 7]
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}):
        params = SamplingParams(max_tokens=12, temperature=0, **penalty)
        found = make(model).generate([prompt], params)[0][0].tokens
        assert len(set(found)) >= len(set(alone(model, prompt)))


def test_requests_that_cannot_be_answered():
    model = random_model(SPECS["llama"])
    engine = make(model, num_blocks=12)
    for prompt, params, says in (
        ([], GREEDY, "empty"),
        ([61], GREEDY, "token 61"),
        ([-1], GREEDY, "token -1"),
        ([1] * 48, GREEDY, "48 tokens, but the whole key/value cache is 48"),
        ([1], SamplingParams(logit_bias={99: 1.0}), "logit_bias: token 99"),
    ):
        with pytest.raises(InputError, match=says):
            engine.submit(prompt, params)
    with pytest.raises(InputError, match="64"):
        make(model).submit([1] * 64)
    with pytest.raises(InputError, match="no tokenizer"):
        engine.submit("text")
    with pytest.raises(InputError, match="lone surrogate"):
        make(model, byte_level()).submit("\ud800")
    assert engine.is_idle


@pytest.mark.parametrize(("length", "count", "new"), [(63, 1, 1), (63, 640, 1), (60, 64, 4), (60, None, 4), (64, 0, 0)])
def test_answers_end_where_the_context_ends(length: int, count: int | None, new: int):
    model = random_model(SPECS["llama"])
    (prompt,) = prompts_of(model, length)
    answer = make(model).generate([prompt], SamplingParams(max_tokens=count, temperature=0))[0][0]
    assert answer.tokens == alone(model, prompt, new)
    assert answer.finish == "length"


def test_weights_that_are_not_finite_end_the_answer():
    model = random_model(SPECS["llama"])
    with torch.no_grad():
        model.final_norm.weight[0] = float("nan")
    assert make(model).generate([[1]], GREEDY)[0][0].finish == "error"


def test_cancelled_and_late_sequences_give_up_their_blocks():
    now = [0.0]
    model = random_model(SPECS["llama"])
    options = ServeOptions(block_size=4, num_blocks=40, step_tokens=4)
    engine = Engine(model, options=options, clock=lambda: now[0])
    prompts = prompts_of(model, 12, 9)
    (cancelled,) = engine.submit(prompts[0], GREEDY)
    (late,) = engine.submit(prompts[1], GREEDY, timeout_s=5.0)
    engine.step()
    engine.cancel(cancelled)
    assert engine.scheduler.blocks.num_held == 0
    for _ in range(4):
        engine.step()
    now[0] = 6.0
    (event,) = engine.step()
    assert (event.sequence, event.finish) == (late, "deadline")
    assert engine.is_idle
    assert engine.scheduler.blocks.num_held == 0


def test_what_cannot_be_served():
    model = random_model(SPECS["llama"])
    with pytest.raises(UnsupportedError, match="zero=1"):
        Engine(model, Strategy(zero=1))
    with pytest.raises(UnsupportedError, match="capacity"):
        Engine(random_model(SPECS["switch"]))
    with pytest.raises(InputError, match="cache_bytes=10"):
        Engine(model, options=ServeOptions(cache_bytes=10))


def test_draws_together_are_draws_alone():
    logits = torch.randn(5, 97)
    params = [SamplingParams(temperature=t, seed=t) for t in (1, 2, 3)]
    made = [
        sequence
        for at, own in enumerate([*params, SamplingParams(temperature=0), SamplingParams(top_k=3, seed=4)])
        for sequence in sequences(at, [1, 2], own, own.seed or 0, 50, 0.0, None)
    ]
    found = [choice.token for choice in choose(logits, made, frozenset())]
    assert found == [choose(logits[at : at + 1], [one], frozenset())[0].token for at, one in enumerate(made)]
    expected = [draw(logits[at], one.params, uniform(one.seed, 0)) for at, one in enumerate(made[:3])]
    assert found[:3] == expected
    assert found[3] == int(logits[3].argmax())
    assert len({draw(logits[0], params[0], at / 20) for at in range(20)}) > 5, "a control: the number counts"
