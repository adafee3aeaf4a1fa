"""Generation without a cache."""

import pytest
import torch

from meshwright.core.errors import InputError
from meshwright.models.generate import generate
from tests.models.tiny import SPECS, random_model, random_tokens


@pytest.fixture(scope="module")
def model():
    return random_model(SPECS["llama"])


def test_greedy_takes_the_most_likely_token_each_time(model):
    tokens = prompt = random_tokens(model.spec, 1, 4)
    for _ in range(6):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generate(model, prompt, 6, temperature=0), tokens)


def test_greedy_equals_transformers(tmp_path, model):
    transformers = pytest.importorskip("transformers")
    from meshwright.models.hf import export

    export(tmp_path / "out", model.spec, model.named_parameters())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = random_tokens(model.spec, 1, 4)
    mask = torch.ones_like(prompt)
    expected = theirs.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(generate(model, prompt, 12, temperature=0), expected)


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 5e-324])
def test_hardly_any_temperature_is_none(model, temperature):
    prompt = random_tokens(model.spec, 1, 4)
    assert torch.equal(generate(model, prompt, 6, temperature), generate(model, prompt, 6, temperature=0))


def test_what_is_no_temperature_or_seed(model):
    prompt = random_tokens(model.spec, 1, 4)
    for temperature in (float("nan"), float("inf"), -1.0):
        with pytest.raises(InputError, match="temperature must be at least 0"):
            generate(model, prompt, 1, temperature)
    for seed in (-1, 2**63, 99999999999999999999):
        with pytest.raises(InputError, match=f"seed {seed}"):
            generate(model, prompt, 1, seed=seed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_named(temperature):
    model = random_model(SPECS["llama"])
    with torch.no_grad():
        next(model.parameters())[0] = float("nan")
    with pytest.raises(InputError, match="the model's output is not finite"):
        generate(model, torch.zeros(1, 1, dtype=torch.int64), 1, temperature)


def test_draws_follow_the_seed(model):
    prompt = random_tokens(model.spec, 1, 4)
    first = generate(model, prompt, 20, seed=1)
    assert torch.equal(first, generate(model, prompt, 20, seed=1))
    assert not torch.equal(first, generate(model, prompt, 20, seed=2))


def test_top_k_and_temperature(model):
    prompt = random_tokens(model.spec, 1, 4)
    greedy = generate(model, prompt, 8, temperature=0)
    assert torch.equal(generate(model, prompt, 8, top_k=1, seed=5), greedy)
    assert torch.equal(generate(model, prompt, 8, temperature=1e-4, seed=5), greedy)
    likely = model(prompt)[0, -1].topk(3).indices.tolist()
    drawn = {generate(model, prompt, 1, temperature=5.0, top_k=3, seed=seed)[0, -1].item() for seed in range(40)}
    assert drawn == set(likely)


@pytest.mark.parametrize(("name", "window"), [("gpt2", 64), ("mistral", 48)])
def test_the_window_slides(name, window):
    model = random_model(SPECS[name])
    prompt = random_tokens(model.spec, 1, window + 6)
    out = generate(model, prompt, 3, temperature=0)
    assert out.shape == (1, window + 9)
    assert torch.equal(out[:, -1:], model(out[:, -window - 1 : -1])[:, -1:].argmax(-1))


@pytest.mark.parametrize(
    ("shape", "options"),
    [((1, 0), {}), ((2, 3), {}), ((3,), {}), ((1, 2), {"temperature": -1.0}), ((1, 2), {"top_k": 0})],
)
def test_bad_requests_are_refused(model, shape, options):
    with pytest.raises(InputError):
        generate(model, torch.zeros(shape, dtype=torch.int64), 1, **options)
