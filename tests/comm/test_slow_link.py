"""The two nodes of `benchmarks/slow_link.py`: what they count, and that nothing of them stays behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_nodes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nodes", BENCHMARKS / "nodes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nodes"] = module
    spec.loader.exec_module(module)
    return module


nodes = load_nodes()
pytestmark = pytest.mark.skipif(sys.platform != "linux" or bool(nodes.missing()), reason="needs Linux, root, ip and tc")

HOLD = """
import nodes, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started all of this without it
with nodes.two_nodes(200) as pids:
    print(*pids, flush=True)
    time.sleep(60)
"""
SEND = """
import nodes, socket, sys
nodes.enter(int(sys.argv[1]))
before = nodes.counters()
with socket.socket(type=socket.SOCK_DGRAM) as sender:
    sender.sendto(bytes(1000), ("10.77.0.2", 9))
after = nodes.counters().since(before)
print(after.sent_bytes, after.packets)
"""


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_the_link_counts_what_leaves_a_node():
    """A datagram of 1000 bytes, and its headers of 42. The first one asks for the address too."""
    with nodes.two_nodes(200) as pids:
        _, second = (python(SEND, pids[0]).communicate()[0].split() for _ in range(2))
    assert second == ["1042", "1"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nodes_end_with_their_process(how):
    holder = python(HOLD)
    assert holder.stdout is not None
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    assert len(pids) == 2
    os.kill(holder.pid, how)
    holder.wait(10)
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}/ns/net") and is_cat(pid) for pid in pids):
        assert time.monotonic() < deadline, "the nodes are still there"
        time.sleep(0.05)
    holder.stdout.close()


def is_cat(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "cat"
    except OSError:
        return False
