"""Our training step beside DistributedDataParallel with fused AdamW: same model, weights, data, ranks and threads.

    python benchmarks/train_step.py [--sizes S M L] [--ranks 2 4] [--steps 12] [--clip 1.0 | --no-clip]

All contenders take turns, step by step, in one process group, on one thread per rank; who is first rotates.

    ddp         DDP (gradients as bucket views), `clip_grad_norm_(foreach=True)`, AdamW(fused=True)
    replicated  `meshwright.parallelize`, dp = ranks, zero 0
    zero-1      the same with zero 1
    floor       forward, backward and fused AdamW of the plain model on all ranks at once, nothing sent, no clipping

A step lasts until its slowest rank has done it. `ratio` is contender / ddp of the same turn: lower quartile, median,
upper quartile. `best` is the ratio of the fastest steps, `cpu` that of the medians of processor seconds, summed over
ranks: both are steadier on a machine that others use too. Memory is what one rank holds as parameters, gradients and
optimizer state. The floor works on ddp's own tensors, so it costs no memory of its own. All get the same tokens; all
tokens count. Where memory is too small for all contenders at once, each is measured alone beside ddp.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from contenders import (
    SEED,
    SIZES,
    Ddp,
    Size,
    Step,
    Times,
    available_bytes,
    make_plan,
    our_engine,
    our_step,
    quartiles,
    rounds,
    timed,
)
from rich.console import Console
from rich.table import Table

from meshwright.comm import mesh
from meshwright.core.strategy import Strategy
from meshwright.models import init
from meshwright.models.build import build

BASE = "ddp"
OURS = {"replicated": 0, "zero-1": 1}
"""Contender → ZeRO stage."""

BYTES_PER_PARAMETER = {BASE: 16, "replicated": 16, "zero-1": 16, "floor": 4}
"""fp32 parameters, gradients and moments; an upper bound for ZeRO-1, gradients only for the floor."""
BYTES_PER_RANK = 600 * 2**20
"""Of Python, PyTorch and activations, roughly."""


@dataclass(frozen=True)
class Task:
    """What one process group measures."""

    size: Size
    contenders: tuple[str, ...]
    steps: int
    clip: float | None
    threads: int = 1


@dataclass(frozen=True)
class Result:
    """Of one rank."""

    seconds: dict[str, list[float]]
    """Contender → wall time of each step."""
    cpu_seconds: dict[str, list[float]]
    """Contender → processor time of each step, threads of the backend included."""
    state_bytes: dict[str, int]


def measure(rank: int, ranks: int, meeting_file: str, task: Task) -> Result:
    """One rank: all contenders in turn, two unmeasured rounds first."""
    torch.set_num_threads(task.threads)
    mesh.start_local(meeting_file, rank, ranks)
    world = mesh.Mesh.create({"dp": ranks})
    spec = task.size.spec()
    model = build(spec, "cpu")
    init.initialize(model, spec, SEED)
    strategies = {name: Strategy(dp=ranks, zero=OURS[name]) for name in task.contenders if name in OURS}
    plans = {name: make_plan(task.size, strategy) for name, strategy in strategies.items()}
    engines = {name: our_engine(plan, world, model, task.clip) for name, plan in plans.items()}
    ddp = Ddp(model, task.clip)
    steps: dict[str, Step] = {BASE: ddp.step}
    for name, engine in engines.items():
        steps[name] = our_step(engine)
    ddp.step(*task.size.batch(rank, 0))  # moments exist from here on
    if "floor" in task.contenders:
        steps["floor"] = ddp.floor(spec)
    seconds: Times = {name: [] for name in steps}
    cpu_seconds: Times = {name: [] for name in steps}
    for turn, name, is_measured in rounds(list(steps), task.steps):
        wall, cpu = timed(steps[name], task.size.batch(rank, turn), world)
        if is_measured:
            seconds[name].append(wall)
            cpu_seconds[name].append(cpu)
    held = {name: engine.memory(0) for name, engine in engines.items()}
    state_bytes = {name: m.parameters_bytes + m.gradients_bytes + m.optimizer_bytes for name, m in held.items()}
    mesh.stop()
    return Result(seconds, cpu_seconds, state_bytes | {BASE: ddp.state_bytes})


def run(ranks: int, task: Task) -> Result:
    """All ranks of one group: seconds of the slowest rank in each step, bytes of the fullest."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(ranks) as workers:
            jobs = [(rank, ranks, os.path.join(folder, "meet"), task) for rank in range(ranks)]
            results = workers.starmap(measure, jobs, chunksize=1)
    return Result(
        {name: [max(t) for t in zip(*(r.seconds[name] for r in results))] for name in results[0].seconds},
        {name: [sum(t) for t in zip(*(r.cpu_seconds[name] for r in results))] for name in results[0].seconds},
        {name: max(r.state_bytes[name] for r in results) for name in results[0].state_bytes},
    )


def groups_that_fit(size: Size, ranks: int, contenders: tuple[str, ...]) -> list[tuple[str, ...]]:
    """All contenders at once where memory allows it, else each alone beside ddp; those that never fit are left out."""

    def fits(names: tuple[str, ...]) -> bool:
        per_parameter = sum(BYTES_PER_PARAMETER[name] for name in (BASE, *names))
        return ranks * (per_parameter * num_parameters + BYTES_PER_RANK) < available_bytes()

    num_parameters = size.num_parameters
    return [contenders] if fits(contenders) else [(name,) for name in contenders if fits((name,))]


def add_rows(table: Table, label: str, ranks: int, result: Result) -> None:
    """One row per contender."""
    base = result.seconds[BASE]
    for name, times in result.seconds.items():
        low, middle, high = quartiles(times, base)
        held = result.state_bytes.get(name)
        table.add_row(
            label,
            str(ranks),
            name,
            f"{statistics.median(times) * 1e3:,.0f}",
            f"{low:.3f}",
            f"{middle:.3f}",
            f"{high:.3f}",
            f"{min(times) / min(base):.3f}",
            f"{statistics.median(result.cpu_seconds[name]) / statistics.median(result.cpu_seconds[BASE]):.3f}",
            "" if held is None else f"{held / 2**20:,.1f}",
        )
    table.add_section()


def new_table(clip: float | None) -> Table:
    """Empty, with its heads."""
    title = f"one training step, clipped at {clip:g}" if clip is not None else "one training step, no clipping"
    table = Table(title=title)
    for head in ("size", "ranks", "step", "median ms", "ratio ¼", "ratio", "ratio ¾", "best", "cpu", "MiB per rank"):
        table.add_column(head, justify="left" if head in ("size", "step") else "right")
    return table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S", "M", "L"], choices=SIZES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each contender")
    parser.add_argument("--contenders", nargs="+", default=[*OURS, "floor"], choices=[*OURS, "floor"])
    clip = parser.add_mutually_exclusive_group()
    clip.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm, on both sides")
    clip.add_argument("--no-clip", dest="clip", action="store_const", const=None)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    table = new_table(options.clip)
    for label, ranks in product(options.sizes, options.ranks):
        size = SIZES[label]
        for group in groups_that_fit(size, ranks, tuple(options.contenders)):
            add_rows(table, label, ranks, run(ranks, Task(size, group, options.steps, options.clip)))
    Console(width=max(100, Console().width)).print(table)


if __name__ == "__main__":
    main()
