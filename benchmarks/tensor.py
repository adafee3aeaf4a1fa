"""Our tensor parallelism beside `torch.distributed.tensor.parallel`: same decoder, weights, tokens, ranks and threads.

    python benchmarks/tensor.py [--sizes S M] [--ranks 2 4] [--steps 12]

All contenders take turns, step by step, in one process group, on one thread per rank; who is first rotates.

    torch       ColwiseParallel, RowwiseParallel, vocabulary-parallel embedding and head, `loss_parallel`, AdamW(fused)
    torch sp    the same with SequenceParallel norms, residuals of each rank's tokens
    1d          `meshwright.parallelize`, tp = ranks
    1d sp       the same with sequence="megatron"

A step lasts until its slowest rank has done it. `ratio` is ours / torch's of the same turn, sp beside sp: lower
quartile, median, upper quartile. `best` is the ratio of the fastest steps. `waits` is the share of a step that a rank
of ours stands still for communication that it has started: what computation does not hide. Nothing is clipped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from dataclasses import dataclass

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

from meshwright.comm import mesh
from meshwright.core.strategy import Strategy
from meshwright.models import init
from meshwright.models.build import build

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
    asked = parser.parse_args()
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
