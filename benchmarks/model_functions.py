"""The lean functions of the decoder beside their plain compositions: CPU time and bytes kept for backward.

    python benchmarks/model_functions.py

One thread, alternating, forward + backward of b=4 sequences of s=256 tokens; medians of the pairwise ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from meshwright.models.functions import rms_norm, rotate, swiglu

B, S, HEAD_DIM = 4, 256, 64
REPEATS = 40
Call = Callable[[], torch.Tensor]


def plain_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * torch.cat((sin, sin), dim=-1)


def cases(h: int) -> dict[str, tuple[Call, Call, tuple[torch.Tensor, ...]]]:
    """Name → (ours, plain, what gradients are taken of)."""
    x, weight = torch.randn(B, S, h, requires_grad=True), torch.rand(h, requires_grad=True)
    gate, up = (torch.randn(B, S, 8 * h // 3, requires_grad=True) for _ in range(2))
    q = torch.randn(B, S, h // HEAD_DIM, HEAD_DIM, requires_grad=True)
    angles = torch.outer(torch.arange(S), torch.rand(HEAD_DIM // 2)).unsqueeze(1)
    cos, sin = torch.cat((angles.cos(),) * 2, dim=-1), angles.sin()
    return {
        "rms_norm": (lambda: rms_norm(x, weight, 1e-5), lambda: F.rms_norm(x, (h,), weight, 1e-5), (x, weight)),
        "swiglu": (lambda: swiglu(gate, up), lambda: F.silu(gate) * up, (gate, up)),
        "rotate": (lambda: rotate(q, cos, sin), lambda: plain_rotate(q, cos, sin), (q,)),
    }


def cpu_s(call: Call, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor) -> float:
    start = time.process_time()
    torch.autograd.grad(call(), inputs, grad)
    return time.process_time() - start


def kept_bytes(call: Call) -> int:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        call()
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'function':10}{'h':>6}{'time, ours ÷ plain':>20}{'kept MB':>10}{'plain MB':>10}")
    for h in (256, 512, 768):
        for name, (ours, plain, inputs) in cases(h).items():
            grad = torch.randn_like(ours())
            pairs = [(cpu_s(ours, inputs, grad), cpu_s(plain, inputs, grad)) for _ in range(REPEATS)]
            ratio = statistics.median(a / b for a, b in pairs[5:])
            print(f"{name:10}{h:6}{ratio:20.2f}{kept_bytes(ours) / 1e6:10.2f}{kept_bytes(plain) / 1e6:10.2f}")


if __name__ == "__main__":
    main()
