"""Bytes that one layer sends, against the formulas of the papers, written down once more by hand.

What a real rank sends is compared with `cost.traffic` to the byte wherever a layout runs (`tests.parallel`).
β bytes of an element, b sequences of s tokens, T = b·s, h hidden, a heads, g key/value heads of d, f feed-forward.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.cost.traffic import micro_batch_traffic, step_traffic
from tests.parallel.layouts import llama

BETA, B, S, H, A, G, D, F = 2, 16, 32, 64, 16, 8, 4, 192
T = B * S
MODEL = llama(hidden_size=H, num_heads=A, num_kv_heads=G, head_dim=D, ffn_size=F, num_layers=1, vocab_size=64)
PLAIN = MODEL.model_copy(update={"gated_mlp": False, "ffn_size": 4 * H, "num_kv_heads": A})
"""Of 12·h² weights."""
STATISTICS = 4
"""Bytes of a number that norms and losses sum."""


def sent(model: ModelSpec = MODEL, once_a_step: bool = False, **strategy: Any) -> dict[tuple[str, str], int]:
    """(phase, axis) → bytes of one layer."""
    split = Strategy.model_validate({"precision": "bf16", "micro_batch_size": B, **strategy})
    job, at = Job(seq_length=S, global_batch_size=B * split.dp), dict.fromkeys(("pp", "dp", "cp", "tp"), 0)
    found: dict[tuple[str, str], int] = {}
    for num_layers, sign in ((2, 1), (1, -1)):
        spec = model.model_copy(update={"num_layers": num_layers})
        counted = step_traffic(spec, split, at) if once_a_step else micro_batch_traffic(spec, job, split, 0)
        for (_, axis, phase), row in counted.rows.items():
            found[phase, axis] = found.get((phase, axis), 0) + sign * row.wire_bytes
    return {key: value for key, value in found.items() if value}


def norms(parts: int, q: int, num_numbers: int = 1) -> int:
    """Bytes of the sums of a layer's two norms over a grid's side, forward and backward: one number a token each."""
    return 2 * 2 * num_numbers * 2 * (q - 1) * T // parts * STATISTICS // q


@pytest.mark.parametrize("t", [2, 4, 8])
def test_megatron_1d(t: int) -> None:
    """Shoeybi et al. 2019: 8(t−1)/t·β·b·s·h, and half as much more where all is run again."""
    assert sum(sent(tp=t).values()) == 8 * (t - 1) * BETA * T * H // t
    assert sum(sent(tp=t, recompute="full").values()) == 12 * (t - 1) * BETA * T * H // t


@pytest.mark.parametrize("t", [2, 4, 8])
def test_megatron_sequence_parallelism(t: int) -> None:
    """Korthikanti et al. 2022: as much as 1D, and 2(t−1)/t·β·b·s·h for gathering again what is not kept."""
    assert sum(sent(tp=t, sequence="megatron").values()) == 10 * (t - 1) * BETA * T * H // t


def _products(model: ModelSpec) -> list[tuple[int, int]]:
    """(in, out) of a layer's products, the ones of one input together."""
    first = F * 2 if model.gated_mlp else model.ffn_size
    return [(H, (A + 2 * model.num_kv_heads) * D), (A * D, H), (H, first), (model.ffn_size, H)]


@pytest.mark.parametrize("model", [MODEL, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("q", [2, 4])
def test_summa_2d(q: int, model: ModelSpec) -> None:
    """Xu et al. 2021: 3(q−1)/q²·(S_X + S_W) of each product."""
    expected = sum(3 * (q - 1) * BETA * (T * into + into * out) // q**2 for into, out in _products(model))
    found = sent(model, tp=q * q, tensor={"kind": "2d"})
    assert sum(found.values()) == expected + norms(parts=q, q=q)


@pytest.mark.parametrize(("q", "depth"), [(2, 2), (4, 2), (4, 4)])
def test_tesseract_2_5d(q: int, depth: int) -> None:
    """Wang et al. 2021: 3(q−1)/q²·(S_X/δ + S_W) of each product, and once a step 2(δ−1)/δ·S_W/q² of each weight."""
    layout = {"tp": depth * q * q, "tensor": {"kind": "2.5d", "depth": depth}}
    expected = sum(3 * (q - 1) * BETA * (T * into // depth + into * out) // q**2 for into, out in _products(PLAIN))
    assert sum(sent(PLAIN, **layout).values()) == expected + norms(parts=depth * q, q=q)
    weights = sum(into * out for into, out in _products(PLAIN))
    gradients = 2 * (depth - 1) * STATISTICS * (weights // q**2 + 2 * H // q) // depth  # and those of two norms
    assert sent(PLAIN, once_a_step=True, **layout)["gradients", "tp_depth"] == gradients


@pytest.mark.parametrize("q", [2, 4])
def test_3d(q: int) -> None:
    """Bian et al. 2021: 2(q−1)/q³·(S_X + S_W + S_Y) of each product; S_X + S_W more where backward gathers again."""
    sizes = [(T * into, into * out, T * out) for into, out in _products(PLAIN)]
    layout = {"tp": q**3, "tensor": {"kind": "3d"}}
    for recompute, times in (("none", 2), ("selective", 3)):
        expected = sum((q - 1) * BETA * (times * (x + w) + 2 * y) // q**3 for x, w, y in sizes)
        found = sent(PLAIN, recompute=recompute, **layout)
        assert sum(found.values()) == expected + norms(parts=q * q, q=q)


@pytest.mark.parametrize("c", [2, 4, 8])
def test_ring_self_attention(c: int) -> None:
    """Li et al. 2021, for heads that are not grouped: 6(P−1)/P·β·b·s·h, sums of gradients scattered, in fp32."""
    found = sent(PLAIN, context={"kind": "ring-self-attention", "degree": c})
    unit = (c - 1) * T * H // c
    assert (found["forward", "cp"], found["backward", "cp"]) == (2 * BETA * unit, 2 * (BETA + STATISTICS) * unit)


@pytest.mark.parametrize("c", [2, 4, 8])
def test_ring_attention(c: int) -> None:
    """Liu et al. 2023: keys and values make P−1 hops each way, their gradients, in fp32, P."""
    found = sent(context={"kind": "ring", "degree": c})
    hop = 2 * T // c * G * D
    assert found["forward", "cp"] == (c - 1) * BETA * hop
    assert found["backward", "cp"] == ((c - 1) * BETA + c * STATISTICS) * hop


@pytest.mark.parametrize("c", [2, 4, 8, 16])
def test_ulysses(c: int) -> None:
    """Jacobs et al. 2023: (P−1)/P·β·b·(s/P)·d·(2a + 2g) each way; ranks beyond the key/value heads repeat them."""
    found = sent(context={"kind": "ulysses", "degree": c})
    one_way = (c - 1) * BETA * T // c * D * (2 * A + 2 * max(G, c)) // c
    assert (found["forward", "cp"], found["backward", "cp"]) == (one_way, one_way)


@pytest.mark.parametrize(
    ("layout", "of_inputs", "of_weights"),
    [
        ({"tp": 16, "tensor": {"kind": "2d"}}, 12 * 3 / 16, 6 * 3 / 16),
        ({"tp": 32, "tensor": {"kind": "2.5d", "depth": 2}}, 12 * 3 / 32, 6 * 3 / 16),
        ({"tp": 64, "tensor": {"kind": "3d"}}, 16 * 3 / 64, 4 * 3 / 64),
        ({"tp": 8}, 0, 0),
    ],
    ids=["2d", "2.5d", "3d", "1d"],
)
def test_an_mlp_of_twice_the_width(layout: dict[str, Any], of_inputs: float, of_weights: float) -> None:
    """Section 3.11's row of each kind, in what grows with f: of (15, 6) and (20, 4), 3 and 4 of S_X are of h alone."""
    once, twice = (sum(sent(PLAIN.model_copy(update={"ffn_size": n * H}), **layout).values()) for n in (4, 8))
    assert twice - once == of_inputs * BETA * T * H + of_weights * BETA * 4 * H * H
