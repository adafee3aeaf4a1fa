"""The lean functions equal their plain compositions, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from meshwright.models.functions import layer_norm, rms_norm, rotate, swiglu


def plain_rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def plain_rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * torch.cat((sin, sin), dim=-1)


def tables(length, dim, dtype=torch.float64):
    angles = torch.outer(torch.arange(length, dtype=dtype), torch.rand(dim // 2, dtype=dtype)).unsqueeze(1)
    return torch.cat((angles.cos(),) * 2, dim=-1), angles.sin()


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def assert_same(ours, plain, inputs):
    torch.testing.assert_close(ours, plain)
    grad = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(plain, inputs, grad), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3, 4, 6), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_equals_the_composition(shape, dtype):
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)
    assert_same(rms_norm(x, weight, 1e-5), plain_rms_norm(x, weight, 1e-5), (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layer_norm_equals_the_composition(dtype):
    """Which computes with wide copies of weight and bias where the dtype is not."""
    x, weight, bias = draw(2, 3, 8, dtype=dtype), draw(8, dtype=dtype), draw(8, dtype=dtype)
    plain = F.layer_norm(x, (8,), weight.float(), bias.float(), 1e-5)
    assert_same(layer_norm(x, weight, bias, 1e-5), plain, (x, weight, bias))


def test_swiglu_equals_the_composition():
    gate, up = draw(2, 3, 8), draw(2, 3, 8)
    assert_same(swiglu(gate, up), F.silu(gate) * up, (gate, up))


def test_rotate_equals_the_composition():
    x, (cos, sin) = draw(2, 5, 3, 8), tables(5, 8)
    assert_same(rotate(x, cos, sin), plain_rotate(x, cos, sin), (x,))


def test_gradients_equal_finite_differences():
    x, weight = draw(2, 3, 6), draw(6)
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    assert gradcheck(swiglu, (draw(2, 5), draw(2, 5)))
    cos, sin = tables(4, 6)
    assert gradcheck(lambda x: rotate(x, cos, sin), (draw(2, 4, 3, 6),))


def test_rms_norm_of_transposed_inputs_and_gradients():
    x, weight = draw(3, 8, 2), draw(8)
    view = x.transpose(1, 2)
    ours, plain = rms_norm(view, weight, 1e-5), plain_rms_norm(view, weight, 1e-5)
    grad = torch.randn(2, 3, 8, dtype=torch.float64).transpose(0, 1)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, weight), grad) for y in (ours, plain)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_wide_under_low_precision(dtype):
    """A sum of 4,096 squares loses most of its terms in 8 bits; only the result may be rounded, once."""
    x, weight = torch.randn(2, 4096).to(dtype).requires_grad_(), torch.rand(4096).to(dtype).requires_grad_()
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    ours, exact = rms_norm(x, weight, 1e-5), plain_rms_norm(exact_x, exact_weight, 1e-5)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    grad = torch.randn(2, 4096).to(dtype)
    got = torch.autograd.grad(ours, (x, weight), grad)
    want = torch.autograd.grad(exact, (exact_x, exact_weight), grad.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps, atol=1e-4)
