"""Where does this process stand: a rank of torchrun, a task of a Slurm step, or neither.

Pure functions over a mapping of environment variables. A Slurm allocation alone (a batch script, a
shell of `salloc`) starts one process, so it is "neither"; only `srun` with several tasks makes ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.core.errors import InputError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM_STEP = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")

FIRST_PORT, NUM_PORTS = 15000, 17000
"""Ports for the meeting point of a Slurm step: below the ephemeral range of Linux, which begins at 32768."""


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place among all ranks, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this machine; also the index of the device."""
    master_address: str
    master_port: int
    source: str
    """`torchrun` or `slurm`."""

    def variables(self) -> dict[str, str]:
        """The environment variables that `torch` reads to bring the ranks together."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def is_rank(variables: Mapping[str, str]) -> bool:
    """Whether :func:`detect` finds a world, or refuses one."""
    return any(all(name in variables for name in names) for names in (TORCHRUN, SLURM_STEP))


def detect(variables: Mapping[str, str]) -> World | None:
    """The world that the environment describes, or None where this process must start its own ranks.

    Args:
        variables: environment variables, for example `os.environ`.

    Raises:
        InputError: a variable is not a number, or rank and world size contradict each other.
    """
    if all(name in variables for name in TORCHRUN):
        return _checked(_from_torchrun(variables))
    if all(name in variables for name in SLURM_STEP) and _num_tasks(variables) > 1:
        return _checked(_from_slurm(variables))
    return None


def _from_torchrun(variables: Mapping[str, str]) -> World:
    return World(
        rank=_number(variables, "RANK"),
        world_size=_number(variables, "WORLD_SIZE"),
        local_rank=_number(variables, "LOCAL_RANK"),
        master_address=variables.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(variables, "MASTER_PORT", 29500),
        source="torchrun",
    )


def _from_slurm(variables: Mapping[str, str]) -> World:
    return World(
        rank=_number(variables, "SLURM_PROCID"),
        world_size=_num_tasks(variables),
        local_rank=_number(variables, "SLURM_LOCALID"),
        master_address=variables.get("MASTER_ADDR") or next(expand_nodes(variables["SLURM_STEP_NODELIST"])),
        master_port=_number(variables, "MASTER_PORT", slurm_port(variables)),
        source="slurm",
    )


def _num_tasks(variables: Mapping[str, str]) -> int:
    """Tasks of the step; SLURM_NTASKS alone may be that of the whole allocation."""
    return _number(variables, "SLURM_STEP_NUM_TASKS", _number(variables, "SLURM_NTASKS", 1))


def slurm_port(variables: Mapping[str, str]) -> int:
    """A port that all tasks of a step agree on and that steps of other jobs are unlikely to use."""
    job = _number(variables, "SLURM_JOB_ID", 0)
    step = _number(variables, "SLURM_STEP_ID", 0)
    return FIRST_PORT + (job * 13 + step) % NUM_PORTS


def expand_nodes(nodes: str) -> Iterator[str]:
    """Host names of a Slurm node list, in order: `n[01-02,7],gpu-a` → n01, n02, n7, gpu-a.

    Raises:
        InputError: a bracket that isn't closed, or a range that isn't one.
    """
    for part in re.split(r",(?![^\[]*\])", nodes):  # commas outside brackets
        yield from _expand(part, nodes)


def _expand(part: str, nodes: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", part)
    if match is None:
        if "[" in part or "]" in part:
            raise InputError(f"node list `{nodes}`: a bracket is not closed; write for example node[01-04,7]")
        yield part
        return
    before, ranges, after = match.groups()
    for number in _expand_ranges(ranges, nodes):
        for rest in _expand(after, nodes):
            yield f"{before}{number}{rest}"


def _expand_ranges(ranges: str, nodes: str) -> Iterator[str]:
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if match is None:
            raise InputError(f"node list `{nodes}`: `{item}` is not a number or a range such as 01-04")
        low, high = match.group(1), match.group(2) or match.group(1)
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise InputError(f"environment variable {name}: `{text}` is not a whole number") from None


def _checked(world: World) -> World:
    if 0 <= world.rank < world.world_size:
        return world
    raise InputError(
        f"{world.source} says rank {world.rank} of {world.world_size}; ranks go from 0 to {world.world_size - 1}"
    )
