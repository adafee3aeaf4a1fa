"""Stochastic rounding of float32 to bfloat16: what an update adds is kept on average, however small.

    float32   | sign, exponent, 7 bits | 16 bits |      + 16 random bits, then the lower half is cut off

E[round(x)] = x: a value goes up with the probability of its distance from below. The random bits are a hash of the
seed, the parameter's name, the element's index in the whole parameter, and the step: replicas and layouts round alike.

Sources: Gupta et al. 2015 (Deep Learning with Limited Numerical Precision), §3; Zamirai et al. 2020 (Revisiting
BFloat16 Training), §3.
"""

from __future__ import annotations

from zlib import crc32

import torch

from meshwright.core.placement import Placement

_LOW_BITS = 0xFFFF


def round_to_bf16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """x float32 [n], bits int32 [n] in [0, 2^16) → bfloat16 [n]. No finite value becomes infinite, or the reverse."""
    raised = (x.view(torch.int32) + bits) & ~_LOW_BITS
    rounded = raised.view(torch.float32)
    largest = torch.finfo(torch.bfloat16).max
    return torch.where(x.isfinite(), rounded.clamp(-largest, largest), x).to(torch.bfloat16)


def random_bits(placement: Placement, run: slice, step: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """16 bits [k] for the elements `run` of a placement's flattened box, as int32. Takes 32 bytes of each meanwhile.

    Args:
        step: scalar; other steps give other bits.
        seed: other seeds, too.
    """
    index = _global_index(placement, run, step.device)
    key = crc32(f"{seed} {placement.name}".encode()) * 0x9E3779B1
    return (_mix(_mix(index + key) + step.to(torch.int64)) & _LOW_BITS).to(torch.int32)


def _global_index(placement: Placement, run: slice, device: torch.device) -> torch.Tensor:
    """Index of each element in the whole, flattened parameter."""
    local = torch.arange(run.start, run.stop, device=device)
    index, stride = torch.zeros_like(local), 1
    for size, offset, whole in zip(
        reversed(placement.box.sizes), reversed(placement.box.offsets), reversed(placement.shape), strict=True
    ):
        index += (local % size + offset) * stride
        local, stride = local // size, stride * whole
    return index


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 64 bits whose output bits each depend on all input bits (Steele et al. 2014, SplitMix)."""
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x >> by without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
