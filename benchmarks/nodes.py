"""Two nodes on one machine: network namespaces joined by a link of a chosen speed. Linux, as root.

    node a  ── 10.77.0.1 ══ tbf ══ 10.77.0.2 ──  node b

Each namespace is held by one process that waits for our end of a pipe, so that kernel and namespaces, addresses and
queues go with this process however it ends. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

INTERFACE = "between"
"""Name of the link's end in either node."""
_CLONE_NEWNET = 0x40000000
BURST_KIB = 256
"""More than the largest packet that TCP hands down (64 KiB), or the shaper would have to cut it."""
QUEUE_MS = 100


@dataclass(frozen=True)
class Counters:
    """What has left this node over the link."""

    sent_bytes: int
    """Headers of Ethernet, IP and TCP included."""
    packets: int

    def since(self, before: Counters) -> Counters:
        """The difference."""
        return Counters(self.sent_bytes - before.sent_bytes, self.packets - before.packets)


def missing() -> str | None:
    """Why nodes cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if tools:
        return f"`{tools[0]}` is not installed (iproute2, util-linux)"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "this machine does not allow network namespaces"
    return None


@contextlib.contextmanager
def two_nodes(
    mbit_per_s: float | None, burst_kib: int = BURST_KIB, queue_ms: int = QUEUE_MS
) -> Iterator[tuple[int, int]]:
    """Two processes, each in a network of its own, joined by a link of that speed in either direction (None: unshaped).

    What comes faster waits in a queue: of `burst_kib` it is let through at once, and what would wait for longer than
    `queue_ms` is dropped.

    Yields their process ids, for :func:`enter`. On leaving, both networks are gone.
    """
    with contextlib.ExitStack() as held:
        pids = held.enter_context(_holder()), held.enter_context(_holder())
        ends = [("name", INTERFACE, "netns", str(pid)) for pid in pids]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for index, pid in enumerate(pids):
            inside = ("nsenter", "--net", f"--target={pid}")
            _run(*inside, "ip", "address", "add", f"10.77.0.{index + 1}/24", "dev", INTERFACE)
            _run(*inside, "ip", "link", "set", INTERFACE, "addrgenmode", "none")  # no IPv6: nothing speaks unasked
            for name in ("lo", INTERFACE):
                _run(*inside, "ip", "link", "set", name, "up")
            if mbit_per_s is not None:
                shape = ("tbf", "rate", f"{mbit_per_s:g}mbit", "burst", f"{burst_kib}kb", "latency", f"{queue_ms}ms")
                _run(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
        yield pids


@contextlib.contextmanager
def _holder() -> Iterator[int]:
    """A process in a new network namespace; it ends when our end of its input closes, also if we are killed."""
    process = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(b"\n")
        process.stdin.flush()
        if not process.stdout.readline():  # the answer of `cat`: it is inside
            raise RuntimeError("no network namespace could be made")
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def enter(pid: int) -> None:
    """Move this thread, and those that it will start, to the network of a process; gloo is told to use the link."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def counters() -> Counters:
    """Of the node that this thread is in."""
    with open("/proc/thread-self/net/dev") as lines:
        fields = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:")).split(":")[1].split()
    return Counters(int(fields[8]), int(fields[9]))
