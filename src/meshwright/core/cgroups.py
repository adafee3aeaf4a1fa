"""What Linux control groups leave to this process: memory, and processor time as cores. Free of torch.

A group has at most what each group around it has, so the least counts, from the process's own group up to the root that
it sees. A container may see its group as the root, or be shown a path that it cannot reach: what is not there limits
nothing.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CONTROLLERS = ("", "memory", "cpu")
"""Folders of the mount: version 2 has all in one, version 1 a hierarchy for each."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    memory_bytes: int | None
    num_cores: float | None
    """Processor time as cores that are never idle."""


def limits(root: Path = Path("/")) -> Limits:
    """Of this process.

    Args:
        root: where `proc` and `sys` are.
    """
    groups = list(_groups(root))
    memories = [found for group in groups if (found := _memory_bytes(group)) is not None]
    shares = [share for group in groups if (share := _num_cores(group)) is not None]
    return Limits(min(memories, default=None), min(shares, default=None))


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the groups that this process is in, of both versions."""
    paths = dict.fromkeys(CONTROLLERS, PurePosixPath())
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if ".." not in path.split("/"):  # outside of what is mounted
            paths |= dict.fromkeys(controllers.split(","), PurePosixPath(path.lstrip("/")))
    for controller in CONTROLLERS:
        own = paths[controller]
        for inner in (own, *own.parents):
            yield root / "sys/fs/cgroup" / controller / inner


def _memory_bytes(group: Path) -> int | None:
    texts = (_read(group / name) for name in ("memory.max", "memory.limit_in_bytes"))
    return min((int(text) for text in texts if text and text.isdecimal()), default=None)


def _num_cores(group: Path) -> float | None:
    quota, _, period = (_read(group / "cpu.max") or "").partition(" ")
    if not period:
        quota, period = (_read(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
