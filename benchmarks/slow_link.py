"""Our training step beside DDP's and FSDP2's on two nodes that a slow link joins. Linux, as root.

    python benchmarks/slow_link.py [--size S] [--mbit 200 | --unshaped] [--turns 8] [--contenders zero-0 ...]

Two network namespaces of this machine, two ranks in each, are the nodes (`benchmarks/nodes.py`). All contenders take
turns in one process group, step by step, as in `benchmarks/train_step.py`; who is first rotates.

    ddp       DDP (gradients as bucket views), fused AdamW
    ddp-small the same with our buckets instead of its 25 MiB
    fsdp2     `fully_shard` of every layer and of the model, fused AdamW
    flat-0    ours, zero 0, told that all ranks share one node: one flat all-reduce
    zero-N    ours, zero N, on a cluster of 2 nodes × 2: two levels, which the plan chooses by itself
    kept-3    zero 3 with keep_gathered, and all blocks gathered ahead
    node-N    zero N with shard_over = "node"
    floor     forward, backward and fused AdamW of the plain model on all ranks at once, nothing sent, no clipping

Ours has buckets of 2 MiB (--bucket-mib), so that most of them leave while backward runs.

A step lasts until its slowest rank has done it. `ratio` is contender / ddp of the same turn (quartiles and median),
`/ fsdp2` the median of the same against fsdp2.

`link MB` is what left the fuller node in the median step, headers of Ethernet, IP and TCP taken off (66 bytes for each
packet that the link's end has counted), in 10^6 bytes. `forecast` is the forecast's rows across nodes, summed over the
node's ranks; the run's own ledger must equal it to the byte. `waited ms` is what a rank of ours stood still for
communication, median over turns, of the slowest rank. `rest` is the difference: gloo's frames, the scalars that
all ranks sum (counts, norm, loss) and the barriers around a step. `headers` is what was taken off.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import nodes
import torch
from contenders import SEED, SIZES, Ddp, Size, Step, fsdp2, make_plan, our_engine, our_step, quartiles, rounds, timed
from rich.console import Console
from rich.table import Table

from meshwright.comm import collectives, mesh
from meshwright.core.axes import DP_ACROSS, WORLD, coordinates_of
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.cost.traffic import traffic
from meshwright.models import init
from meshwright.models.build import build
from meshwright.run.engine import Engine

NUM_NODES, RANKS_PER_NODE = 2, 2
RANKS = NUM_NODES * RANKS_PER_NODE
BASE, FSDP2, DDP_SMALL, FLOOR = "ddp", "fsdp2", "ddp-small", "floor"
OURS = {
    "flat-0": Strategy(dp=RANKS),
    **{f"zero-{zero}": Strategy(dp=RANKS, zero=zero) for zero in (0, 1, 2, 3)},
    "kept-3": Strategy(dp=RANKS, zero=3, keep_gathered=True, prefetch=64),
    **{f"node-{zero}": Strategy(dp=RANKS, zero=zero, shard_over="node") for zero in (1, 3)},
}
"""Contender → how it splits; the cluster adds the levels."""
CONTENDERS = (DDP_SMALL, FSDP2, *OURS, FLOOR)
HEADER_BYTES = 66
"""Ethernet 14, IPv4 20, TCP 20 and its time stamps 12."""


@dataclass(frozen=True)
class Task:
    """What the ranks measure."""

    size: Size
    contenders: tuple[str, ...]
    turns: int
    clip: float | None
    bucket_mib: float
    pids: tuple[int, int]
    """The processes that hold the nodes."""


@dataclass
class Turns:
    """One contender on one rank, step by step."""

    seconds: list[float] = field(default_factory=list)
    sent: list[nodes.Counters] = field(default_factory=list)
    """What left this rank's node, barriers included."""
    waited_s: list[float] = field(default_factory=list)
    """Ours only: for communication."""


@dataclass(frozen=True)
class Result:
    """Of one rank."""

    turns: dict[str, Turns]
    forecast_bytes: dict[str, int]
    """Ours only: payload that this rank sends across nodes in a step. Its ledger has counted the same."""


def plan_of(size: Size, name: str, bucket_mib: float) -> Plan:
    """The plan of one of ours."""
    strategy = OURS[name].model_copy(update={"bucket_bytes": int(bucket_mib * 2**20)})
    return make_plan(size, strategy, num_nodes=1 if name.startswith("flat") else NUM_NODES)


def forecast_bytes(plan: Plan, rank: int) -> int:
    """What this rank sends across nodes in one step."""
    at = coordinates_of(rank, plan.strategy.sizes)
    return traffic(plan.model, plan.job, plan.strategy, at).by_axis().get(DP_ACROSS, 0)


def make_steps(task: Task, world: mesh.Mesh) -> tuple[dict[str, Step], dict[str, Engine]]:
    """Contender → its step, and ours → its engine; all from the same weights."""
    spec = task.size.spec()
    model = build(spec, "cpu")
    init.initialize(model, spec, SEED)
    plans = {name: plan_of(task.size, name, task.bucket_mib) for name in task.contenders if name in OURS}
    engines = {name: our_engine(plan, world, model, task.clip) for name, plan in plans.items()}
    steps: dict[str, Step] = {}
    if DDP_SMALL in task.contenders:
        steps[DDP_SMALL] = Ddp(copy.deepcopy(model), task.clip, task.bucket_mib).step
    if FSDP2 in task.contenders:
        steps[FSDP2] = fsdp2(copy.deepcopy(model), task.clip)
    for name, engine in engines.items():
        steps[name] = our_step(engine)
    ddp = Ddp(model, task.clip)
    if FLOOR in task.contenders:
        ddp.step(*task.size.batch(world.rank, 0))  # moments exist from here on
        steps[FLOOR] = ddp.floor(spec)
    return {BASE: ddp.step, **steps}, engines


def measure(rank: int, meeting_file: str, task: Task) -> Result:
    """One rank: enter its node, then all contenders in turn."""
    nodes.enter(task.pids[rank // RANKS_PER_NODE])
    torch.set_num_threads(1)
    mesh.start_local(meeting_file, rank, RANKS)
    world = mesh.Mesh.create({"dp": RANKS}, dp_local=RANKS_PER_NODE)
    steps, engines = make_steps(task, world)
    turns = take_turns(steps, engines, task, rank, world)
    forecast = {}
    for name, engine in engines.items():
        counted = engine.last_traffic.by_axis().get(DP_ACROSS, 0)
        forecast[name] = forecast_bytes(engine.plan, rank)
        assert counted == forecast[name], f"{name}: {counted:,} bytes across, forecast {forecast[name]:,}"
    mesh.stop()
    return Result(turns, forecast)


def take_turns(
    steps: dict[str, Step], engines: dict[str, Engine], task: Task, rank: int, world: mesh.Mesh
) -> dict[str, Turns]:
    """Contender → its measured steps; all ranks start a step together. The first round is not measured."""
    turns = {name: Turns() for name in steps}
    for turn, name, is_measured in rounds(list(steps), task.turns, warm_up=1):
        collectives.barrier(world[WORLD])
        before = nodes.counters()
        seconds, _ = timed(steps[name], task.size.batch(rank, turn), world)
        if is_measured:
            turns[name].seconds.append(seconds)
            turns[name].sent.append(nodes.counters().since(before))
            if name in engines:
                turns[name].waited_s.append(sum(engines[name].last_waits_s.values()))
    return turns


def run(task: Task) -> list[Result]:
    """All ranks."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(RANKS) as workers:
            jobs = [(rank, os.path.join(folder, "meet"), task) for rank in range(RANKS)]
            return workers.starmap(measure, jobs, chunksize=1)


def slowest(results: Sequence[Result], name: str) -> list[float]:
    """Seconds of each step."""
    return [max(seconds) for seconds in zip(*(result.turns[name].seconds for result in results))]


def sent(results: Sequence[Result], name: str) -> nodes.Counters:
    """What left the fuller node in its median step."""
    firsts = [results[node * RANKS_PER_NODE].turns[name].sent for node in range(NUM_NODES)]
    medians = [sorted(steps, key=lambda step: step.sent_bytes)[len(steps) // 2] for steps in firsts]
    return max(medians, key=lambda step: step.sent_bytes)


def crossing(results: Sequence[Result], name: str) -> int | None:
    """Forecast payload that leaves the fuller node; None of peers, and of a flat way, whose ring is gloo's choice."""
    if not results[0].forecast_bytes.get(name):
        return None
    per_rank = [result.forecast_bytes[name] for result in results]
    return max(sum(per_rank[at : at + RANKS_PER_NODE]) for at in range(0, RANKS, RANKS_PER_NODE))


def table_of(results: Sequence[Result], title: str) -> Table:
    """One row per contender."""
    table = Table(title=title)
    heads = (
        "median ms",
        "ratio ¼",
        "ratio",
        "ratio ¾",
        "/ fsdp2",
        "waited ms",
        "link MB",
        "forecast",
        "rest",
        "headers",
    )
    for head in ("step", *heads):
        table.add_column(head, justify="left" if head == "step" else "right")
    base = slowest(results, BASE)
    for name in results[0].turns:
        seconds, crossed, forecast = slowest(results, name), sent(results, name), crossing(results, name)
        headers = crossed.packets * HEADER_BYTES
        payload = crossed.sent_bytes - headers
        beside = f"{quartiles(seconds, slowest(results, FSDP2))[1]:.3f}" if FSDP2 in results[0].turns else ""
        waited = [statistics.median(r.turns[name].waited_s) for r in results if r.turns[name].waited_s]
        table.add_row(
            name,
            f"{statistics.median(seconds) * 1e3:,.0f}",
            *(f"{ratio:.3f}" for ratio in quartiles(seconds, base)),
            beside,
            f"{max(waited) * 1e3:,.0f}" if waited else "",
            f"{payload / 1e6:,.3f}",
            "" if forecast is None else f"{forecast / 1e6:,.3f}",
            "" if forecast is None else f"{(payload - forecast) / 1e6:,.3f}",
            f"{headers / 1e6:,.3f}",
        )
    return table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=SIZES)
    parser.add_argument("--turns", type=int, default=8, help="measured steps of each contender")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS, help="beside ddp")
    parser.add_argument("--bucket-mib", type=float, default=2.0, help="cap of our buckets of gradients (zero 0 and 1)")
    link = parser.add_mutually_exclusive_group()
    link.add_argument("--mbit", type=float, default=200.0, help="speed of the link, Mbit/s in either direction")
    link.add_argument("--unshaped", dest="mbit", action="store_const", const=None)
    parser.add_argument("--burst-kib", type=int, default=nodes.BURST_KIB, help="of the shaper: sent at once")
    parser.add_argument("--queue-ms", type=int, default=nodes.QUEUE_MS, help="of the shaper: longer waits are drops")
    clip = parser.add_mutually_exclusive_group()
    clip.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm, on all sides")
    clip.add_argument("--no-clip", dest="clip", action="store_const", const=None)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if (reason := nodes.missing()) is not None:
        raise SystemExit(f"slow_link: {reason}")
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with nodes.two_nodes(options.mbit, options.burst_kib, options.queue_ms) as pids:
        task = Task(
            SIZES[options.size], tuple(options.contenders), options.turns, options.clip, options.bucket_mib, pids
        )
        results = run(task)
    speed = "an unshaped link" if options.mbit is None else f"{options.mbit:g} Mbit/s"
    Console(width=max(130, Console().width)).print(table_of(results, f"{options.size}, 2 nodes × 2 ranks over {speed}"))


if __name__ == "__main__":
    main()
