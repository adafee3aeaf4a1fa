"""Where the time of a data-parallel step goes, on the rank that takes longest for its own work.

    python benchmarks/where.py [--sizes S M] [--ranks 2] [--steps 8]

Medians over steps, in milliseconds; all columns but `step` are parts of it:

    waiting     until a peer has filled its slot of shared memory: imbalance of the ranks, and its share of the cores
    copies      copies into and out of shared memory, sums of what peers wrote, and the signals
    optimizer   AdamW, and the squares of the gradients for the norm
    rest        the engine's own Python, less what writing gradients in place saves: may be below zero
    compute     forward and backward of the plain model just before, on every rank, nothing sent
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import product
from time import perf_counter
from typing import Any

import torch
from contenders import LEARNING_RATE, SEED, SIZES, Batch, Size, make_plan, our_engine
from rich.console import Console
from rich.table import Table
from torch import nn

from meshwright.comm import mesh
from meshwright.comm.collectives import barrier
from meshwright.comm.transports.host import _Queue
from meshwright.comm.transports.segments import Segments
from meshwright.core.axes import WORLD
from meshwright.core.strategy import Strategy
from meshwright.models import init
from meshwright.models.build import build
from meshwright.run.engine import Engine
from meshwright.train.optimizer import FlatOptimizer

STEPS = {
    **{f"zero-{zero}": Strategy(zero=zero) for zero in (0, 1, 2, 3)},
    "zero-3-kept": Strategy(zero=3, keep_gathered=True),
}
PARTS = ("compute", "waiting", "copies", "optimizer", "rest")


class Stopwatch:
    """Seconds inside certain methods, each counted without those inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    @contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """Add the time of the block, less that of measured blocks inside it."""
        self._inside.append(0.0)
        began = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - began
            self.seconds[what] += took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took

    def watch(self, owner: type, name: str, what: str) -> None:
        """Measure every call of a method."""
        plain: Callable[..., Any] = getattr(owner, name)

        def measured(*given: Any, **named: Any) -> Any:
            with self.measuring(what):
                return plain(*given, **named)

        setattr(owner, name, measured)


def watched() -> Stopwatch:
    """A stopwatch on the transport and the optimizer."""
    stopwatch = Stopwatch()
    stopwatch.watch(Segments, "hear", "waiting")
    for name in ("add", "run_until"):
        stopwatch.watch(_Queue, name, "copies")
    for name in ("_adamw", "_squares_of"):
        stopwatch.watch(FlatOptimizer, name, "optimizer")
    return stopwatch


def plain_seconds(model: nn.Module, size: Size, rank: int, step: int) -> float:
    """Forward and backward of the plain model."""
    tokens, labels = size.batch(rank, step)
    began = perf_counter()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    took = perf_counter() - began
    model.zero_grad(set_to_none=True)
    return took


def measure(rank: int, ranks: int, meeting_file: str, size: Size, num_steps: int) -> dict[str, list[dict[str, float]]]:
    """One rank: what each step of each contender took, by part."""
    torch.set_num_threads(1)
    mesh.start_local(meeting_file, rank, ranks)
    world = mesh.Mesh.create({"dp": ranks})
    model = build(size.spec(), "cpu")
    init.initialize(model, size.spec(), SEED)
    plain = copy.deepcopy(model)
    stopwatch, found = watched(), {}
    for name, strategy in STEPS.items():
        engine = our_engine(make_plan(size, strategy.model_copy(update={"dp": ranks})), world, model, 1.0)
        found[name] = []
        for step in range(num_steps):
            barrier(world[WORLD])
            compute = plain_seconds(plain, size, rank, step)
            found[name].append(_step(engine, size.batch(rank, step), world, stopwatch, compute))
        del found[name][:2]
    mesh.stop()
    return found


def _step(engine: Engine, batch: Batch, world: mesh.Mesh, stopwatch: Stopwatch, compute: float) -> dict[str, float]:
    barrier(world[WORLD])
    stopwatch.seconds.clear()
    began = perf_counter()
    engine.step([batch], LEARNING_RATE)
    took = perf_counter() - began
    parts = {"step": took, "compute": compute, **stopwatch.seconds}
    return {**parts, "rest": took - compute - sum(stopwatch.seconds.values())}


def on_ranks(ranks: int, size: Size, num_steps: int) -> list[dict[str, list[dict[str, float]]]]:
    """:func:`measure` on each rank of a fresh group."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(ranks, mp_context=context) as workers:
            meet = os.path.join(folder, "meet")
            jobs = [workers.submit(measure, rank, ranks, meet, size, num_steps) for rank in range(ranks)]
            return [job.result() for job in jobs]


def median(steps: Sequence[dict[str, float]], part: str) -> float:
    """Milliseconds."""
    return statistics.median(step.get(part, 0.0) for step in steps) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S", "M"], choices=SIZES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    table = Table(title="where a step's time goes, ms")
    for head in ("size", "ranks", "step", "ms", *PARTS):
        table.add_column(head, justify="left" if head in ("size", "step") else "right")
    for label, ranks in product(options.sizes, options.ranks):
        found = on_ranks(ranks, SIZES[label], options.steps)
        for name in STEPS:
            steps = min((rank[name] for rank in found), key=lambda steps: median(steps, "waiting"))
            cells = (f"{median(steps, part):,.1f}" for part in ("step", *PARTS))
            table.add_row(label, str(ranks), name, *cells)
    Console(width=max(110, Console().width)).print(table)


if __name__ == "__main__":
    main()
