"""Names, shapes, cutting and limits of the plain decoder."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.models.build import build
from tests.models.tiny import SPECS, random_model, random_tokens

ALL = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


@ALL
def test_parameters_are_those_of_the_spec_in_order(spec):
    model = build(spec)
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == [
        (p.name, p.shape) for p in spec.parameters()
    ]
    assert all(p.is_meta for p in model.parameters())
    assert not model.state_dict().keys() - {*dict(model.named_parameters()), "head.weight"}  # tables are not weights


@ALL
def test_meta_forward_gives_logits(spec):
    logits = build(spec, dtype=torch.bfloat16)(torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    assert (logits.shape, logits.dtype) == ((2, 5, spec.vocab_size), torch.bfloat16)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_tied_head_is_the_embedding_itself(device):
    model = build(SPECS["qwen2"], device)
    assert model.head.weight is model.embedding.weight


@ALL
def test_fake_tensors_run_the_whole_step(spec):
    """A rehearsal builds and trains without memory; nothing may read a value."""
    with FakeTensorMode():
        model = build(spec, "cpu", torch.bfloat16)
        model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_a_tied_embedding_collects_both_gradients():
    spec = SPECS["llama-tied-scaled"]
    tied = random_model(spec, torch.float64)
    untied = random_model(spec.model_copy(update={"tied_embeddings": False}), torch.float64)
    state = tied.state_dict()
    untied.load_state_dict(state)
    tokens = random_tokens(spec, 2, 7)
    for model in (tied, untied):
        model(tokens).square().sum().backward()
    torch.testing.assert_close(tied.embedding.weight.grad, untied.embedding.weight.grad + untied.head.weight.grad)


@ALL
def test_stages_in_a_row_equal_the_whole(spec):
    tokens = random_tokens(spec, 2, 9)
    whole, first, last = (random_model(spec, torch.float64) for _ in range(3))
    del first.layers["1"]
    first.final_norm = first.head = None
    del last.layers["0"]
    last.embedding = last.positions = None
    assert torch.equal(whole(tokens), last(first(tokens)))


@ALL
def test_the_future_is_not_seen(spec):
    model, tokens = random_model(spec, torch.float64), random_tokens(spec, 1, 12)
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % spec.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_keeps_no_score_matrix(spec, dtype):
    """Nothing that autograd keeps grows with the square of the length, whatever the dtype."""
    model = random_model(spec, dtype)
    kept: list[torch.Size] = []
    length = 43
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        model(random_tokens(spec, 1, length))
    assert kept
    assert not [shape for shape in kept if list(shape).count(length) > 1]


def test_fewer_heads_are_read_off_the_projections():
    """Tensor parallelism leaves 2 query heads and 1 key/value head; the sum of both halves is the whole."""
    spec = SPECS["qwen3-wide-heads"]
    attention = random_model(spec, torch.float64).layers["0"].attention
    x = torch.randn(2, 6, spec.hidden_size, dtype=torch.float64)
    whole = attention(x)
    weights = {name: getattr(attention, name).weight.detach() for name in "qkvo"}
    halves = []
    for half in range(2):
        for name in "qkv":
            getattr(attention, name).weight = torch.nn.Parameter(weights[name].chunk(2)[half])
        attention.o.weight = torch.nn.Parameter(weights["o"].chunk(2, dim=1)[half])
        halves.append(attention(x))
    torch.testing.assert_close(sum(halves), whole)


def test_rope_tables_follow_length_and_dtype():
    spec = SPECS["llama"]
    model = random_model(spec, torch.float64)
    short, long = random_tokens(spec, 1, 5), random_tokens(spec, 1, 20)
    first = model(short)
    model(long)
    assert torch.equal(model(short), first)
    assert model.layers["0"].attention.rope is model.layers["1"].attention.rope
    model.float()
    assert model(short).dtype == torch.float32
    fresh = random_model(spec, torch.float64).float()
    assert torch.equal(model(short), fresh(short))


def test_too_long_sequences_are_refused():
    with pytest.raises(InputError, match=r"65 tokens.*64 learned positions"):
        build(SPECS["gpt2"])(torch.zeros(1, 65, dtype=torch.int64, device="meta"))
    with pytest.raises(UnsupportedError, match=r"49 tokens.*window of 48"):
        build(SPECS["mistral"])(torch.zeros(1, 49, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"positions": "alibi"}, "ALiBi"),
        ({"embedding_norm": True}, "norm after the embedding"),
    ],
)
def test_what_is_not_built_is_refused(change, word):
    with pytest.raises(UnsupportedError, match=word):
        build(SPECS["llama"].model_copy(update=change))
