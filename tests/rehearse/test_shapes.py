"""Tensors without values: the same shapes and the same saved bytes as real ones, and no memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.build import build
from meshwright.parallel.census import ActivationCensus
from meshwright.rehearse.shapes import shapes_only
from tests.shapes import make_model

TOKENS = (2, 8)


def run_model(device: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """Shapes of the output and of all gradients, and the bytes that autograd kept."""
    model = build(make_model(), device)
    tokens = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    if device == "cpu":
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.1)
    with ActivationCensus([*model.parameters()]) as census:
        out = model(tokens)
        out.sum().backward()
    tables = sum(buffer.nbytes for buffer in model.buffers())
    return [out.shape], [p.grad.shape for p in model.parameters()], census.peak_bytes - tables


def test_a_model_runs_as_with_values() -> None:
    with shapes_only():
        rehearsed = run_model("meta")
    assert rehearsed == run_model("cpu")


def test_without_it_scores_would_be_kept() -> None:
    """The meta device by itself has plain products for attention."""
    with shapes_only():
        _, _, kept_bytes = run_model("meta")
    assert run_model("meta")[2] > kept_bytes


def test_views_writes_and_results_have_their_shapes() -> None:
    x = torch.empty(6, 4, device="meta")
    with shapes_only():
        for _ in range(2):  # once run, once remembered
            assert (x.t() @ x).shape == (4, 4)
            assert x.t().stride() == (1, 4)
            assert x[2:].add_(1).shape == (4, 4)
            assert torch.sum(x, dim=-1, out=torch.empty(6, device="meta")).shape == (6,)
            assert [part.shape for part in x.split(3)] == [(3, 4), (3, 4)]
            assert F.layer_norm(x.double(), (4,)).dtype == torch.float64
            assert (x > 0).dtype == torch.bool
            assert torch.aminmax(x, dim=1).min.shape == (6,)


def test_other_devices_keep_their_values() -> None:
    with shapes_only():
        x = torch.ones(3)
        x.add_(1)
        assert (x * 2).tolist() == [4.0, 4.0, 4.0]
        assert torch.where(x > 1, x, 0).tolist() == [2.0, 2.0, 2.0]


def test_what_was_remembered_of_another_device_is_not_used() -> None:
    with shapes_only():
        assert (torch.empty(3, device="meta") * 2).is_meta
        assert (torch.ones(3) * 2).tolist() == [2.0, 2.0, 2.0]


def test_a_value_cannot_be_looked_at() -> None:
    with shapes_only(), pytest.raises(RuntimeError):
        float(torch.zeros((), device="meta") + 1)


def test_attention_is_put_back() -> None:
    before = F.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), shapes_only():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is before
