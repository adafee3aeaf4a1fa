"""A layer of experts over ranks beside the same layer whole on every rank: step times, and what a rank waits for.

    python benchmarks/expert_parallel.py [--ranks 4] [--experts 8 64] [--tokens 1024] [--turns 8]

`spread`: each rank has its part of the experts, and rows travel (expert parallelism). `replicated`: every rank has all
of them, and their gradients are summed over the ranks (data parallelism). Forward, backward and the sum of gradients
of `--tokens` tokens of each rank, top-2, fp32, one thread per rank, with gradients that have their place; both take
turns in one process group. A step lasts until its slowest rank has done it. `exchange` is the share of a rank's step
that passes in calls of all-to-all, and waiting for one, with waiting for ranks that come later; `sums` likewise of
gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from contenders import rounds
from experts import HIDDEN, as_trained, layer_of, spec_of

from meshwright.comm import differentiable
from meshwright.comm import mesh as meshes
from meshwright.comm.collectives import all_reduce, barrier
from meshwright.comm.mesh import Axis, Mesh
from meshwright.models.experts import MoE
from meshwright.parallel import experts
from meshwright.parallel.experts import Exchange
from meshwright.parallel.states import GradientSink

NAMES = ("spread", "replicated")


class Clock:
    """Seconds in calls, while they are replaced by ones that are timed."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return run


class Step:
    """One step of a layer: its own part of the experts, or all."""

    def __init__(self, num_experts: int, axis: Axis, is_spread: bool) -> None:
        self._layer, self._axis, self.sums = layer_of(spec_of(num_experts)), axis, Clock()
        if is_spread:
            _keep_own(self._layer, axis)
        self._sinks: list[GradientSink] = as_trained(self._layer)
        self._summed = [] if is_spread else [sink.view for sink in self._sinks]

    def __call__(self, x: torch.Tensor) -> None:
        for sink in self._sinks:
            sink.start_step()
        self._layer.zero_grad(set_to_none=True)
        self._layer(x.requires_grad_()).backward(x.detach())
        router = self._layer.router.weight.grad
        assert router is not None
        for gradient in (*self._summed, router):
            self.sums.timed(all_reduce)(gradient, self._axis)


def _keep_own(layer: MoE, axis: Axis) -> None:
    for name in ("gate", "up", "down"):
        part = getattr(layer.experts, name)
        part.weight = torch.nn.Parameter(part.weight.detach().chunk(axis.size)[axis.index].clone())
    layer.experts.compute = Exchange(layer.experts, axis)


def measure(rank: int, world: int, file: str, options: argparse.Namespace) -> dict[str, list[tuple[float, ...]]]:
    """One rank: (seconds, in exchanges, in sums) of each turn, by number of experts and name."""
    torch.set_num_threads(1)
    meshes.start_local(file, rank, world)
    axis, found, exchanges = Mesh.create({"dp": world})["dp"], dict[str, list[tuple[float, ...]]](), Clock()
    for where, name in ((experts, "all_to_all"), (differentiable, "all_to_all"), (differentiable, "all_to_all_start")):
        setattr(where, name, exchanges.timed(getattr(where, name)))
    differentiable.Flight.wait = exchanges.timed(differentiable.Flight.wait)
    for num_experts in options.experts:
        torch.manual_seed(0)
        steps = {name: Step(num_experts, axis, name == "spread") for name in NAMES}
        x = torch.randn(1, options.tokens, HIDDEN, generator=torch.Generator().manual_seed(rank))
        for _, name, is_measured in rounds(list(steps), options.turns, warm_up=1):
            exchanges.seconds = steps[name].sums.seconds = 0.0
            barrier(axis)
            began = time.perf_counter()
            steps[name](x.detach())
            own = exchanges.seconds, steps[name].sums.seconds
            barrier(axis)
            if is_measured:
                found.setdefault(f"{num_experts} {name}", []).append((time.perf_counter() - began, *own))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.ranks, mp_context=context) as pool:
            file = os.path.join(folder, "meet")
            runs = [pool.submit(measure, rank, options.ranks, file, options) for rank in range(options.ranks)]
            by_rank = [run.result() for run in runs]
    for num_experts in options.experts:
        times = {name: _row(by_rank, f"{num_experts} {name}") for name in NAMES}
        ratios = [a / b for a, b in zip(*(times[name] for name in NAMES), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{num_experts} experts: spread / replicated {middle:.2f} ({low:.2f}, {high:.2f})")


def _row(by_rank: list[dict[str, list[tuple[float, ...]]]], key: str) -> list[float]:
    """Prints a contender's medians; its seconds by turn."""
    turns = [[run[key][turn] for run in by_rank] for turn in range(len(by_rank[0][key]))]
    shares = [statistics.median(own[at] / own[0] for ranks in turns for own in ranks) for at in (1, 2)]
    seconds = [max(own[0] for own in ranks) for ranks in turns]
    print(f"{key:>14}: {1e3 * statistics.median(seconds):6.0f} ms, exchange {shares[0]:.0%}, sums {shares[1]:.0%}")
    return seconds


if __name__ == "__main__":
    main()
