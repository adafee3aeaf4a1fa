"""A command on ranks that are there already, as under torchrun: on the pool's, which need not start anew."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from meshwright.cli.main import main
from meshwright.comm import mesh
from meshwright.run.command import run_command
from tests.end_to_end.shell import OURS, Result

Change = Callable[[pytest.MonkeyPatch], None]
"""What is put in place of something before the command begins."""


def free_port() -> int:
    """Where the ranks of a command meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command_on_rank(rank: int, world: int, port: int, argv: Sequence[str], change: Change | None) -> Result:
    """What the command says on this rank. It meets the other ranks by itself, so the pool's own group ends first."""
    mesh.stop()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in [name for name in os.environ if name.startswith(OURS)]:
            patch.delenv(name)
        for name, value in {**place, "OMP_NUM_THREADS": 1, "COLUMNS": 140}.items():
            patch.setenv(name, str(value))
        if change is not None:
            change(patch)
        status = run_command(lambda: main(argv))
    return Result(status, out.getvalue(), err.getvalue())
