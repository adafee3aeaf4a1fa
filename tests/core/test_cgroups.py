"""Limits of control groups, from files of a machine that is not this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.cgroups import Limits, limits
from meshwright.core.sources import num_cores, this_machine

OWN = "proc/self/cgroup"
MEMORY, QUOTA, PERIOD = "memory.limit_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us"


def machine(root: Path, files: dict[str, str]) -> Path:
    """A root with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


V1 = "4:memory:/a/b\n2:cpu,cpuacct:/a\n1:name=systemd:/x\n0::/"
CASES = {
    "no groups": ({}, None, None),
    "no limits": ({OWN: "0::/", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/cpu.max": "max 100000"}, None, None),
    "a container": (
        {OWN: "0::/", "sys/fs/cgroup/memory.max": "4096", "sys/fs/cgroup/cpu.max": "150000 100000"}, 4096, 1.5,
    ),
    "a unit inside a slice": (
        {OWN: "0::/slice/unit", "sys/fs/cgroup/slice/unit/memory.max": "9000", "sys/fs/cgroup/slice/memory.max": "5000",
         "sys/fs/cgroup/slice/unit/cpu.max": "50000 100000", "sys/fs/cgroup/slice/cpu.max": "max 100000"}, 5000, 0.5,
    ),
    "a path that is not mounted": ({OWN: "0::/docker/77", "sys/fs/cgroup/memory.max": "4096"}, 4096, None),
    "a path outside": ({OWN: "0::/../else", "sys/fs/cgroup/memory.max": "4096"}, 4096, None),
    "version 1": (
        {OWN: V1, f"sys/fs/cgroup/memory/a/b/{MEMORY}": "8000", f"sys/fs/cgroup/memory/a/{MEMORY}": "7000",
         f"sys/fs/cgroup/cpu/a/{QUOTA}": "300000", f"sys/fs/cgroup/cpu/a/{PERIOD}": "100000"}, 7000, 3.0,
    ),
    "version 1 without limits": (
        {OWN: V1, f"sys/fs/cgroup/cpu/a/{QUOTA}": "-1", f"sys/fs/cgroup/cpu/a/{PERIOD}": "100000"}, None, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_limits(tmp_path: Path, case: str) -> None:
    files, memory_bytes, cores = CASES[case]
    assert limits(machine(tmp_path, files)) == Limits(memory_bytes, cores)


def test_a_process_uses_no_more_than_its_group_has(tmp_path: Path) -> None:
    files = {OWN: "0::/", "sys/fs/cgroup/memory.max": str(2**20), "sys/fs/cgroup/cpu.max": "30000 100000"}
    root = machine(tmp_path, files)
    found = this_machine(root)
    assert (found.num_cores, found.memory_bytes) == (1, 2**20)
    assert num_cores(tmp_path / "nothing") >= 1
