"""Stochastic rounding: unbiased, repeatable, the same for replicas and layouts."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.placement import Box, Placement
from meshwright.train.rounding import random_bits, round_to_bf16

STEP = torch.tensor(3.0)


def place(offsets: tuple[int, ...], sizes: tuple[int, ...], name: str = "w") -> Placement:
    return Placement(name, (64, 48), Box(offsets, sizes), "mlp", 0, (), True)


def test_the_mean_is_the_value():
    """A third of the way between two bfloat16 numbers: a third go up."""
    low, step = 1.0, 2.0**-7
    x = torch.full((200_000,), low + step / 3)
    bits = torch.randint(0, 2**16, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    rounded = round_to_bf16(x, bits).double()
    assert set(rounded.tolist()) == {low, low + step}
    assert rounded.mean() == pytest.approx(low + step / 3, abs=4 * step / 200_000**0.5)


def test_bits_are_spread_evenly():
    bits = random_bits(place((0, 0), (64, 48)), slice(0, 64 * 48), STEP)
    assert bits.min() >= 0
    assert bits.max() < 2**16
    assert bits.double().mean() == pytest.approx(2**15, rel=0.03)
    assert len(set(bits.tolist())) > 0.95 * bits.numel()
    neighbours = torch.corrcoef(torch.stack([bits[:-1].double(), bits[1:].double()]))[0, 1]
    assert abs(neighbours) < 0.06


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1.0, -2.5])
def test_what_bf16_can_hold_stays(value):
    x = torch.full((64,), value)
    for bits in (0, 2**16 - 1):
        rounded = round_to_bf16(x, torch.full((64,), bits, dtype=torch.int32))
        torch.testing.assert_close(rounded.float(), x, rtol=0, atol=0, equal_nan=True)


def test_the_largest_value_does_not_become_infinite():
    x = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    rounded = round_to_bf16(x, torch.full((2,), 2**16 - 1, dtype=torch.int32))
    assert rounded.isfinite().all()


def test_negative_values_are_rounded_like_positive_ones():
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    bits = torch.randint(0, 2**16, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(round_to_bf16(-x, bits), -round_to_bf16(x, bits))


def test_a_box_has_the_bits_of_its_place_in_the_whole():
    whole = random_bits(place((0, 0), (64, 48)), slice(0, 64 * 48), STEP).view(64, 48)
    part = random_bits(place((16, 12), (8, 6)), slice(0, 48), STEP).view(8, 6)
    assert torch.equal(part, whole[16:24, 12:18])
    run = random_bits(place((16, 12), (8, 6)), slice(7, 20), STEP)
    assert torch.equal(run, part.flatten()[7:20])


def test_names_and_steps_have_bits_of_their_own():
    first = random_bits(place((0, 0), (64, 48)), slice(0, 1000), STEP)
    for other in (
        random_bits(place((0, 0), (64, 48), "v"), slice(0, 1000), STEP),
        random_bits(place((0, 0), (64, 48)), slice(0, 1000), STEP + 1),
    ):
        assert (first == other).float().mean() < 0.02


def test_other_seeds_have_other_bits():
    first, other = (random_bits(place((0, 0), (64, 48)), slice(0, 1000), STEP, seed) for seed in (0, 1))
    assert (first == other).float().mean() < 0.02
