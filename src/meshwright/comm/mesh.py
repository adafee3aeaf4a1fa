"""Mesh: named axes over the ranks of a run.

Ranks lie in the order of :mod:`meshwright.core.axes`, outermost axis first. The group of an axis
through a rank is the line of ranks that agree in all other coordinates:

    pp=2, dp=2, tp=2      tp  0-1  2-3  4-5  6-7       dp  0-2  1-3  4-6  5-7       pp  0-4  1-5  2-6  3-7

Nothing here is ambient: a mesh is a value that is passed by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import TypedDict

import torch
import torch.distributed as dist

from meshwright.comm.ledger import Ledger
from meshwright.comm.transports.alone import Alone
from meshwright.comm.transports.base import Transport
from meshwright.comm.transports.gloo import Gloo
from meshwright.comm.transports.host import Host
from meshwright.comm.transports.nccl import Nccl
from meshwright.core.axes import (
    CP,
    DP,
    DP_ACROSS,
    DP_CP,
    DP_NODE,
    EDP,
    EP,
    ETP,
    HEADS_AXES,
    MESH_ORDER,
    PP,
    PP_ENDS,
    PP_MIRROR,
    TP,
    TP_KV,
    WORLD,
    coordinates_of,
    rank_of,
)
from meshwright.core.errors import InputError, RankError
from meshwright.core.sources import num_cores

DEFAULT_TIMEOUT_S = 300.0
MESSAGE_AXES = (PP, CP)
"""Axes along which ranks send to each other."""
Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups of global ranks, in the order in which every rank creates them."""


class SubAxes(TypedDict):
    """How axes are cut into parts: arguments of :meth:`Mesh.create` and of :func:`axis_groups`, explained there."""

    kv_replicas: int
    dp_local: int
    tensor: Sequence[tuple[str, int]]
    ep: int
    etp: int | None
    pp_ends: tuple[int, int]
    pp_mirrored: bool


def start(device: str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Join the run that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Without these variables the run is this one process. Does nothing where a default process
    group already stands.

    Args:
        device: `cpu` (gloo) or `cuda` (nccl, on the GPU numbered LOCAL_RANK).
        timeout_s: how long a collective waits for a rank that lives but does not come.

    Raises:
        InputError: an unknown device, or GPUs that are not there.
        RankError: the other ranks were not found.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"device `{device}` is not known; use `cpu` or `cuda`")
    if device == "cuda":
        _choose_gpu()
    if dist.is_initialized():
        return
    backend, timeout = ("gloo" if device == "cpu" else "nccl"), timedelta(seconds=timeout_s)
    if "WORLD_SIZE" not in os.environ:
        if torch.get_num_threads() > num_cores():  # PyTorch knows nothing of a control group's share
            torch.set_num_threads(num_cores())
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        # A restarted worker must not read the addresses that its predecessor left in the store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"meshwright/{attempt}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {rank} of {size} found no other ranks: {brief(error)}") from error


def start_local(meeting_file: str, rank: int, size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Join a run of `size` CPU processes of this host that meet in a new file; needs no environment.

    Raises RankError where the other ranks were not found.
    """
    try:
        store = dist.FileStore(meeting_file, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RankError(f"rank {rank} of {size} found no other ranks: {brief(error)}") from error


def _choose_gpu() -> None:
    local, have = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= have:
        raise InputError(f"local rank {local} needs its own GPU, and this host has {have}; use device `cpu`")
    torch.cuda.set_device(local)


def stop() -> None:
    """Leave the run. Does nothing where none stands."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the mesh as one rank sees it: the group of ranks that it talks to along this axis."""

    name: str
    size: int
    index: int
    """This rank's position within the group."""
    ranks: tuple[int, ...]
    """Global ranks of the group, in order of position."""
    transport: Transport
    group: dist.ProcessGroup | None
    """For libraries that take a process group; None where size is 1."""
    device: torch.device
    ledger: Ledger

    def __str__(self) -> str:
        return f"axis `{self.name}` (ranks {', '.join(map(str, self.ranks))})"


@dataclass(frozen=True, eq=False)
class Mesh:
    """All axes of one rank. `mesh["tp"]` is its tensor-parallel group."""

    rank: int
    sizes: dict[str, int]
    """Size of every axis of `core.axes.MESH_ORDER`."""
    coordinates: dict[str, int]
    axes: dict[str, Axis]
    device: torch.device
    ledger: Ledger

    @classmethod
    def create(
        cls,
        sizes: Mapping[str, int],
        *,
        kv_replicas: int = 1,
        dp_local: int | None = None,
        tensor: Sequence[tuple[str, int]] = (),
        ep: int = 1,
        etp: int | None = None,
        pp_ends: tuple[int, int] | None = None,
        pp_mirrored: bool = False,
        ledger: Ledger | None = None,
        shared_memory: bool = True,
    ) -> Mesh:
        """The mesh of this run. Called by every rank, with the same arguments.

        Args:
            sizes: axis → number of ranks; axes that are left out have one.
            kv_replicas: ranks of a tp group, or of a grid's axis that cuts heads, that hold the same key/value heads
                (axis `tp_kv`).
            dp_local: consecutive ranks of a dp × cp group that share a node (axes `dp_node`, `dp_across`); None: all.
            tensor: sub-axes of tp and their sizes, outermost first (`core.layouts.Grid.axes`).
            ep: ranks of a stage that share the experts of a layer, `etp` apart (axes `ep`, `edp`).
            etp: neighbours of a stage that share each expert's width (axis `etp`); None: as many as tp. The three axes
                are there where ep is more than one, or etp other than tp.
            pp_ends: pipeline ranks that hold the two ends of the model (axis `pp_ends`); None: the first and the last.
            pp_mirrored: whether the ranks r and p−1−r of a pipeline hold the same stages (axis `pp_mirror`).
            ledger: where calls are counted; a new one by default.
            shared_memory: CPU ranks of one host reduce, gather and send along `pp` through shared memory, not sockets.

        Raises:
            InputError: the product of the sizes is not the number of ranks, an unknown axis, or an axis that cannot
                be cut into groups of `kv_replicas`, `dp_local`, `tensor`, or `ep` × `etp`.
        """
        full = _checked_sizes(sizes, kv_replicas, dp_local, tensor, ep, etp)
        rank, device = (dist.get_rank() if dist.is_initialized() else 0), _device()
        ledger = ledger or Ledger()
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        transports: dict[tuple[int, ...], Transport] = {}
        axes = {}
        for name, lines in axis_groups(full, kv_replicas, dp_local, tensor, ep, etp, pp_ends, pp_mirrored).items():
            _create_groups(lines, prod(full.values()), groups)
            ranks = next(line for line in lines if rank in line)
            group = groups[ranks]
            transport = transports.setdefault(ranks, _transport(group, device, shared_memory))
            axes[name] = Axis(name, len(ranks), ranks.index(rank), ranks, transport, group, device, ledger)
        for name in MESSAGE_AXES:
            if isinstance(transport := axes[name].transport, Host):
                transport.meet_for_messages()
        return cls(rank, full, coordinates_of(rank, full), axes, device, ledger)

    def close(self) -> None:
        """Give up the groups of the axes, with their threads and sockets; the run goes on. The mesh is not used again.

        Every rank closes it, after its last call on any axis. Leaving the run (:func:`stop`) does the same.
        """
        for group in {id(axis.group): axis.group for axis in self.axes.values()}.values():
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def __getitem__(self, axis: str) -> Axis:
        try:
            return self.axes[axis]
        except KeyError:
            raise InputError(f"`{axis}` is not an axis of the mesh; it has {', '.join(self.axes)}") from None


def axis_groups(
    sizes: Mapping[str, int],
    kv_replicas: int = 1,
    dp_local: int | None = None,
    tensor: Sequence[tuple[str, int]] = (),
    ep: int = 1,
    etp: int | None = None,
    pp_ends: tuple[int, int] | None = None,
    pp_mirrored: bool = False,
) -> dict[str, Groups]:
    """Axis → all its groups. Every rank stands in exactly one group of each axis."""
    sizes = {axis: sizes.get(axis, 1) for axis in MESH_ORDER}
    groups = {axis: _lines(axis, sizes) for axis in MESH_ORDER}
    groups[DP_CP] = _joined(sizes)
    local = dp_local or sizes[DP] * sizes[CP]
    groups[DP_NODE] = tuple(part for line in groups[DP_CP] for part in _parts(line, local))
    groups[DP_ACROSS] = tuple(line[at::local] for line in groups[DP_CP] for at in range(local))
    heads_stride = 1
    for axis, stride, size in _sub_axes(tensor):
        groups[axis] = tuple(part for line in groups[TP] for part in _strided(line, stride, size))
        heads_stride = stride if axis in HEADS_AXES else heads_stride
    groups |= _expert_groups(sizes, ep, etp or sizes[TP])
    groups[TP_KV] = tuple(part for line in groups[TP] for part in _strided(line, heads_stride, kv_replicas))
    ends = pp_ends or (0, sizes[PP] - 1)
    mirrored = [(at, sizes[PP] - 1 - at) for at in range((sizes[PP] + 1) // 2)] if pp_mirrored else []
    groups[PP_ENDS] = tuple(part for line in groups[PP] for part in _paired(line, [ends]))
    groups[PP_MIRROR] = tuple(part for line in groups[PP] for part in _paired(line, mirrored))
    groups[WORLD] = (tuple(range(prod(sizes[axis] for axis in MESH_ORDER))),)
    return groups


def _expert_groups(sizes: Mapping[str, int], ep: int, etp: int) -> dict[str, Groups]:
    """Of each stage's ranks: etp neighbours, ep of such neighbours, and those that hold the same; nothing where experts
    lie as all else does."""
    if ep == 1 and etp == sizes[TP]:
        return {}
    size = sizes[DP] * sizes[CP] * sizes[TP]
    stages = [tuple(range(start, start + size)) for start in range(0, prod(sizes.values()), size)]
    return {
        ETP: tuple(part for stage in stages for part in _parts(stage, etp)),
        EP: tuple(part for stage in stages for part in _strided(stage, etp, ep)),
        EDP: tuple(part for stage in stages for part in _strided(stage, etp * ep, size // (etp * ep))),
    }


def _lines(axis: str, sizes: Mapping[str, int]) -> Groups:
    """The groups of ranks that differ in their coordinate on `axis` only."""
    starts = (rank for rank in range(prod(sizes.values())) if coordinates_of(rank, sizes)[axis] == 0)
    return tuple(
        tuple(rank_of({**coordinates_of(start, sizes), axis: at}, sizes) for at in range(sizes[axis]))
        for start in starts
    )


def _joined(sizes: Mapping[str, int]) -> Groups:
    """The groups of ranks that differ in their coordinates on dp and cp only."""
    together = prod(sizes[axis] for axis in (DP, CP, TP))
    firsts = (start + tp for start in range(0, prod(sizes.values()), together) for tp in range(sizes[TP]))
    return tuple(tuple(range(first, first + together, sizes[TP])) for first in firsts)


def _sub_axes(axes: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    """(axis, ranks from one member to the next, size), except the whole of tp."""
    stride = 1
    for axis, size in reversed(axes):
        if axis != TP:
            yield axis, stride, size
        stride *= size


def _strided(line: tuple[int, ...], stride: int, size: int) -> Groups:
    """Groups of `size` ranks, `stride` apart."""
    blocks = _parts(line, stride * size)
    return tuple(block[at::stride] for block in blocks for at in range(stride))


def _parts(line: tuple[int, ...], size: int) -> Groups:
    """Neighbours by `size`."""
    return tuple(line[at : at + size] for at in range(0, len(line), size))


def _paired(line: tuple[int, ...], pairs: Iterable[tuple[int, int]]) -> Groups:
    """The ranks at these positions together; every other rank by itself."""
    together = [tuple(line[at] for at in sorted(set(pair))) for pair in pairs]
    paired = {rank for group in together for rank in group}
    return (*together, *((rank,) for rank in line if rank not in paired))


def _checked_sizes(
    sizes: Mapping[str, int],
    kv_replicas: int,
    dp_local: int | None,
    tensor: Sequence[tuple[str, int]],
    ep: int,
    etp: int | None,
) -> dict[str, int]:
    unknown = [axis for axis in sizes if axis not in MESH_ORDER]
    if unknown:
        raise InputError(f"`{unknown[0]}` is not an axis of the mesh; sizes are given for {', '.join(MESH_ORDER)}")
    full = {axis: sizes.get(axis, 1) for axis in MESH_ORDER}
    product, world = prod(full.values()), dist.get_world_size() if dist.is_initialized() else 1
    if product != world:
        factors = " × ".join(f"{axis}={size}" for axis, size in full.items())
        raise InputError(f"{factors} = {product} ranks, but this run has {world}; start {product} ranks")
    together = ep * (etp or full[TP])
    if full[DP] * full[CP] * full[TP] % together:
        ranks = f"dp={full[DP]} × cp={full[CP]} × tp={full[TP]} ranks"
        raise InputError(f"{ranks} cannot form groups of {together} that share experts")
    if full[TP] % kv_replicas:
        raise InputError(f"tp={full[TP]} ranks cannot form groups of {kv_replicas} key/value replicas")
    data = full[DP] * full[CP]
    if dp_local is not None and (dp_local < 1 or data % dp_local):
        raise InputError(f"dp={data} ranks cannot lie evenly on nodes with {dp_local} of them; dp_local divides dp")
    if tensor and prod(size for _, size in tensor) != full[TP]:
        raise InputError(f"tp={full[TP]} ranks do not fill a grid of {' × '.join(f'{a}={n}' for a, n in tensor)}")
    return full


def _device() -> torch.device:
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _create_groups(lines: Groups, world: int, groups: dict[tuple[int, ...], dist.ProcessGroup | None]) -> None:
    """Add what is missing. All ranks create all groups in the same order, also those they are not in."""
    for ranks in lines:
        if ranks in groups:
            continue
        if len(ranks) == 1:
            groups[ranks] = None
        elif len(ranks) == world:
            groups[ranks] = dist.group.WORLD
        else:
            groups[ranks] = dist.new_group(list(ranks), timeout=_timeout_of(dist.group.WORLD))


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """How long this group waits for a rank. `new_group` by itself would fall back to 30 minutes."""
    assert group is not None
    timeout: timedelta = group._get_backend(_device()).options._timeout
    return timeout


def _transport(group: dist.ProcessGroup | None, device: torch.device, shared_memory: bool) -> Transport:
    if group is None:
        return Alone()
    if device.type == "cuda":
        return Nccl(group)
    return Host(group, _timeout_of(group).total_seconds()) if shared_memory else Gloo(group)


def brief(error: Exception) -> str:
    """What a backend's error says, without its source file and its general advice."""
    first_line = str(error).strip().split("\n")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first_line).split(". This is typically")[0]
