"""Where a process stands, from nothing but a mapping of environment variables."""

import pytest

from meshwright.core.errors import InputError
from meshwright.run.environment import detect, expand_nodes, slurm_port

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-005,7]",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}


def test_torchrun_wins_over_slurm() -> None:
    world = detect(SRUN | TORCHRUN)
    assert world is not None
    assert (world.source, world.rank, world.world_size, world.local_rank) == ("torchrun", 5, 8, 1)
    assert world.variables() == TORCHRUN


def test_slurm_step() -> None:
    world = detect(SRUN)
    assert world is not None
    assert (world.source, world.rank, world.world_size, world.local_rank) == ("slurm", 9, 16, 1)
    assert world.master_address == "gpu003"
    assert world.variables()["MASTER_PORT"] == str(slurm_port(SRUN))


def test_slurm_step_keeps_a_given_meeting_point() -> None:
    world = detect(SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert world is not None
    assert (world.master_address, world.master_port) == ("head", 1234)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "123456"},
        BATCH_SCRIPT,
        BATCH_SCRIPT | {"SLURM_NTASKS": "1"},
        SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # the shell of an interactive allocation
        {"RANK": "0"},
    ],
)
def test_neither(variables: dict[str, str]) -> None:
    assert detect(variables) is None


def test_all_tasks_of_a_step_agree_on_the_port() -> None:
    ports = {slurm_port(SRUN | {"SLURM_PROCID": str(rank)}) for rank in range(16)}
    assert len(ports) == 1
    assert all(15000 <= slurm_port({"SLURM_JOB_ID": str(job)}) < 32000 for job in (0, 1, 99_999, 4_000_000_000))
    assert slurm_port(SRUN) != slurm_port(SRUN | {"SLURM_STEP_ID": "1"})


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("node[003-005,7]", ["node003", "node004", "node005", "node7"]),
        ("a,b[1-2],c-3", ["a", "b1", "b2", "c-3"]),
        ("rack[1-2]n[08-10]x", [f"rack{r}n{n}x" for r in (1, 2) for n in ("08", "09", "10")]),
        ("node[9-11]", ["node9", "node10", "node11"]),
    ],
)
def test_expand_nodes(nodes: str, hosts: list[str]) -> None:
    assert list(expand_nodes(nodes)) == hosts


@pytest.mark.parametrize("nodes", ["node[1-2", "node[a-b]", "node[1-]"])
def test_bad_node_list_is_one_clear_line(nodes: str) -> None:
    with pytest.raises(InputError, match="node list"):
        list(expand_nodes(nodes))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"RANK": "8"}, "rank 8 of 8"), ({"RANK": "x"}, "RANK: `x`"), ({"MASTER_PORT": ""}, "MASTER_PORT")],
)
def test_contradictions_are_errors(change: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        detect(TORCHRUN | change)
