"""Our tensor parallelism beside `torch.distributed.tensor.parallel`: same decoder, weights, tokens, ranks and threads.

    python benchmarks/tensor.py [--sizes S M] [--ranks 2 4] [--steps 12]
    python benchmarks/tensor.py --layouts [--sizes S] [--ranks 4 8] [--steps 8]

All contenders take turns, step by step, in one process group, on one thread per rank; who is first rotates.

    torch       ColwiseParallel, RowwiseParallel, vocabulary-parallel embedding and head, `loss_parallel`, AdamW(fused)
    torch sp    the same with SequenceParallel norms, residuals of each rank's tokens
    1d          `meshwright.parallelize`, tp = ranks
    1d sp       the same with sequence="megatron"

A step lasts until its slowest rank has done it. `ratio` is ours / torch's of the same turn, sp beside sp: lower
quartile, median, upper quartile. `best` is the ratio of the fastest steps. `waits` is the share of a step that a rank
of ours stands still for communication that it has started: what computation does not hide. Nothing is clipped.

With --layouts ours take turns among themselves: 1d and 1d sp where the ranks divide the heads, 2d where they are a
square, 2.5d and 3d where they are 8. `ratio` is beside the first of these, step by step. `sent MB` is what a rank
sends in a step, by the ledger, in 10^6 bytes, in so many `calls`; `moved ms` is what these calls take by themselves,
one after the other, with nothing to compute beside them; `hidden` is the share of it that no rank stands still for:
1 - waited / moved. What a rank waits for the others to come counts as waited, so that where more ranks than cores take
turns it can't be told, and is left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from math import isqrt

import torch
import torch.nn.functional as F
from contenders import SEED, SIZES, Size, Step, Times, adamw, make_plan, our_engine, our_step, quartiles, rounds, timed
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh  # noqa: TID251 (a peer)
from torch.distributed.tensor import Replicate, Shard  # noqa: TID251 (a peer)
from torch.distributed.tensor.parallel import (  # noqa: TID251 (a peer)
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from meshwright.comm import collectives, mesh
from meshwright.core.layouts import Tensor
from meshwright.core.measures import Traffic
from meshwright.core.strategy import Strategy
from meshwright.models import init
from meshwright.models.build import build
from meshwright.run.engine import make_mesh

OURS = {"1d": "none", "1d sp": "megatron"}
BASE = {"1d": "torch", "1d sp": "torch sp"}
"""Of ours, what it is laid beside."""


@dataclass(frozen=True)
class Task:
    """What one process group measures."""

    size: Size
    steps: int


def gathered(layouts: tuple[object, ...], desired: tuple[object, ...]) -> PrepareModuleInput:
    """Inputs of a module, from what they are to what they shall be."""
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=desired)


def torch_step(model: nn.Module, ranks: int, *, is_sp: bool) -> Step:
    """A step of PyTorch's tensor parallelism."""
    between = Shard(1) if is_sp else Replicate()
    plan: dict[str, object] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if is_sp:
        plan["final_norm"] = SequenceParallel()
    for layer in model.get_submodule("layers")._modules:
        at = f"layers.{layer}."
        plan |= {f"{at}attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{at}mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{at}{name}": RowwiseParallel(output_layouts=between) for name in ("attention.o", "mlp.down")}
        if is_sp:
            plan |= {f"{at}{name}_norm": SequenceParallel() for name in ("attention", "mlp")}
            plan[f"{at}attention"] = gathered((Shard(1), None), (Replicate(), None))  # the second: where tokens stand
            plan[f"{at}mlp"] = gathered((Shard(1),), (Replicate(),))
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    optimizer = adamw(model.parameters())

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def check(steps: dict[str, Step], size: Size) -> None:
    """Raises AssertionError unless all find the same loss in their first step, and in the one after it."""
    for turn in range(2):
        found = [step(*size.batch(0, turn)) for step in steps.values()]
        losses = torch.tensor([each if isinstance(each, float) else float(each.loss) for each in found])
        torch.testing.assert_close(losses, losses[:1].expand_as(losses), rtol=1e-4, atol=0)


def measure(rank: int, ranks: int, meeting_file: str, task: Task) -> tuple[Times, dict[str, list[float]]]:
    """One rank: (seconds of each step, seconds waited in each step of ours)."""
    torch.set_num_threads(1)
    mesh.start_local(meeting_file, rank, ranks)
    world = mesh.Mesh.create({"tp": ranks})
    spec = task.size.spec()
    weights = build(spec, "cpu")
    init.initialize(weights, spec, SEED)
    steps: dict[str, Step] = {}
    for name in BASE.values():
        peer = build(spec, "cpu")
        peer.load_state_dict(weights.state_dict())
        steps[name] = torch_step(peer, ranks, is_sp=name == "torch sp")
    engines = {}
    for name, sequence in OURS.items():
        plan = make_plan(task.size, Strategy(tp=ranks, sequence=sequence))
        engines[name] = our_engine(plan, world, weights, None)
        steps[name] = our_step(engines[name])
    check(steps, task.size)
    seconds: Times = {name: [] for name in steps}
    waits: dict[str, list[float]] = {name: [] for name in engines}
    for turn, name, is_measured in rounds(list(steps), task.steps):
        wall, _ = timed(steps[name], task.size.batch(0, turn), world)
        if is_measured:
            seconds[name].append(wall)
            if name in engines:
                waits[name].append(sum(engines[name].last_waits_s.values()))
    mesh.stop()
    return seconds, waits


def strategies(ranks: int, num_heads: int) -> dict[str, Strategy]:
    """Our layouts of so many ranks."""
    found = {name: Strategy(tp=ranks, sequence=kind) for name, kind in OURS.items() if num_heads % ranks == 0}
    if isqrt(ranks) ** 2 == ranks:
        found["2d"] = Strategy(tp=ranks, tensor=Tensor(kind="2d"))
    if ranks == 8:
        found |= {
            "2.5d": Strategy(tp=8, tensor=Tensor(kind="2.5d", depth=2)),
            "3d": Strategy(tp=8, tensor=Tensor(kind="3d")),
        }
    return found


def call(primitive: str, axis: mesh.Axis, whole: torch.Tensor, root: int) -> None:
    """One collective of zeros."""
    block = torch.zeros(len(whole) // axis.size)
    if primitive == "all_reduce":
        collectives.all_reduce(whole, axis)
    elif primitive == "all_gather":
        collectives.all_gather(whole, block, axis)
    elif primitive == "reduce_scatter":
        collectives.reduce_scatter(block, whole, axis)
    elif primitive == "all_to_all":
        collectives.all_to_all(torch.empty_like(whole), whole, axis)
    elif primitive == "broadcast":
        collectives.broadcast(whole, axis, root)
    else:
        assert primitive == "reduce", primitive
        collectives.reduce(whole, axis, root)


def replay(sent: Traffic, world: mesh.Mesh) -> None:
    """The calls of a step by themselves."""
    for (primitive, name, _), row in sorted(sent.rows.items()):
        axis = world[name]
        numel = row.payload_bytes // row.calls // 4
        whole = torch.zeros(max(1, numel // axis.size) * axis.size)
        for at in range(row.calls):
            call(primitive, axis, whole, at % axis.size)


def measure_layouts(rank: int, ranks: int, meeting_file: str, task: Task) -> dict[str, dict[str, list[float]]]:
    """One rank: layout -> figures of each step."""
    torch.set_num_threads(1)
    mesh.start_local(meeting_file, rank, ranks)
    spec = task.size.spec()
    weights = build(spec, "cpu")
    init.initialize(weights, spec, SEED)
    engines = {}
    for name, strategy in strategies(ranks, spec.num_heads).items():
        plan = make_plan(task.size, strategy)
        engines[name] = our_engine(plan, make_mesh(plan), weights, None)
    check({name: our_step(engine) for name, engine in engines.items()}, task.size)
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in engines}
    for turn, name, is_measured in rounds(list(engines), task.steps):
        engine = engines[name]
        wall, _ = timed(our_step(engine), task.size.batch(0, turn), engine.mesh)
        waited, sent = sum(engine.last_waits_s.values()), engine.last_traffic
        moved, _ = timed(lambda *batch: replay(sent, engine.mesh), task.size.batch(0, turn), engine.mesh)  # noqa: B023
        engine.mesh.ledger.take()
        engine.mesh.ledger.take_waits()
        if is_measured:
            calls = sum(row.calls for row in sent.rows.values())
            figures = {"step": wall, "waited": waited, "moved": moved, "sent": sent.wire_bytes, "calls": calls}
            for what, value in figures.items():
                found[name][what].append(value)
    mesh.stop()
    return {name: dict(figures) for name, figures in found.items()}


def layouts_table(asked: argparse.Namespace) -> Table:
    """Medians over steps, of the slowest rank in each; waits as the mean over ranks."""
    table = Table("size", "ranks", "layout", "ms", "ratio", "sent MB", "calls", "moved ms", "waited ms", "hidden")
    for size in asked.sizes:
        for ranks in asked.ranks:
            with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(ranks) as workers:
                task = Task(SIZES[size], asked.steps)
                jobs = [(rank, ranks, os.path.join(folder, "meet"), task) for rank in range(ranks)]
                by_rank = workers.starmap(measure_layouts, jobs, chunksize=1)
            steps = {name: [max(t) for t in zip(*(r[name]["step"] for r in by_rank))] for name in by_rank[0]}
            for name, of in steps.items():
                moved, waited = (
                    statistics.mean(statistics.median(r[name][what]) for r in by_rank) for what in ("moved", "waited")
                )
                ratio = statistics.median(a / b for a, b in zip(of, next(iter(steps.values()))))
                sent, calls = (max(r[name][what][-1] for r in by_rank) for what in ("sent", "calls"))
                hidden = f"{1 - waited / moved:.0%}" if waited < moved else ""
                cells = (f"{1e3 * statistics.median(of):.0f}", f"{ratio:.2f}", f"{sent / 1e6:.1f}", f"{calls:.0f}")
                table.add_row(size, str(ranks), name, *cells, f"{1e3 * moved:.0f}", f"{1e3 * waited:.0f}", hidden)
    return table


def run(ranks: int, task: Task) -> tuple[Times, dict[str, float]]:
    """Seconds of the slowest rank in each step, and share of it that ranks of ours wait, on average."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(ranks) as workers:
        jobs = [(rank, ranks, os.path.join(folder, "meet"), task) for rank in range(ranks)]
        results = workers.starmap(measure, jobs, chunksize=1)
    times = {name: [max(t) for t in zip(*(r[0][name] for r in results))] for name in results[0][0]}
    waited = {name: statistics.mean(statistics.median(r[1][name]) for r in results) for name in OURS}
    return times, {name: seconds / statistics.median(times[name]) for name, seconds in waited.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=["S", "M", "L"], default=["S", "M"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layouts", action="store_true", help="Ours beside each other.")
    asked = parser.parse_args()
    if asked.layouts:
        Console(width=120).print(layouts_table(asked))
        return
    table = Table("size", "ranks", "contender", "ms", "beside", "ratio", "best", "waits")
    for size in asked.sizes:
        for ranks in asked.ranks:
            times, waits = run(ranks, Task(SIZES[size], asked.steps))
            for name, of in times.items():
                cells = ["", "", "", ""]
                if base := BASE.get(name):
                    low, middle, high = quartiles(of, times[base])
                    cells = [
                        base,
                        f"{low:.2f} {middle:.2f} {high:.2f}",
                        f"{min(of) / min(times[base]):.2f}",
                        f"{waits[name]:.0%}",
                    ]
                table.add_row(size, str(ranks), name, f"{1e3 * statistics.median(of):.1f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
