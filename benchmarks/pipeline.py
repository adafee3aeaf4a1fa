"""Our pipeline step beside `torch.distributed.pipelining`: the same parts of the model, weights, micro-batches, ranks.

    python benchmarks/pipeline.py [--sizes S M] [--ranks 2 4] [--schedules 1f1b ...] [--turns 8] [--micro-batches 8]
                                  [--what time overhead]

Both run forwards and backwards of all micro-batches, and forget the gradients of the step before; no optimizer on
either side. They take turns, step by step, in one process group, on one thread per rank; who is first rotates. Boundary
messages go over gloo on their side, through shared memory on ours. Their loss sums over tokens and divides by the
step's once, so that neither scales gradients afterwards, and they return no outputs. Before anything is measured,
losses and gradient norms are compared.

    gpipe, 1f1b                ScheduleGPipe, Schedule1F1B
    interleaved-1f1b, bfs      ScheduleInterleaved1F1B, ScheduleLoopedBFS, of two stages per rank
    zb-h1                      ScheduleInterleavedZeroBubble of one stage per rank
    zb-v, dualpipe-v           ScheduleZBVZeroBubble, ScheduleDualPipeV

A model of fewer layers than stages is given as many layers as stages. A micro-batch is one sequence.

A step lasts until its slowest rank has done it. `ratio` is ours / theirs of the same turn (quartiles and median), `cpu`
the ratio of median processor seconds, summed over ranks. `floor` is the makespan of the table when every action costs
what it was measured to cost in that very step, and messages and all else nothing; `/ floor` are quartiles of the turns.
It is there where every rank has a core of its own: bubbles are not seen where ranks share cores.

`--what overhead`: what the interpreter takes by itself, on a model so small that little else is left: the time of a
row, without what passes inside the parts of the model, the loss, autograd, products of weight gradients, and inside
calls to send, to receive and to wait; over the number of actions. Quartiles of the steps, of the rank that takes most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from contenders import (
    SEED,
    SIZES,
    Size,
    make_plan,
    our_engine,
    quartiles,
    rounds,
    timed,
)
from data_parallel import new_table, on_ranks
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import pipelining as peers  # noqa: TID251 (a peer)

from meshwright.comm import mesh
from meshwright.comm.collectives import barrier
from meshwright.core.axes import PP, WORLD
from meshwright.core.batch import MicroBatch
from meshwright.core.plan import Plan
from meshwright.core.program import COMPUTE_KINDS, INPUT_GRADIENT_KINDS, Action, Kind, Program
from meshwright.core.schedule import find_schedule
from meshwright.core.strategy import Strategy
from meshwright.models import init
from meshwright.models.build import build
from meshwright.parallel import pipeline
from meshwright.parallel.products import Product
from meshwright.run.engine import Engine
from meshwright.schedule.build import build_program
from meshwright.schedule.walk import walk

OURS, THEIRS = "ours", "theirs"
PEERS: dict[str, tuple[type, int]] = {
    "gpipe": (peers.ScheduleGPipe, 1),
    "1f1b": (peers.Schedule1F1B, 1),
    "interleaved-1f1b": (peers.ScheduleInterleaved1F1B, 2),
    "bfs": (peers.ScheduleLoopedBFS, 2),
    "zb-h1": (peers.ScheduleInterleavedZeroBubble, 1),
    "zb-v": (peers.ScheduleZBVZeroBubble, 2),
    "dualpipe-v": (peers.schedules.ScheduleDualPipeV, 2),
}
"""Our name → their class, and the stages of each rank."""
TOLERANCE = 1e-3
"""Largest relative difference of losses and of gradient norms between the two, in fp32."""

WARM_UP = 2

Trace = list[tuple[Action, float, float]]


@dataclass(frozen=True)
class Task:
    """What one process group measures."""

    size: Size
    schedules: tuple[str, ...]
    num_micro_batches: int
    turns: int

    def plan(self, schedule: str, ranks: int) -> Plan:
        """One micro-batch is one sequence; as many layers as stages at least."""
        chunks = PEERS[schedule][1]
        layers = max(self.size.num_layers, chunks * ranks)
        asked = chunks if find_schedule(schedule).chunks is None else 1
        strategy = Strategy(pp=ranks, schedule=schedule, num_chunks=asked, num_micro_batches=self.num_micro_batches)
        return make_plan(replace(self.size, num_layers=layers, batch_per_rank=1), strategy)

    def batch(self, turn: int) -> MicroBatch:
        """All micro-batches, [m, s]: every rank has them."""
        return replace(self.size, batch_per_rank=self.num_micro_batches).batch(0, turn)


@dataclass
class Turns:
    """One rank: a value for each measured step."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {OURS: [], THEIRS: []})
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {OURS: [], THEIRS: []})
    traces: list[Trace] = field(default_factory=list)


@dataclass(frozen=True)
class Ours:
    """The engine's forward and backward."""

    engine: Engine

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss where the last stage is, zero elsewhere."""
        self.engine.parallel.zero_gradients()
        return self.engine.forward_backward(list(zip(tokens.split(1), labels.split(1))))

    def square_norm(self) -> float:
        """Of this rank's gradients."""
        return sum(float(values.double().square().sum()) for _, values, _ in self.engine.parallel.states.gradients())


class Theirs:
    """A schedule of theirs over the parts of a plain model that our rank runs too."""

    def __init__(self, plan: Plan, model: nn.Module, rank: int) -> None:
        strategy = plan.strategy
        pipeline.cut(model, plan.model, strategy, rank)
        self._model = model
        self._ends = [strategy.stage_ends(stage) for stage in strategy.rank_stages(rank)]
        stages = [
            peers.PipelineStage(part, stage, strategy.num_parts, torch.device("cpu"))
            for stage, part in pipeline.split(model, plan.model, strategy, rank).items()
        ]
        schedule, chunks = PEERS[strategy.schedule]
        num_tokens = plan.job.global_batch_size * plan.job.seq_length

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens

        of_rank = stages[0] if chunks == 1 and schedule in (peers.ScheduleGPipe, peers.Schedule1F1B) else stages
        self._schedule = schedule(of_rank, strategy.num_micro_batches, loss_fn=loss, scale_grads=False)

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As :meth:`Ours.step`."""
        self._model.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        is_first, is_last = map(any, zip(*self._ends))
        target: dict[str, Any] = {"target": labels, "losses": losses} if is_last else {}
        self._schedule.step(*([tokens] if is_first else []), **target, return_outputs=False)
        return torch.stack(losses).detach().sum() if losses else torch.zeros(())

    def square_norm(self) -> float:
        """Of this rank's gradients."""
        return sum(float(p.grad.double().square().sum()) for p in self._model.parameters())


def start(rank: int, ranks: int, meeting_file: str) -> mesh.Mesh:
    """Join the group."""
    torch.set_num_threads(1)
    mesh.start_local(meeting_file, rank, ranks)
    return mesh.Mesh.create({PP: ranks})


def contenders(plan: Plan, world: mesh.Mesh) -> tuple[Ours, Theirs]:
    """Both, with the same weights."""
    model = build(plan.model, "cpu")
    init.initialize(model, plan.model, SEED)
    ours = Ours(our_engine(plan, world, model, None))
    return ours, Theirs(plan, model, world[PP].index)


def check_equal(ours: Ours, theirs: Theirs, batch: MicroBatch) -> None:
    """Raises RuntimeError where the two do not compute the same."""
    losses = [float(contender.step(*batch)) for contender in (ours, theirs)]
    norms = [contender.square_norm() ** 0.5 for contender in (ours, theirs)]
    for what, (own, other) in (("loss", losses), ("gradient norm", norms)):
        if abs(own - other) > TOLERANCE * abs(other):
            raise RuntimeError(f"{what}: ours {own}, theirs {other}; what is not the same cannot be compared")


def measure(rank: int, ranks: int, meeting_file: str, task: Task) -> dict[str, Turns]:
    """One rank: schedule after schedule, both contenders in turn."""
    world = start(rank, ranks, meeting_file)
    found = {schedule: measure_schedule(task.plan(schedule, ranks), world, task) for schedule in task.schedules}
    mesh.stop()
    return found


def measure_schedule(plan: Plan, world: mesh.Mesh, task: Task) -> Turns:
    """One rank."""
    ours, theirs = contenders(plan, world)
    check_equal(ours, theirs, task.batch(0))
    steps, turns = {OURS: ours.step, THEIRS: theirs.step}, Turns()
    for turn, name, is_measured in rounds(list(steps), task.turns):
        ours.engine.parallel.runner.trace = trace = []
        wall, cpu = timed(steps[name], task.batch(turn), world)
        if is_measured:
            turns.seconds[name].append(wall)
            turns.cpu_seconds[name].append(cpu)
            if name == OURS:
                turns.traces.append(trace)
    return turns


class OwnTimes:
    """A machine for `schedule.walk`: compute actions last as long as they lasted, data crosses at once."""

    def __init__(self, program: Program, traces: Sequence[Trace]) -> None:
        self._program = program
        self._lasted_s = {action: end - start for trace in traces for action, start, end in trace}
        self._done_s: dict[Action, float] = {}
        self.free_s = [0.0] * program.num_ranks

    def attempt(self, rank: int, action: Action) -> bool:
        if action.kind in COMPUTE_KINDS:
            sources = self._sources(action)
            done = [self._done_s[source] for source in sources if source in self._done_s]
            if sources and not done:
                return False
            self.free_s[rank] = max(self.free_s[rank], *done, 0.0) + self._lasted_s[action]
            self._done_s[action] = self.free_s[rank]
        return True

    def _sources(self, action: Action) -> list[Action]:
        """One of these must be done first; a rank's own order holds the rest."""
        forward = action.kind is Kind.F
        near = (self._program.previous_stage if forward else self._program.next_stage)(action.stage)
        if near is None or action.kind is Kind.W:
            return []
        return [Action(kind, near, action.micro_batch) for kind in ((Kind.F,) if forward else INPUT_GRADIENT_KINDS)]


def floor_s(plan: Plan, traces: Sequence[Trace]) -> float:
    """Makespan of the table under the own time of each action in these rows, one per rank."""
    program = build_program(plan.strategy)
    times = OwnTimes(program, traces)
    walk(program, times)
    return max(times.free_s)


def time_row(plan: Plan, results: Sequence[Turns]) -> list[str]:
    """Cells of one schedule."""
    own, other = ([max(step) for step in zip(*(r.seconds[name] for r in results))] for name in (OURS, THEIRS))
    cpu, other_cpu = (
        statistics.median(sum(step) for step in zip(*(r.cpu_seconds[name] for r in results))) for name in (OURS, THEIRS)
    )
    cells = [f"{statistics.median(times) * 1e3:,.1f}" for times in (own, other)]
    cells += [f"{ratio:.3f}" for ratio in (*quartiles(own, other), cpu / other_cpu)]
    if plan.strategy.pp > len(os.sched_getaffinity(0)):
        return [*cells, *[""] * 5]
    floors = [floor_s(plan, traces) for traces in zip(*(r.traces for r in results))]
    cells += [f"{statistics.median(floors) * 1e3:,.1f}", *(f"{ratio:.3f}" for ratio in quartiles(own, floors))]
    return [*cells, f"{quartiles(other, floors)[1]:.3f}"]


TIME_HEADS = (
    "ours ms", "theirs ms", "ratio ¼", "ratio", "ratio ¾", "cpu", "floor ms", "/ floor ¼", "/ floor", "/ floor ¾",
    "theirs / floor",
)  # fmt: skip


class Stopwatch:
    """Sums the time inside of what it is put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: Any, name: str) -> None:
        """From now on also around this method or function, wherever it is called through its owner."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed_call)

    def take(self) -> float:
        """What was summed since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken


def measure_overhead(rank: int, ranks: int, meeting_file: str, task: Task) -> dict[str, list[float]]:
    """One rank, schedule after schedule: seconds per action of each step."""
    world = start(rank, ranks, meeting_file)
    inside = Stopwatch()
    for owner, name in (
        (torch.autograd, "backward"), (Product, "write"), (world[PP].transport, "send"), (world[PP].transport, "recv"),
    ):  # fmt: skip
        inside.around(owner, name)
    plans = {schedule: task.plan(schedule, ranks) for schedule in task.schedules}
    found = {schedule: overheads(plan, world, task, inside) for schedule, plan in plans.items()}
    mesh.stop()
    return found


def overheads(plan: Plan, world: mesh.Mesh, task: Task, inside: Stopwatch) -> list[float]:
    """One rank, one schedule."""
    ours, _ = contenders(plan, world)
    runner, row = ours.engine.parallel.runner, Stopwatch()
    for module in (*(stage.module for stage in runner._stages.values()), runner._loss):
        inside.around(module, "forward")
    row.around(runner, "run")
    found = []
    for turn in range(task.turns + WARM_UP):
        runner.trace = []
        barrier(world[WORLD])
        inside.take()
        world.ledger.take_waits()
        ours.step(*task.batch(turn))
        waited_s = sum(world.ledger.take_waits().values())
        found.append((row.take() - inside.take() - waited_s) / len(runner.trace))
    return found[WARM_UP:]


def overhead_row(results: Sequence[Sequence[float]]) -> list[str]:
    """Cells of one schedule: of the rank that takes most."""
    low, middle, high = max((statistics.quantiles(found, n=4) for found in results), key=lambda quarters: quarters[1])
    return [f"{seconds * 1e6:.1f}" for seconds in (low, middle, high)]


OVERHEAD_HEADS = ("µs per action ¼", "µs", "µs ¾")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S", "M"], choices=SIZES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--turns", type=int, default=8, help="measured steps of each contender")
    parser.add_argument("--micro-batches", type=int, default=8, help="sequences of a step")
    parser.add_argument("--what", nargs="+", default=["time", "overhead"], choices=["time", "overhead"])
    return parser.parse_args(arguments)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """What was asked for, table by table; the overhead always on the smallest size."""
    schedules = tuple(options.schedules)
    for label, ranks in product(options.sizes, options.ranks) if "time" in options.what else ():
        table = new_table("forwards and backwards of a step", TIME_HEADS)
        task = Task(SIZES[label], schedules, options.micro_batches, options.turns)
        results = on_ranks(measure, ranks, task)
        for schedule in schedules:
            cells = time_row(task.plan(schedule, ranks), [found[schedule] for found in results])
            table.add_row(label, str(ranks), schedule, *cells)
        yield table
    for ranks in options.ranks if "overhead" in options.what else ():
        table = new_table("the interpreter alone", OVERHEAD_HEADS)
        task = Task(SIZES["XS"], schedules, options.micro_batches, 4 * options.turns)
        results = on_ranks(measure_overhead, ranks, task)
        for schedule in schedules:
            table.add_row("XS", str(ranks), schedule, *overhead_row([found[schedule] for found in results]))
        yield table


def main() -> None:
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(width=max(165, Console().width))
    for table in tables(options):
        console.print(table)


if __name__ == "__main__":
    main()
