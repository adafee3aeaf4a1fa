"""Which algorithm is fastest on gloo, per primitive and size; and that `comm` has chosen it.

    python benchmarks/collectives.py [--ranks 2 4] [--sizes 4K 1M 16M 64M] [--repeats 9]

Prints median milliseconds by size of the full buffer (fp32). All candidates of a primitive run
alternating in one process group, on one thread per rank. `sockets` and
`shared memory` are what `comm` does between hosts and on one host.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist  # noqa: TID251  the backend's own calls are what we compare with
from rich.console import Console
from rich.table import Table
from torch import Tensor

from meshwright.comm import collectives, mesh
from meshwright.comm.mesh import Axis
from meshwright.comm.p2p import recv_start, send_start

Timings = dict[tuple[str, str, int], float]
"""(primitive, algorithm, bytes) → median seconds."""
UNITS = {"K": 2**10, "M": 2**20}


def ring_all_gather(out: Tensor, x: Tensor, axis: Axis) -> None:
    """P−1 steps around the ring, each forwarding the block that came last."""
    blocks = out.tensor_split(axis.size)
    blocks[axis.index].copy_(x)
    to, source = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    for step in range(axis.size - 1):
        works = [
            recv_start(blocks[(axis.index - step - 1) % axis.size], axis, source, 0),
            send_start(blocks[(axis.index - step) % axis.size], axis, to, 0),
        ]
        for work in works:
            work.wait()


def exchange_blocks(out: Tensor, x: Tensor, axis: Axis) -> None:
    """All-to-all as one message per pair of ranks."""
    sent, received = x.tensor_split(axis.size), out.tensor_split(axis.size)
    received[axis.index].copy_(sent[axis.index])
    works = []
    for peer in range(axis.size):
        if peer != axis.index:
            works += [recv_start(received[peer], axis, peer, 1), send_start(sent[peer], axis, peer, 1)]
    for work in works:
        work.wait()


def exchange_all_reduce(x: Tensor, axis: Axis) -> None:
    """Reduce-scatter and all-gather, both by direct exchange."""
    own = x.tensor_split(axis.size)[axis.index]
    collectives.reduce_scatter(own, x, axis)
    collectives.all_gather(x, own, axis)


def exchange_reduce_scatter(out: Tensor, x: Tensor, axis: Axis) -> None:
    """Gloo's all-to-all and a local sum."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=axis.group)
    torch.sum(received.view(axis.size, -1), 0, out=out)


def candidates(axis: Axis, host: Axis, num_bytes: int) -> dict[tuple[str, str], Callable[[], object]]:
    """(primitive, algorithm) → one call."""
    full = torch.zeros(num_bytes // 4)
    block, whole = torch.zeros(full.numel() // axis.size), torch.empty_like(full)
    return {
        ("all_reduce", "shared memory"): lambda: collectives.all_reduce(full, host),
        ("all_reduce", "sockets"): lambda: collectives.all_reduce(full, axis),
        ("all_reduce", "gloo"): lambda: dist.all_reduce(full, group=axis.group),
        ("all_reduce", "two exchanges"): lambda: exchange_all_reduce(full, axis),
        ("reduce_scatter", "shared memory"): lambda: collectives.reduce_scatter(block, full, host),
        ("reduce_scatter", "sockets"): lambda: collectives.reduce_scatter(block, full, axis),
        ("reduce_scatter", "gloo"): lambda: dist.reduce_scatter_single(block, full, group=axis.group),
        ("reduce_scatter", "all-to-all + sum"): lambda: exchange_reduce_scatter(block, full, axis),
        ("all_gather", "shared memory"): lambda: collectives.all_gather(whole, block, host),
        ("all_gather", "sockets"): lambda: collectives.all_gather(whole, block, axis),
        ("all_gather", "gloo"): lambda: dist.all_gather_single(whole, block, group=axis.group),
        ("all_gather", "ring"): lambda: ring_all_gather(whole, block, axis),
        ("all_to_all", "shared memory"): lambda: collectives.all_to_all(whole, full, host),
        ("all_to_all", "sockets"): lambda: collectives.all_to_all(whole, full, axis),
        ("all_to_all", "exchange"): lambda: exchange_blocks(whole, full, axis),
    }


def measure(rank: int, world: int, meeting_file: str, sizes: list[int], repeats: int) -> Timings:
    """One rank's medians, the candidates alternating."""
    torch.set_num_threads(1)
    mesh.start_local(meeting_file, rank, world)
    axis = mesh.Mesh.create({"dp": world}, shared_memory=False)["dp"]
    host = mesh.Mesh.create({"dp": world})["dp"]
    medians: Timings = {}
    for num_bytes in sizes:
        calls = candidates(axis, host, num_bytes)
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(repeats):
            for key, call in calls.items():
                collectives.barrier(axis)
                began = time.perf_counter()
                call()
                seconds[key].append(time.perf_counter() - began)
        medians |= {(*key, num_bytes): statistics.median(values[1:]) for key, values in seconds.items()}
    mesh.stop()
    return medians


def run(world: int, sizes: list[int], repeats: int) -> Timings:
    """The slowest rank's medians."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(world) as workers:
        jobs = [(rank, world, os.path.join(folder, "meet"), sizes, repeats) for rank in range(world)]
        per_rank = workers.starmap(measure, jobs, chunksize=1)
    return {key: max(timings[key] for timings in per_rank) for key in per_rank[0]}


def table(world: int, sizes: list[int], timings: Timings) -> Table:
    """Rows: primitive and algorithm. The fastest of each primitive and size is marked."""
    drawn = Table(title=f"{world} ranks, ms")
    for head in ("primitive", "algorithm", *(f"{size // 1024:,} KB" for size in sizes)):
        drawn.add_column(head, justify="left" if head in ("primitive", "algorithm") else "right")
    for primitive, algorithm in dict.fromkeys(key[:2] for key in timings):
        cells = []
        for size in sizes:
            best = min(value for key, value in timings.items() if (key[0], key[2]) == (primitive, size))
            value = timings[primitive, algorithm, size]
            cells.append(f"{value * 1e3:.2f}{' *' if value == best else '  '}")
        drawn.add_row(primitive, algorithm, *cells)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["4K", "1M", "16M", "64M"])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = [int(text[:-1]) * UNITS[text[-1]] for text in options.sizes]
    for world in options.ranks:
        Console().print(table(world, sizes, run(world, sizes, options.repeats)))


if __name__ == "__main__":
    main()
