"""Every stage of our data parallelism beside the peers' same stage, all else alike.

    python benchmarks/data_parallel.py [--sizes S M L] [--ranks 2 4] [--turns 8] [--contenders zero-3 ...]
                                        [--what time memory] [--clip 1.0 | --no-clip]

All contenders start from the same weights and get the same tokens. They take turns, step by step, in one process group,
on one thread per rank; who is first rotates.

    ddp           DDP (gradients as bucket views)
    zero-opt      the same with ZeroRedundancyOptimizer (parameters as bucket views)
    fsdp2-kept    `fully_shard` of every layer and of the model, reshard_after_forward=False
    fsdp2         the same, parameters freed after forward
    deepspeed-N   DeepSpeed ZeRO N, where it is installed
    zero-N        ours                                   its peer: ddp, zero-opt, fsdp2-kept, fsdp2
    zero-3-kept   ours, zero 3 with keep_gathered        its peer: fsdp2-kept
    zero-3-ahead  ours, zero 3 with prefetch=2           its peer: fsdp2
    floor         forward, backward and fused AdamW of the plain model on all ranks at once, nothing sent, no clipping

All use fused AdamW in fp32, and clip alike. A step lasts until its slowest rank has done it. `ratio` is contender /
peer of the same turn (quartiles and median), `/ deepspeed` the median of the same against DeepSpeed's stage, `cpu` the
ratio of median processor seconds, summed over ranks: steadier on a machine that others use too.

`over floor` is the median of what a step takes longer than the floor of the same turn. `waited` is what a rank of ours
stood still for communication: median of its steps, of the rank that waited most. `sent MB` is what a rank sends in a
step, in 10^6 bytes: ours by the ledger, whose bytes may pass through memory; of the peers what the loopback device has
counted in their leanest step / ranks, headers included.

`peak MiB` is the peak of a process that runs this contender alone: VmHWM over two steps, after a first step and with
the heap trimmed, of the fullest rank. `of its own` is what it adds to what PyTorch took before the model was built.

Where memory is too small for all at once, each of ours is measured beside its own peers only.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

import torch
from contenders import (
    LEARNING_RATE,
    OPTIONS,
    SEED,
    SIZES,
    Ddp,
    Size,
    Step,
    adamw,
    adamw_groups,
    available_bytes,
    fsdp2,
    make_plan,
    our_engine,
    our_step,
    plain_step,
    quartiles,
    rounds,
    timed,
)
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: TID251 (a peer)
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm import mesh
from meshwright.core.axes import WORLD
from meshwright.core.strategy import Strategy
from meshwright.models import init
from meshwright.models.build import build
from meshwright.run.engine import Engine

DDP, ZERO_OPT, FSDP2_KEPT, FSDP2, FLOOR = "ddp", "zero-opt", "fsdp2-kept", "fsdp2", "floor"
DEEPSPEED = {f"deepspeed-{zero}": zero for zero in (1, 2, 3)}
OURS = {
    **{f"zero-{zero}": Strategy(zero=zero) for zero in (0, 1, 2, 3)},
    "zero-3-kept": Strategy(zero=3, keep_gathered=True),
    "zero-3-ahead": Strategy(zero=3, prefetch=2),
}
"""Contender → how it splits; dp is the number of ranks."""
PEER = {
    "zero-0": DDP, "zero-1": ZERO_OPT, "zero-2": FSDP2_KEPT, "zero-3": FSDP2, "zero-3-kept": FSDP2_KEPT,
    "zero-3-ahead": FSDP2, FLOOR: DDP,
}  # fmt: skip
CONTENDERS = (DDP, ZERO_OPT, FSDP2_KEPT, FSDP2, *DEEPSPEED, *OURS, FLOOR)
BYTES_PER_PARAMETER = 16
"""Of one contender at most: fp32 parameters, gradients and moments."""
BYTES_PER_RANK = 600 * 2**20
"""Of Python, PyTorch and activations, roughly."""


@dataclass(frozen=True)
class Task:
    """What one process group measures."""

    size: Size
    contenders: tuple[str, ...]
    turns: int
    clip: float | None


@dataclass
class Turns:
    """One contender on one rank: a value for each measured step."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    """Ours only."""
    sent_bytes: list[int] = field(default_factory=list)
    """Ours: of this rank. A peer's: of all ranks together."""


@dataclass(frozen=True)
class Peak:
    """Of a process that runs one contender alone."""

    total_bytes: int
    before_bytes: int
    """Resident before the model was built."""

    @property
    def own_bytes(self) -> int:
        return self.total_bytes - self.before_bytes


@dataclass(frozen=True)
class Group:
    """Where the contenders of a rank live."""

    size: Size
    model: nn.Module
    """The weights that all start from."""
    world: mesh.Mesh
    clip: float | None

    @property
    def ranks(self) -> int:
        return self.world[WORLD].size


def zero_redundancy(model: nn.Module, clip: float | None) -> Step:
    """DDP with the optimizer's state sharded by ZeroRedundancyOptimizer."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        adamw_groups(model.parameters()), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE,
        betas=OPTIONS.betas, eps=OPTIONS.eps, fused=True,
    )  # fmt: skip
    return plain_step(parallel, model.parameters, optimizer, clip)


def deepspeed(model: nn.Module, group: Group, zero: int) -> Step:
    """DeepSpeed's engine around the same optimizer."""
    os.environ["LOCAL_RANK"] = str(group.world.rank)  # which it asks for, though the process group stands already
    import deepspeed as peer

    config = {
        "train_micro_batch_size_per_gpu": group.size.batch_per_rank,
        "gradient_clipping": group.clip or 0.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = peer.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> None:
        engine.backward(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), labels.flatten()))
        engine.step()

    return step


def peer_step(name: str, group: Group) -> Step:
    """The step of a peer, on weights of its own."""
    model, clip = copy.deepcopy(group.model), group.clip
    if name in DEEPSPEED:
        return deepspeed(model, group, DEEPSPEED[name])
    make: dict[str, Callable[[], Step]] = {
        DDP: lambda: Ddp(model, clip).step,
        ZERO_OPT: lambda: zero_redundancy(model, clip),
        FSDP2: lambda: fsdp2(model, clip),
        FSDP2_KEPT: lambda: fsdp2(model, clip, reshard=False),
    }
    return make[name]()


def make_steps(names: Sequence[str], group: Group) -> tuple[dict[str, Step], dict[str, Engine]]:
    """Contender → its step, and ours → its engine. The floor shares ddp's tensors, where ddp takes part."""
    steps: dict[str, Step] = {}
    engines: dict[str, Engine] = {}
    for name in names:
        if name in OURS:
            plan = make_plan(group.size, OURS[name].model_copy(update={"dp": group.ranks}))
            engines[name] = our_engine(plan, group.world, group.model, group.clip)
            steps[name] = our_step(engines[name])
        elif name != FLOOR and (name != DDP or FLOOR not in names):
            steps[name] = peer_step(name, group)
    if FLOOR in names:
        ddp = Ddp(copy.deepcopy(group.model), group.clip)
        ddp.step(*group.size.batch(group.world.rank, 0))  # moments exist from here on
        steps |= {DDP: ddp.step, FLOOR: ddp.floor(group.size.spec())}
    return steps, engines


def start(rank: int, ranks: int, meeting_file: str, task: Task) -> Group:
    """Join the group, and draw the weights."""
    torch.set_num_threads(1)
    mesh.start_local(meeting_file, rank, ranks)
    spec = task.size.spec()
    model = build(spec, "cpu")
    init.initialize(model, spec, SEED)
    return Group(task.size, model, mesh.Mesh.create({"dp": ranks}), task.clip)


def measure(rank: int, ranks: int, meeting_file: str, task: Task) -> dict[str, Turns]:
    """One rank: all contenders in turn."""
    group = start(rank, ranks, meeting_file, task)
    steps, engines = make_steps(task.contenders, group)
    turns = {name: Turns() for name in steps}
    for turn, name, is_measured in rounds(list(steps), task.turns):
        before = loopback_bytes()
        seconds, cpu_seconds = timed(steps[name], task.size.batch(rank, turn), group.world)
        if not is_measured:
            continue
        taken = turns[name]
        taken.seconds.append(seconds)
        taken.cpu_seconds.append(cpu_seconds)
        if (engine := engines.get(name)) is not None:
            taken.waited_s.append(sum(engine.last_waits_s.values()))
            taken.sent_bytes.append(engine.last_traffic.wire_bytes)
        else:
            taken.sent_bytes.append(loopback_bytes() - before)
    mesh.stop()
    return turns


def measure_peak(rank: int, ranks: int, meeting_file: str, task: Task) -> Peak:
    """One rank of a fresh group that runs one contender."""
    before = status_bytes("VmRSS")
    group = start(rank, ranks, meeting_file, task)
    steps, engines = make_steps(task.contenders, group)
    (step,) = steps.values()
    world, batches = group.world, [task.size.batch(rank, turn) for turn in range(3)]
    del group, steps, engines
    timed(step, batches[0], world)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    for batch in batches[1:]:
        timed(step, batch, world)
    peak = status_bytes("VmHWM")
    mesh.stop()
    return Peak(peak, before)


def status_bytes(key: str) -> int:
    """A size of this process, as the kernel counts it."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def loopback_bytes() -> int:
    """What this machine's processes have sent one another through sockets."""
    with open("/proc/net/dev") as lines:
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


T = TypeVar("T")


def on_ranks(work: Callable[[int, int, str, Task], T], ranks: int, task: Task) -> list[T]:
    """`work` on each rank of a fresh group."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(ranks, mp_context=context) as workers:
            meeting_file = os.path.join(folder, "meet")
            jobs = [workers.submit(work, rank, ranks, meeting_file, task) for rank in range(ranks)]
            return [job.result() for job in jobs]


def groups_that_fit(size: Size, ranks: int, contenders: Sequence[str]) -> list[tuple[str, ...]]:
    """All at once where memory allows it, else each of ours beside its peers; those that never fit are left out."""

    def fits(names: Sequence[str]) -> bool:
        return ranks * (len(names) * BYTES_PER_PARAMETER * num_parameters + BYTES_PER_RANK) < available_bytes()

    num_parameters = size.num_parameters
    if fits(contenders):
        return [tuple(contenders)]
    beside = [[name, *(peer for peer in peers_of(name) if peer in contenders)] for name in contenders if name in PEER]
    return [tuple(reversed(names)) for names in beside if fits(names)]


def peers_of(name: str) -> tuple[str, ...]:
    """What a contender is compared with."""
    stage = OURS[name].zero if name in OURS else 0
    return (PEER[name], f"deepspeed-{stage}")


def slowest(results: Sequence[dict[str, Turns]], name: str) -> list[float]:
    """Seconds of each step."""
    return [max(seconds) for seconds in zip(*(turns[name].seconds for turns in results))]


def cpu_seconds(results: Sequence[dict[str, Turns]], name: str) -> float:
    """Of the median step, all ranks together."""
    return statistics.median(sum(step) for step in zip(*(turns[name].cpu_seconds for turns in results)))


def sent_bytes(results: Sequence[dict[str, Turns]], name: str) -> float:
    """Of a rank in a step."""
    if name in OURS:
        return max(turns[name].sent_bytes[-1] for turns in results)
    return min(results[0][name].sent_bytes) / len(results)


def ratios(results: Sequence[dict[str, Turns]], name: str) -> list[str]:
    """Cells of quartiles and median beside the peer, of processor time, and beside DeepSpeed."""
    seconds, (peer, rival) = slowest(results, name), peers_of(name)
    beside = rest = ["", "", ""]
    if peer in results[0]:
        beside = [f"{ratio:.3f}" for ratio in quartiles(seconds, slowest(results, peer))]
        rest = [f"{cpu_seconds(results, name) / cpu_seconds(results, peer):.3f}"]
    second = f"{quartiles(seconds, slowest(results, rival))[1]:.3f}" if rival in results[0] else ""
    return [*beside, rest[0], second]


def over_floor(results: Sequence[dict[str, Turns]], name: str) -> str:
    """Cell of the milliseconds that a step takes longer than the floor of its turn."""
    if name == FLOOR or FLOOR not in results[0]:
        return ""
    pairs = zip(slowest(results, name), slowest(results, FLOOR))
    return f"{statistics.median(step - floor for step, floor in pairs) * 1e3:,.0f}"


def time_row(results: Sequence[dict[str, Turns]], name: str) -> list[str]:
    """Cells of one contender."""
    waited = [statistics.median(turns[name].waited_s) for turns in results if turns[name].waited_s]
    return [
        name,
        f"{statistics.median(slowest(results, name)) * 1e3:,.0f}",
        *(ratios(results, name) if name in PEER else [""] * 5),
        over_floor(results, name),
        f"{max(waited) * 1e3:,.0f}" if waited else "",
        f"{sent_bytes(results, name) / 1e6:,.1f}",
    ]


TIME_HEADS = ("ms", "ratio ¼", "ratio", "ratio ¾", "cpu", "/ deepspeed", "over floor", "waited", "sent MB")


def memory_row(peaks: dict[str, list[Peak]], name: str) -> list[str]:
    """Cells of one contender."""
    cells = [name]
    sizes = {of: (max(p.total_bytes for p in held), max(p.own_bytes for p in held)) for of, held in peaks.items()}
    peers = [sizes.get(peer) for peer in peers_of(name)] if name in PEER else [None, None]
    for at, of_contender in enumerate(sizes[name]):
        beside = [f"{of_contender / of_peer[at]:.3f}" if of_peer is not None else "" for of_peer in peers]
        cells += [f"{of_contender / 2**20:,.0f}", *beside]
    return cells


MEMORY_HEADS = ("peak MiB", "ratio", "/ deepspeed", "of its own", "ratio", "/ deepspeed")


def new_table(title: str, heads: Sequence[str]) -> Table:
    """Empty."""
    table = Table(title=title)
    for head in ("size", "ranks", "step"):
        table.add_column(head)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def with_peers(names: Sequence[str], installed: Sequence[str]) -> list[str]:
    """The chosen contenders and those that they are compared with, in order."""
    wanted = {*names, *(peer for name in names if name in PEER for peer in peers_of(name))}
    return [name for name in installed if name in wanted]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    here = [name for name in CONTENDERS if has_deepspeed or name not in DEEPSPEED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S", "M", "L"], choices=SIZES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=8, help="measured steps of each contender")
    parser.add_argument("--contenders", nargs="+", default=here, choices=here, help="their peers come with them")
    parser.add_argument("--what", nargs="+", default=["time", "memory"], choices=["time", "memory"])
    clip = parser.add_mutually_exclusive_group()
    clip.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm, on all sides")
    clip.add_argument("--no-clip", dest="clip", action="store_const", const=None)
    options = parser.parse_args(arguments)
    options.contenders = with_peers(options.contenders, here)
    return options


def times(options: argparse.Namespace) -> Table:
    """Of all sizes and numbers of ranks."""
    title = f"one training step, clipped at {options.clip:g}" if options.clip else "one training step, no clipping"
    table = new_table(title, TIME_HEADS)
    for label, ranks in product(options.sizes, options.ranks):
        for names in groups_that_fit(SIZES[label], ranks, options.contenders):
            results = on_ranks(measure, ranks, Task(SIZES[label], names, options.turns, options.clip))
            for name in results[0]:
                table.add_row(label, str(ranks), *time_row(results, name))
            table.add_section()
    return table


def peaks(options: argparse.Namespace) -> Table:
    """Of all sizes and numbers of ranks."""
    table = new_table("peak of a process", MEMORY_HEADS)
    for label, ranks in product(options.sizes, options.ranks):
        names = [name for name in options.contenders if name != FLOOR]
        held = {name: on_ranks(measure_peak, ranks, Task(SIZES[label], (name,), 2, options.clip)) for name in names}
        for name in names:
            table.add_row(label, str(ranks), *memory_row(held, name))
        table.add_section()
    return table


def main() -> None:
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(width=max(130, Console().width))
    for what, measured in (("time", times), ("memory", peaks)):
        if what in options.what:
            console.print(measured(options))


if __name__ == "__main__":
    main()
