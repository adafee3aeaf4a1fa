"""Attention of one sequence over several ranks, ours beside PyTorch's, and a long sequence that is really trained.

    python benchmarks/context.py [--ranks 2 4] [--seq 4096] [--heads 8] [--kv-heads 8] [--turns 5]
    python benchmarks/context.py --train 32768 [--ranks 4]

All contenders take turns in one process group; who is first rotates. A turn is forward and backward of attention alone
(fp32, head dim 64, one thread per rank), and lasts until its slowest rank has done it.

    ring, ring-self-attention, ulysses    ours, with each balance
    torch                                 `torch.distributed.tensor.experimental.context_parallel`, where it runs
    alone                                 the whole sequence on every rank by itself: no rank waits for another
    alone, dropout                        likewise, a tenth of its probabilities dropped, by our masks

`sent MB` is what a rank sends, by the ledger, in 10^6 bytes; `moved ms` is what these messages take by themselves,
waited for one by one, with nothing to compute beside them; `waited ms` is what a rank stands still for messages that it
has started, on average over the ranks; `hidden` is 1 - waited / moved. What a rank waits for the others to come counts
as waited, so that where more ranks than cores take turns, or ranks have unequal work, it can't be told: then the cell
is empty.

With --train a small model (`describe` prints it) trains on sequences of that length; printed is each rank's peak memory
by the operating system.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from contenders import LEARNING_RATE, Size, make_plan, rounds
from rich.console import Console
from rich.table import Table

from meshwright.comm import collectives
from meshwright.comm import mesh as meshes
from meshwright.comm.collectives import barrier
from meshwright.comm.mesh import Axis, Mesh
from meshwright.core.batch import Places
from meshwright.core.layouts import Context
from meshwright.core.measures import Traffic
from meshwright.core.strategy import Strategy
from meshwright.core.tokens import positions
from meshwright.models.attention import AttentionCore
from meshwright.models.build import build
from meshwright.parallel.context import local
from meshwright.parallel.context.apply import ContextCore, WholeCore
from meshwright.parallel.context.ring import Belt
from meshwright.parallel.dropout import Dropped
from meshwright.run.engine import parallelize

HEAD_DIM = 64
KINDS = ("ring", "ring-self-attention", "ulysses")
Turn = Callable[[], None]


def ours(context: Context, axis: Axis, options: argparse.Namespace) -> Turn:
    """Forward and backward of this rank's tokens."""
    table = torch.tensor(positions(context.balance, options.seq, axis.size, axis.index))
    core, places = ContextCore(WholeCore(AttentionCore()), context, axis), Places(options.seq, table)
    q, k, v, grad = random_inputs(options, len(table))

    def turn() -> None:
        core(q, k, v, places).backward(grad)
        q.grad = k.grad = v.grad = None

    return turn


def random_inputs(options: argparse.Namespace, num_tokens: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, laid out as a model has them."""
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    made = [torch.randn(1, num_tokens, count, HEAD_DIM).transpose(1, 2) for count in heads]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def alone(options: argparse.Namespace) -> Turn:
    """The whole sequence on one rank."""
    core, (q, k, v, grad) = AttentionCore(), random_inputs(options, options.seq)
    return lambda: core(q, k, v).backward(grad)


def alone_dropping(options: argparse.Namespace) -> Turn:
    """Likewise, with dropout of probabilities."""
    q, k, v, grad = random_inputs(options, options.seq)
    dropped = Dropped(torch.tensor([1]), torch.arange(options.heads), 0.1)
    return lambda: local.attention(q, k, v, None, dropped).backward(grad)


def torchs(axis: Axis, options: argparse.Namespace) -> Turn:
    """PyTorch's own, with its default load balance."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: TID251 (a peer)
    from torch.distributed.tensor.experimental import context_parallel  # noqa: TID251 (a peer)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cpu", (axis.size,))

    def turn() -> None:
        q, k, v, grad = (x.detach().contiguous() for x in random_inputs(options, options.seq))
        with context_parallel(mesh, buffers=[q, k, v, grad], buffer_seq_dims=[2] * 4):
            parts = [x.clone().requires_grad_() for x in (q, k, v)]
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(*parts, is_causal=True).backward(grad)

    return turn


def measure(rank: int, world: int, file: str, options: argparse.Namespace) -> dict[str, Any]:
    """One rank: seconds per turn of each contender, bytes sent, and what did not run."""
    meshes.start_local(file, rank, world)
    torch.manual_seed(rank)
    mesh = Mesh.create({"cp": world})
    axis = mesh["cp"]
    turns: dict[str, Turn] = {"alone": alone(options), "alone, dropout": alone_dropping(options)}
    for kind, balance in product(KINDS, ("contiguous", "zigzag", "striped")):
        turns[f"{kind} {balance}"] = ours(Context(kind=kind, degree=world, balance=balance), axis, options)
    found: dict[str, Any] = {what: {name: [] for name in turns} for what in ("times", "waited", "moved")} | {"sent": {}}
    try:
        turn = torchs(axis, options)
        turn()
        turns["torch"], found["times"]["torch"] = turn, []
    except Exception as error:
        found["torch"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for _, name, is_measured in rounds(list(turns), options.turns, warm_up=1):
        mesh.ledger.take()
        mesh.ledger.take_waits()
        seconds = _timed(turns[name], axis)
        sent, waited = mesh.ledger.take(), sum(mesh.ledger.take_waits().values())
        moved = _timed(lambda: _move(sent, axis), axis) if sent.rows else 0.0  # noqa: B023
        if is_measured:
            found["times"][name].append(seconds)
        if is_measured and sent.rows:
            found["waited"][name].append(waited)
            found["moved"][name].append(moved)
        found["sent"][name] = sum(row.wire_bytes for row in sent.rows.values())
    return found


def _move(sent: Traffic, axis: Axis) -> None:
    """The messages of a turn, waited for one by one."""
    for (primitive, _, _), row in sorted(sent.rows.items()):
        whole = torch.zeros(row.payload_bytes // row.calls // 4)
        for _ in range(row.calls):
            if primitive == "send":
                belt = Belt(axis, 0)
                belt.start(whole)[1].wait()
                belt.end()
            elif primitive == "reduce_scatter":
                collectives.reduce_scatter(torch.zeros(len(whole) // axis.size), whole, axis)
            else:
                collectives.all_to_all(torch.empty_like(whole), whole, axis)


def _timed(turn: Turn, axis: Axis) -> float:
    barrier(axis)
    began = time.perf_counter()
    turn()
    barrier(axis)
    return time.perf_counter() - began


def table(world: int, found: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Medians over turns, of the slowest rank in each."""
    title = f"{world} ranks, {options.seq} tokens, {options.heads} heads, {options.kv_heads} key/value heads"
    out = Table(title=title)
    for column in ("", "step ms", "alone / step", "sent MB", "moved ms", "waited ms", "hidden"):
        out.add_column(column, justify="right" if column else "left")

    def step_ms(name: str) -> float:
        return 1e3 * statistics.median(max(turn) for turn in zip(*(rank["times"][name] for rank in found), strict=True))

    def mean_ms(what: str, name: str) -> float:
        return 1e3 * statistics.mean(statistics.median(rank[what][name]) for rank in found)

    whole = step_ms("alone")
    for name in found[0]["times"]:
        step, sent = step_ms(name), max(rank["sent"][name] for rank in found) / 1e6
        cells = [f"{step:.1f}", f"{whole / step:.2f}", f"{sent:.2f}"]
        if sent:
            moved, waited = mean_ms("moved", name), mean_ms("waited", name)
            cells += [f"{moved:.1f}", f"{waited:.1f}", f"{1 - waited / moved:.2f}" if waited < moved else ""]
        out.add_row(name, *cells)
    if "torch" in found[0]:
        out.caption = f"torch: {found[0]['torch']}"
    return out


def train(rank: int, world: int, file: str, options: argparse.Namespace) -> tuple[float, float, float, int]:
    """One rank: loss before and after, seconds of a step, peak memory in bytes."""
    meshes.start_local(file, rank, world)
    size = Size(num_layers=2, hidden_size=128, vocab_size=2048, seq_length=options.train, batch_per_rank=1)
    strategy = Strategy(context=Context(kind="ring", degree=world, balance="zigzag"), zero=1)
    plan = make_plan(size, strategy)
    engine = parallelize(build(plan.model), plan, mesh=Mesh.create(strategy.sizes))
    tokens, labels = size.batch(0, 0)
    seconds, losses = 0.0, []
    for _ in range(2):
        began = time.perf_counter()
        losses.append(float(engine.step([(tokens, labels)], 10 * LEARNING_RATE).loss))
        seconds = time.perf_counter() - began
    return losses[0], losses[1], seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def on_ranks(run: Callable[..., Any], world: int, options: argparse.Namespace) -> list[Any]:
    """`run` on every rank, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(world, mp_context=context) as pool:
            jobs = [pool.submit(run, rank, world, os.path.join(folder, "meeting"), options) for rank in range(world)]
            return [job.result() for job in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--train", type=int, help="Train on sequences of so many tokens.")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for world in options.ranks:
        if options.train is None:
            Console(width=120).print(table(world, on_ranks(measure, world, options), options))
            continue
        for rank, (first, second, seconds, peak) in enumerate(on_ranks(train, world, options)):
            print(
                f"rank {rank} of {world}: loss {first:.4f} {second:.4f}, step {seconds:.1f} s, peak {peak / 1e9:.2f} GB"
            )


if __name__ == "__main__":
    main()
