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
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm import collectives, mesh
from meshwright.core.axes import WORLD
from meshwright.core.cluster import ClusterSpec, Device, Link
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.models import init
from meshwright.models.build import build
from meshwright.run.engine import Engine, parallelize
from meshwright.train.optimizer import OptimizerOptions

BASE = "ddp"
OURS = {"replicated": 0, "zero-1": 1}
"""Contender → ZeRO stage."""
LEARNING_RATE = 1e-4
OPTIONS = OptimizerOptions(weight_decay=0.1)
SEED = 0

BYTES_PER_PARAMETER = {BASE: 16, "replicated": 16, "zero-1": 16, "floor": 4}
"""fp32 parameters, gradients and moments; an upper bound for ZeRO-1, gradients only for the floor."""
BYTES_PER_RANK = 600 * 2**20
"""Of Python, PyTorch and activations, roughly."""

Step = Callable[[torch.Tensor, torch.Tensor], object]
"""One training step on (tokens, labels)."""


@dataclass(frozen=True)
class Size:
    """A Llama-like model and what each rank trains on per step."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    seq_length: int
    batch_per_rank: int

    def spec(self) -> ModelSpec:
        heads = self.hidden_size // 64
        return ModelSpec(
            name="llama-like", family="llama", vocab_size=self.vocab_size, hidden_size=self.hidden_size,
            num_layers=self.num_layers, num_heads=heads, num_kv_heads=heads, head_dim=64,
            ffn_size=-(-self.hidden_size * 8 // 3 // 64) * 64, max_positions=self.seq_length, norm="rmsnorm",
            positions="rope", activation="silu", gated_mlp=True, tied_embeddings=False,
        )  # fmt: skip


SIZES = {
    "XS": Size(2, 64, 512, 64, 1),
    "S": Size(4, 256, 4096, 256, 4),
    "M": Size(8, 512, 8192, 256, 2),
    "L": Size(12, 768, 32000, 128, 1),
}


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


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """The peers' optimizer, fused; biases and norms are not decayed."""
    held = list(parameters)
    groups = [
        {"params": [p for p in held if p.ndim > 1], "weight_decay": OPTIONS.weight_decay},
        {"params": [p for p in held if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=OPTIONS.betas, eps=OPTIONS.eps, fused=True)


@dataclass
class Ddp:
    """DDP beside its floor: the same tensors without the communication."""

    model: nn.Module
    clip: float | None
    bucket_mib: float = 25
    """DDP's own default."""

    def __post_init__(self) -> None:
        self.parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=self.bucket_mib)
        self.optimizer = adamw(self.model.parameters())

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        F.cross_entropy(self.parallel(tokens).flatten(0, 1), labels.flatten()).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def floor(self, spec: ModelSpec) -> Step:
        """The same step on parameters and moments that share ddp's memory, without DDP's hooks."""
        plain = build(spec, "meta")
        for name, parameter in self.model.named_parameters():
            owner, _, attribute = name.rpartition(".")
            setattr(plain.get_submodule(owner), attribute, nn.Parameter(parameter.detach()))
        optimizer = adamw(plain.parameters())
        for ours, theirs in zip(plain.parameters(), self.model.parameters()):
            optimizer.state[ours] = self.optimizer.state[theirs]

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> None:
            F.cross_entropy(plain(tokens).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    @property
    def state_bytes(self) -> int:
        """Parameters, as many gradients (views of the buckets), moments."""
        parameters = 2 * sum(p.nbytes for p in self.model.parameters())
        return parameters + sum(
            t.nbytes for kept in self.optimizer.state.values() for t in kept.values() if torch.is_tensor(t)
        )


def make_plan(size: Size, ranks: int, zero: int) -> Plan:
    """A plan of dp = ranks over CPU ranks of this machine; its numbers price nothing here."""
    device = Device(name="cpu", memory_bytes=2**40, memory_bandwidth_bytes_per_s=1e10, peak_flops_per_s={"fp32": 1e11})
    link = Link(name="memory", bandwidth_bytes_per_s=1e9, latency_s=1e-4)
    cluster = ClusterSpec(
        name="here", num_nodes=1, devices_per_node=ranks, device=device, intra_link=link, inter_link=link,
        backend="gloo",
    )  # fmt: skip
    return Plan(
        model=size.spec(),
        cluster=cluster,
        job=Job(seq_length=size.seq_length, global_batch_size=ranks * size.batch_per_rank),
        strategy=Strategy(dp=ranks, zero=zero, micro_batch_size=size.batch_per_rank),
    )


def our_engine(plan: Plan, world: mesh.Mesh, weights: nn.Module, clip: float | None) -> Engine:
    """The engine over a plain model that has the weights of `weights`."""
    options = OptimizerOptions(betas=OPTIONS.betas, weight_decay=OPTIONS.weight_decay, clip_norm=clip)
    model = build(plan.model, "meta")
    for name, parameter in weights.named_parameters():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(parameter.detach()))
    return parallelize(model, plan, mesh=world, options=options)


def batch(size: Size, rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and their labels, [b, s] each."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    rows = torch.randint(size.vocab_size, (size.batch_per_rank, size.seq_length + 1), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def measure(rank: int, ranks: int, meeting_file: str, task: Task) -> Result:
    """One rank: all contenders in turn, two unmeasured rounds first."""
    torch.set_num_threads(task.threads)
    mesh.start_local(meeting_file, rank, ranks)
    world = mesh.Mesh.create({"dp": ranks})
    spec = task.size.spec()
    model = build(spec, "cpu")
    init.initialize(model, spec, SEED)
    plans = {name: make_plan(task.size, ranks, OURS[name]) for name in task.contenders if name in OURS}
    engines = {name: our_engine(plan, world, model, task.clip) for name, plan in plans.items()}
    ddp = Ddp(model, task.clip)
    steps: dict[str, Step] = {BASE: ddp.step}
    for name, engine in engines.items():
        steps[name] = lambda *pair, engine=engine: engine.step([pair], LEARNING_RATE)
    ddp.step(*batch(task.size, rank, 0))  # moments exist from here on
    if "floor" in task.contenders:
        steps["floor"] = ddp.floor(spec)
    seconds, cpu_seconds = take_turns(steps, task, rank, world)
    held = {name: engine.memory(0) for name, engine in engines.items()}
    state_bytes = {name: m.parameters_bytes + m.gradients_bytes + m.optimizer_bytes for name, m in held.items()}
    mesh.stop()
    return Result(seconds, cpu_seconds, state_bytes | {BASE: ddp.state_bytes})


Times = dict[str, list[float]]


def take_turns(steps: dict[str, Step], task: Task, rank: int, world: mesh.Mesh) -> tuple[Times, Times]:
    """Contender → wall and processor seconds of each measured step on this rank; all ranks start a step together."""
    seconds: Times = {name: [] for name in steps}
    cpu_seconds: Times = {name: [] for name in steps}
    names, warm_up = list(steps), 2
    for index in range(task.steps + warm_up):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            pair = batch(task.size, rank, index)
            collectives.barrier(world[WORLD])
            began, cpu_began = time.perf_counter(), time.process_time()
            steps[name](*pair)
            if index >= warm_up:
                seconds[name].append(time.perf_counter() - began)
            collectives.barrier(world[WORLD])
            if index >= warm_up:
                cpu_seconds[name].append(time.process_time() - cpu_began)
    return seconds, cpu_seconds


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

    num_parameters = sum(p.numel() for p in build(size.spec(), "meta").parameters())
    return [contenders] if fits(contenders) else [(name,) for name in contenders if fits((name,))]


def available_bytes() -> int:
    """Memory that new processes of this machine can have."""
    with open("/proc/meminfo") as lines:
        values = dict(line.split(":", 1) for line in lines)
    return int(values["MemAvailable"].split()[0]) * 1024


def add_rows(table: Table, label: str, ranks: int, result: Result) -> None:
    """One row per contender."""
    base = result.seconds[BASE]
    for name, times in result.seconds.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(times, base))
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
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
