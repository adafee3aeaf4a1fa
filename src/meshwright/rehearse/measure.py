"""What the devices and links of a run reach, measured by all of its ranks at once.

    products          seconds of [m, k] × [k, n] by dtype and shape          a device's peak, and what training reaches
    streams           seconds to read two arrays and write one               memory bandwidth
    host              seconds of a copy to the host and back                 what an offloaded state passes
    attention         seconds of fused causal attention, by length           its rate over endless sequences, half keys
    calls             seconds of each collective by size, within a node      latency and bandwidth of both links
                      and across nodes, and of a message between two ranks
    overlap           products alone, and while an all-reduce runs           how much slower compute is beside traffic
    server            as a server multiplies and steps (measure_serving)     what decoding takes on CPU ranks

Ranks measure together, since in training they share cores, memory and links. Every figure is the median of its
repetitions, averaged over the ranks. `rehearse.calibrate` makes a cluster of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from meshwright.comm.collectives import all_gather, all_reduce, all_reduce_start, barrier, reduce_scatter
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.p2p import recv_start, send_start
from meshwright.core.axes import DP_ACROSS, DP_NODE, PP, WORLD
from meshwright.core.profile import Server
from meshwright.rehearse.measure_serving import measure_server

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = ((512, 512, 512), (1024, 1024, 1024), (1024, 3072, 768), (1024, 768, 3072), (2048, 256, 1024))
"""(m, n, k) of products: tokens of a micro-batch through layers of usual widths."""
GPU_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (8192, 1024, 8192))
LENGTHS = (256, 1024)
"""Tokens of sequences whose attention is timed."""
HEADS, HEAD_DIM = 4, 64
STREAM_NUMEL = 2**23
CALL_BYTES = (2**12, 2**16, 2**19, 2**22, 2**24)
MAX_REPEATS = 25
SLOW_SHARE = 50
"""A dtype whose first product is so many times slower than fp32's is measured no further."""


@dataclass(frozen=True, slots=True)
class Call:
    """One timed call."""

    primitive: str
    link: str
    """`intra`: within a node; `inter`: one rank on each node."""
    size: int
    """Ranks."""
    payload_bytes: int
    """As in :func:`meshwright.core.measures.wire_bytes`."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ranks found."""

    products: tuple[tuple[str, int, int, int, float], ...]
    """(dtype, m, n, k, seconds)."""
    stream_bytes_per_s: float
    host_bytes_per_s: float
    """Of copies to the host and back, one after the other."""
    attention: tuple[tuple[int, float], ...]
    """(tokens, seconds) of one sequence of `HEADS` heads in fp32 (on a GPU bf16), forward."""
    calls: tuple[Call, ...]
    overlap_slowdown: float
    server: Server = field(default_factory=Server)
    """Of CPU ranks."""


def measure(node_mesh: Mesh, line_mesh: Mesh, budget_s: float, told: Callable[[str], None]) -> Measured:
    """Time everything. Called by all ranks.

    Args:
        node_mesh: all ranks along dp, cut by nodes.
        line_mesh: all ranks along pp, which send to each other.
        budget_s: about how long each figure is repeated.
        told: gets what is being measured, in words.
    """
    stopwatch = _Stopwatch(node_mesh, budget_s)
    told("matrix products")
    products = tuple(_products(stopwatch))
    told("memory")
    stream, host = _stream_bytes_per_s(stopwatch), _host_bytes_per_s(stopwatch)
    told("attention")
    attention = tuple(_attention(stopwatch))
    calls: list[Call] = []
    for axis, link in ((node_mesh[DP_NODE], "intra"), (node_mesh[DP_ACROSS], "inter")):
        if axis.size > 1:
            told(f"collectives over {axis.size} ranks")
            calls += _collectives(stopwatch, axis, link)
    if line_mesh[PP].size > 1:
        told("messages")
        calls += _messages(stopwatch, line_mesh[PP], node_mesh[DP_NODE].size)
    told("compute beside traffic")
    slowdown = _overlap_slowdown(stopwatch, node_mesh[WORLD])
    server = Server()
    if not stopwatch.is_gpu:
        told("a server's products and steps")
        server = measure_server(node_mesh, stopwatch.seconds, stopwatch.mean)
    return Measured(products, stream, host, attention, tuple(calls), slowdown, server)


class _Stopwatch:
    """Times a call on all ranks at once."""

    def __init__(self, mesh: Mesh, budget_s: float) -> None:
        self.world, self.device, self._budget_s = mesh[WORLD], mesh.device, budget_s

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def seconds(self, call: Callable[[], object]) -> float:
        """Median of as many repetitions as the budget has room for, averaged over the ranks."""
        call()
        first_s = self.mean(self._once(call))
        repeats = max(3, min(MAX_REPEATS, int(self._budget_s / max(first_s, 1e-9))))
        return self.mean(statistics.median(self._once(call) for _ in range(repeats)))

    def _once(self, call: Callable[[], object]) -> float:
        self._wait()
        barrier(self.world)
        began_s = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - began_s

    def _wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def mean(self, seconds: float) -> float:
        """The same number on every rank."""
        total = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        return float(all_reduce(total, self.world)) / self.world.size


def _products(stopwatch: _Stopwatch) -> list[tuple[str, int, int, int, float]]:
    shapes, found = (GPU_SHAPES if stopwatch.is_gpu else SHAPES), []
    usual_s = 0.0
    for name in ("fp32", "fp64", "bf16", "fp16"):
        for at, (m, n, k) in enumerate(shapes):
            a = torch.ones(m, k, dtype=DTYPES[name], device=stopwatch.device)
            b = torch.ones(n, k, dtype=DTYPES[name], device=stopwatch.device)
            seconds = stopwatch.seconds(partial(F.linear, a, b))
            found.append((name, m, n, k, seconds))
            usual_s = seconds if name == "fp32" and at == 0 else usual_s
            if at == 0 and seconds > SLOW_SHARE * usual_s:
                break
    return found


def _stream_bytes_per_s(stopwatch: _Stopwatch) -> float:
    a, b, out = (torch.ones(STREAM_NUMEL, device=stopwatch.device) for _ in range(3))
    return 3 * a.nbytes / stopwatch.seconds(lambda: torch.add(a, b, out=out))


def _host_bytes_per_s(stopwatch: _Stopwatch) -> float:
    """Of a device's memory to pages of the host that it reaches by itself, as offloaded states lie, and back."""
    own = torch.ones(STREAM_NUMEL, device=stopwatch.device)
    away = torch.ones(STREAM_NUMEL, pin_memory=stopwatch.is_gpu)

    def there_and_back() -> None:
        away.copy_(own, non_blocking=True)
        own.copy_(away, non_blocking=True)

    return 2 * own.nbytes / stopwatch.seconds(there_and_back)


def _attention(stopwatch: _Stopwatch) -> list[tuple[int, float]]:
    dtype, found = torch.bfloat16 if stopwatch.is_gpu else torch.float32, []
    for length in LENGTHS:
        q = torch.ones(1, HEADS, length, HEAD_DIM, dtype=dtype, device=stopwatch.device)
        seconds = stopwatch.seconds(partial(F.scaled_dot_product_attention, q, q, q, is_causal=True))
        found.append((length, seconds))
    return found


def _collectives(stopwatch: _Stopwatch, axis: Axis, link: str) -> list[Call]:
    found = []
    for num_bytes in CALL_BYTES:
        whole = torch.ones(num_bytes // 4 // axis.size * axis.size, device=stopwatch.device)
        block = torch.ones(whole.numel() // axis.size, device=stopwatch.device)
        runs: Mapping[str, Callable[[], object]] = {
            "all_reduce": partial(all_reduce, whole, axis),
            "reduce_scatter": partial(reduce_scatter, block, whole, axis),
            "all_gather": partial(all_gather, whole, block, axis),
        }
        for primitive, run in runs.items():
            found.append(Call(primitive, link, axis.size, whole.nbytes, stopwatch.seconds(run)))
    return found


def _messages(stopwatch: _Stopwatch, line: Axis, per_node: int) -> list[Call]:
    """From the first rank to its neighbour, and to the first rank of the next node; there and back, halved."""
    found = []
    for link, other in (("intra", 1 if per_node > 1 else 0), ("inter", per_node if line.size > per_node else 0)):
        for num_bytes in CALL_BYTES if other else ():
            x = torch.ones(num_bytes // 4, device=stopwatch.device)
            seconds = stopwatch.seconds(partial(_there_and_back, x, line, other))
            found.append(Call("send", link, 2, x.nbytes, seconds * line.size / 2 / 2))
    return found


def _there_and_back(x: torch.Tensor, line: Axis, other: int) -> None:
    """Ranks that have no part return at once; so the mean over all ranks is two ranks' share of it."""
    if line.index == 0:
        send_start(x, line, other, 0).wait()
        recv_start(x, line, other, 1).wait()
    elif line.index == other:
        recv_start(x, line, 0, 0).wait()
        send_start(x, line, 0, 1).wait()


def _overlap_slowdown(stopwatch: _Stopwatch, world: Axis) -> float:
    """Of products while a large all-reduce is under way, over products alone."""
    if world.size == 1:
        return 1.0
    a = torch.ones(512, 512, device=stopwatch.device)
    traffic = torch.ones(CALL_BYTES[-1] // 4, device=stopwatch.device)

    def compute() -> None:
        for _ in range(4):
            a @ a

    def both() -> None:
        work = all_reduce_start(traffic, world)
        compute()
        work.wait()

    alone_s, call_s = stopwatch.seconds(compute), stopwatch.seconds(lambda: all_reduce(traffic, world))
    return max(1.0, min(2.0, (stopwatch.seconds(both) - max(0.0, call_s - alone_s)) / alone_s))
