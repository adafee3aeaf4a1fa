"""Gates, losses and the layer of experts, beside plain compositions of what they say they do."""

from __future__ import annotations

from math import ceil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import InputError
from meshwright.core.model import ModelSpec
from meshwright.core.router import RouterSpec
from meshwright.models import gates
from meshwright.models.experts import LossScales
from meshwright.models.gates import balance_loss, combine_weights, select, shares, z_loss
from meshwright.models.grouped import grouped_mlp
from meshwright.parallel.dropout import Masks, Noise
from tests.models.copies import Copied
from tests.models.tiny import SPECS, random_model


def spec_with(num_experts: int = 4, k: int = 2, **router: object) -> ModelSpec:
    changes = {"num_experts": num_experts, "experts_per_token": k, "router": RouterSpec(**router)}
    return SPECS["mixtral"].model_copy(update=changes)


def logits_of(b: int, s: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(b, s, num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(spec: ModelSpec):
    return random_model(spec, torch.float64).layers["0"].mlp


def by_hand(layer, x: torch.Tensor) -> torch.Tensor:
    """Every expert over every token; then what the gate has chosen."""
    weights, choice = layer.router(x)
    tokens, experts = x.flatten(0, 1), layer.experts
    out = torch.zeros_like(tokens)
    for expert in range(experts.num_experts):
        up = tokens @ experts.up.weight[expert].t()
        inner = F.silu(tokens @ experts.gate.weight[expert].t()) * up
        chosen = (weights * (choice.experts == expert)).sum(-1, keepdim=True)
        out = out + chosen * (inner @ experts.down.weight[expert].t())
    return out.view_as(x)


def gradients(layer, run, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return {"x": x.grad, "out": out.detach(), **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize(
    "router",
    [
        {},
        {"renormalise": "before_drop"},
        {"score": "sigmoid", "renormalise": "before_drop", "scale": 2.5, "bias": True},
        {"capacity_factor": 0.7},
        {"capacity_factor": 0.7, "renormalise": "after_drop", "drop": "score"},
        {"capacity_factor": 0.0, "renormalise": "after_drop"},
        {"chooses": "experts"},
    ],
)
@pytest.mark.parametrize("k", [1, 2])
def test_output_and_all_gradients_are_those_of_every_expert_over_every_token(router: dict, k: int) -> None:
    layer = layer_of(spec_with(k=k, **router))
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    ours, theirs = gradients(layer, layer, x), gradients(layer, lambda x: by_hand(layer, x), x)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("router", [{}, {"capacity_factor": 0.5}])
def test_experts_without_tokens_have_zero_gradients(router: dict) -> None:
    layer = layer_of(spec_with(num_experts=4, k=1, **router))
    with torch.no_grad():
        layer.router.weight.zero_()  # all equal: the lowest index wins
    found = gradients(layer, layer, torch.randn(1, 6, 32, dtype=torch.float64))
    assert found["experts.up.weight"][0].abs().max() > 0
    assert all(found[f"experts.{name}.weight"][1:].abs().max() == 0 for name in ("gate", "up", "down"))
    assert not any(value.isnan().any() for value in found.values())


def test_among_equals_the_lowest_index_wins() -> None:
    choice = select(torch.zeros(1, 3, 6), None, spec_with(num_experts=6, k=3))
    assert choice.experts.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("k", [1, 2, 8, 9])
def test_the_best_are_those_of_a_stable_sort(k: int) -> None:
    logits = torch.randint(0, 5, (2, 40, 12), generator=torch.Generator().manual_seed(0)).double()
    choice = select(logits, None, spec_with(num_experts=12, k=k))
    expected = logits.softmax(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(choice.experts, expected.flatten(0, 1))


def served_one_by_one(experts: torch.Tensor, room: int, num_experts: int) -> torch.Tensor:
    """[s, k] of one sequence: choices in order, tokens in order."""
    taken, kept = [0] * num_experts, torch.zeros_like(experts, dtype=torch.bool)
    for choice in range(experts.shape[1]):
        for token, expert in enumerate(experts[:, choice].tolist()):
            if taken[expert] < room:
                taken[expert] += 1
                kept[token, choice] = True
    return kept


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999), num_experts=st.integers(1, 6), k=st.integers(1, 3), s=st.integers(1, 9),
    factor=st.floats(0, 2),
)  # fmt: skip
def test_capacity_serves_first_choices_first_and_early_tokens_first(
    seed: int, num_experts: int, k: int, s: int, factor: float
) -> None:
    k = min(k, num_experts)
    spec = spec_with(num_experts, k, capacity_factor=factor)
    choice = select(logits_of(2, s, num_experts, seed), None, spec)
    room = spec.gate.capacity(s, num_experts, k)
    assert room == min(s, ceil(round(factor * k * s / num_experts, 9)))
    kept = choice.kept.view(2, s, k)
    for sequence, experts in enumerate(choice.experts.view(2, s, k)):
        assert torch.equal(kept[sequence], served_one_by_one(experts, room, num_experts))
    assert int(choice.kept.sum()) == int(choice.loads(num_experts).sum())
    assert int((~choice.kept).sum()) + int(choice.kept.sum()) == 2 * s * k


def test_renormalising_before_or_after_the_drop() -> None:
    logits = torch.tensor([[[2.0, 1.0, -9.0], [2.0, 1.0, -9.0]]], dtype=torch.float64)
    sums = {}
    for when in ("none", "before_drop", "after_drop"):
        spec = spec_with(3, 2, renormalise=when, capacity_factor=0.75)
        choice = select(logits, None, spec)  # room for one token each
        sums[when] = combine_weights(logits[0], choice, spec.gate).sum(-1).tolist()
    assert sums["before_drop"] == pytest.approx([1, 0])
    assert sums["after_drop"] == pytest.approx([1, 0])
    assert sums["none"][0] < 1
    half = spec_with(3, 2, renormalise="before_drop", capacity_factor=0.5)
    other = torch.tensor([[[2.0, 1.0, -9.0], [-9.0, 2.0, 1.0]]], dtype=torch.float64)
    choice = select(other, None, half)  # the second token's first choice goes before the first token's second
    assert combine_weights(other[0], choice, half.gate).sum(-1).tolist() == pytest.approx([0.731059, 1], rel=1e-5)


def test_groups_keep_tokens_to_their_best_groups() -> None:
    spec = spec_with(8, 3, score="sigmoid", num_groups=4, groups_per_token=2, bias=True)
    logits = logits_of(2, 20, 8)
    experts = select(logits, torch.linspace(-0.1, 0.1, 8), spec).experts
    assert all(len({index // 2 for index in row}) <= 2 for row in experts.tolist())
    free = select(logits, torch.linspace(-0.1, 0.1, 8), spec_with(8, 3, score="sigmoid", bias=True)).experts
    assert any(len({index // 2 for index in row}) == 3 for row in free.tolist())


def test_a_bias_changes_the_choice_and_not_the_weight() -> None:
    spec, logits = spec_with(4, 1, score="sigmoid", bias=True), torch.zeros(1, 5, 4)
    choice = select(logits, torch.tensor([0.0, 0.0, 9.0, 0.0]), spec)
    assert choice.experts.tolist() == [[2]] * 5
    assert combine_weights(logits[0], choice, spec.gate).tolist() == [[0.5]] * 5


def test_experts_that_choose_are_evenly_loaded() -> None:
    spec = spec_with(4, 2, chooses="experts")
    choice = select(logits_of(3, 8, 4), None, spec)
    assert choice.loads(4).tolist() == [3 * 4] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("router", [{"chooses": "experts"}, {"capacity_factor": 1.0, "drop": "score"}])
def test_the_first_of_equal_tokens_wins_whatever_their_last_bits(
    monkeypatch: pytest.MonkeyPatch, router: dict[str, object], dtype: torch.dtype
) -> None:
    """Eight equal tokens, two places of each expert."""
    spec, generator = spec_with(4, 1, **router), torch.Generator().manual_seed(3)
    rounding = torch.randn(20, 8, 4, generator=generator, dtype=dtype) * torch.finfo(dtype).eps
    logits = torch.tensor([0.3, 0.1, -0.4, 0.2], dtype=dtype) + rounding

    def takers() -> set[tuple[int, ...]]:
        kept = (select(row[None], None, spec).is_kept()[:, 0] for row in logits)
        return {tuple(of.nonzero().flatten().tolist()) for of in kept}

    assert takers() == {(0, 1)}
    monkeypatch.setattr(gates, "_coarse", lambda scores: scores)
    assert len(takers()) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compared_scores_differ_in_their_last_bits_alone(dtype: torch.dtype) -> None:
    scores = torch.rand(1000, dtype=dtype)
    kept = 1 << (gates._NOISE_BITS[dtype] - 1)
    assert (gates._coarse(scores) / scores - 1).abs().max() <= kept * torch.finfo(dtype).eps
    assert gates._coarse(torch.tensor([1.0, 1.0 + 4 * kept * torch.finfo(dtype).eps], dtype=dtype)).diff() > 0


# --- losses ------------------------------------------------------------------------------------------------


def loss_of(probabilities: list[list[float]], k: int = 1) -> float:
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    num = logits.shape[-1]
    return float(balance_loss(logits, shares(select(logits, None, spec_with(num, k)).experts[None], num), RouterSpec()))


@pytest.mark.parametrize("num_experts", [2, 4, 16])
def test_an_even_load_gives_exactly_one_and_one_expert_gives_their_number(num_experts: int) -> None:
    even = torch.full((num_experts,), 1 / num_experts, dtype=torch.float64)
    logits = logits_of(1, 40, num_experts)
    assert float(balance_loss(logits, even, RouterSpec())) == pytest.approx(1, abs=1e-14)
    assert float(balance_loss(logits, even, RouterSpec())) / num_experts == pytest.approx(1 / num_experts, abs=1e-14)
    collapsed = [[1 - 1e-12] + [1e-12 / (num_experts - 1)] * (num_experts - 1)] * 10
    assert loss_of(collapsed) == pytest.approx(num_experts, rel=1e-9)


def test_the_share_is_counted_over_k() -> None:
    experts = torch.tensor([[[0, 1], [2, 3], [1, 0], [3, 2]]])
    assert shares(experts, 4).tolist() == [[0.25] * 4]


def test_one_is_no_lower_bound() -> None:
    """60 % of tokens at (0.51, 0.49), 40 % at (0.01, 0.99): f = (0.6, 0.4), p = (0.31, 0.69)."""
    assert loss_of([[0.51, 0.49]] * 6 + [[0.01, 0.99]] * 4) == pytest.approx(0.924, abs=1e-12)


def test_a_mean_of_losses_is_not_the_loss_of_all() -> None:
    logits = logits_of(2, 6, 4)
    spec = spec_with(4, 1)
    experts = select(logits, None, spec).experts.view(2, 6, 1)
    parts = balance_loss(logits, shares(experts, 4), spec.gate).mean()
    whole = balance_loss(logits.flatten(0, 1)[None], shares(experts.flatten(0, 1)[None], 4), spec.gate)
    assert abs(float(parts - whole)) > 0.01


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_losses_reach_the_router_and_nothing_else(score: str, over: str) -> None:
    """With an output that nobody uses, the router's gradient is that of the losses as they are defined."""
    spec = spec_with(4, 2, score=score, balance_loss=0.3, balance_over=over, z_loss=0.2)
    layer, x = layer_of(spec), torch.randn(3, 7, 32, dtype=torch.float64)
    router = layer.router
    router.scales, router.statistics = LossScales(), torch.zeros(3 * 4 + 4, dtype=torch.float64)
    router.scales.num_sequences, router.scales.num_tokens, router.scales.scale = 3.0, 21.0, 2.0
    (layer(x).sum() * 0).backward()
    logits = x @ (weight := router.weight.detach().clone().requires_grad_()).t()
    experts = select(logits, None, spec).experts.view(3, 7, 2)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    if over == "batch":
        f = torch.bincount(experts.flatten(), minlength=4).double() / experts.numel()
        balance = 4 * (f * scores.mean((0, 1))).sum()
    else:
        f = torch.stack([torch.bincount(row.flatten(), minlength=4).double() / row.numel() for row in experts])
        balance = (4 * (f * scores.mean(1)).sum(-1)).mean()
    (2 * (0.3 * balance + 0.2 * logits.exp().sum(-1).log().square().mean())).backward()
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-10, atol=1e-13)
    assert layer.experts.up.weight.grad.abs().max() == 0
    router.scales, router.weight.grad = None, None
    (layer(x).sum() * 0).backward()
    assert router.weight.grad.abs().max() == 0  # without scales there is no loss


def test_statistics_of_a_forward() -> None:
    layer = layer_of(spec_with(4, 2, capacity_factor=0.5))
    layer.router.statistics = statistics = torch.zeros(3 * 4 + 4, dtype=torch.float64)
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    layer(x)
    chosen, taken, scores, (balance, z, sequences, tokens) = statistics.split([4, 4, 4, 4])
    assert (int(sequences), int(tokens), int(chosen.sum())) == (2, 16, 32)
    assert taken.sum() < 32
    assert float(scores.sum()) == pytest.approx(16)
    assert float(z) == pytest.approx(float(z_loss(x @ layer.router.weight.detach().t()).sum()))
    assert balance > 0


# --- parts -------------------------------------------------------------------------------------------------


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_several_runs_of_an_expert(activation: str, is_gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.models.rows._BLOCK_BYTES", 2 * 3 * 8)  # two rows at a time
    act, sizes = ACTIVATIONS[activation], ((3, 3, 5), (3, 3, 5), (3, 5, 3))
    rows, *weights = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((9, 5), *sizes))
    counts, experts = [2, 0, 0, 3, 4, 0], [0, 0, 0, 0, 0, 1, 1, 1, 1]
    gate, up, down = (weight[experts] for weight in weights)
    outer = torch.einsum("nfh,nh->nf", up, rows)
    inner = act(torch.einsum("nfh,nh->nf", gate, rows)) * outer if is_gated else act(outer)
    expected, given = torch.einsum("nhf,nf->nh", down, inner), weights if is_gated else weights[1:]
    out = grouped_mlp(rows, weights[0] if is_gated else None, *weights[1:], counts, activation)
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, (rows, *given), cotangent)
    theirs = torch.autograd.grad(expected, (rows, *given), cotangent)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("further", [0, 1])
def test_token_data_is_copied_once_on_each_way(further: int) -> None:
    """Rows to the experts, and their gradients: two permutations of k·T rows; sums read them where they lie."""
    layer = layer_of(spec_with(num_experts=4, k=2))
    x = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    if further:
        compute = layer.experts.compute
        layer.experts.compute = lambda rows, loads: compute(rows.clone(), loads)
    with Copied(32) as copied:
        layer(x).backward(torch.ones_like(x))
    num_rows = 2 * 2 * 9
    assert copied.elements == (2 + further) * num_rows * 32


def test_noise_is_for_training_only_and_repeats_with_its_seed() -> None:
    for noise in ("jitter", "gaussian"):
        layer = layer_of(spec_with(4, 2, noise=noise, jitter=0.5))
        x = torch.randn(1, 8, 32, dtype=torch.float64)
        still, again = layer(x), layer(x)
        assert torch.equal(still, again)
        noisy, masks = [], Masks(0.0, has_noise=True)
        layer.router.uniform = Noise(masks, layer=3)
        assert torch.equal(layer(x), still)
        for masks.seed in (1, 1, 2):
            with masks.active([(1, torch.arange(8))], 0):
                noisy.append(layer(x))
        assert torch.equal(noisy[0], noisy[1])
        assert not torch.equal(noisy[0], noisy[2])
        assert not torch.equal(noisy[0], still)


def test_what_routers_draw_is_uniform_and_differs_by_layer_step_and_column() -> None:
    masks, drawn = Masks(0.0, has_noise=True), []
    for masks.step, layer in ((0, 1), (0, 2), (1, 1)):
        with masks.active([(8, torch.arange(64))], 0):
            found = Noise(masks, layer)(torch.empty(8, 64, 32))
        assert found is not None
        drawn.append(found.flatten())
    for x in drawn:
        assert 0 < x.min() < 1e-3
        assert 1 - 1e-3 < x.max() < 1
        assert abs(float(x.mean()) - 1 / 2) < 0.01
        assert abs(float(x.var()) - 1 / 12) < 0.002
        assert abs(float(torch.special.ndtri(x).var()) - 1) < 0.03
    assert torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0).abs().max() < 0.03
    by_token = drawn[0].view(-1, 32)
    assert torch.corrcoef(by_token.T).fill_diagonal_(0).abs().max() < 0.2


def test_different_experts_start_different() -> None:
    layer = random_model(SPECS["mixtral"]).layers["0"].mlp
    for one, other in ((0, 1), (1, 2), (0, 3)):
        assert not torch.equal(layer.experts.up.weight[one], layer.experts.up.weight[other])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4, "experts_per_token": 2, "mlp_bias": True}, "experts have no biases"),
        ({"num_experts": 4, "experts_per_token": 2, "dense_layers": (0, 1)}, "leave a layer of experts"),
        ({"shared_ffn_size": 8}, "is for mixtures of experts"),
        ({"num_experts": 4, "experts_per_token": 2, "shared_gate": True}, "needs shared_ffn_size"),
        ({"num_experts": 4, "experts_per_token": 3, "router": {"num_groups": 2}}, "must hold experts_per_token 3"),
        ({"num_experts": 4, "experts_per_token": 3, "router": {"chooses": "experts", "balance_loss": 1}}, "already"),
    ],
)
def test_contradictions_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelSpec.parse({**SPECS["llama"].model_dump(), **changes}, "spec")
