"""What the ranks of the launch tests run: `python -m tests.run.rank_program HOW WHERE`."""

import os
import signal
import sys
import time
from pathlib import Path

from meshwright.run.command import run_command


def run_rank(how: str, where: Path) -> None:
    """Rank 1 fails as `how` says; the others wait until they are stopped."""
    rank = int(os.environ["RANK"])
    (where / f"pid-{rank}").write_text(str(os.getpid()))
    print(f"stdout of rank {rank}", flush=True)
    print(f"stderr of rank {rank}", file=sys.stderr, flush=True)
    if how == "well":
        (where / f"terminal-{rank}").write_text(str(sys.stdout.isatty()))
        (where / f"omp-{rank}").write_text(os.environ["OMP_NUM_THREADS"])
        return
    if how == "consequence" and rank == 0:
        raise RuntimeError("Connection closed by peer")
    if rank == 1:
        fail(how)
    time.sleep(120)


def fail(how: str) -> None:
    """End this rank in one of the ways that happen."""
    match how:
        case "error":
            raise ValueError("seven is not prime\nand more")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "aborted":
            print("free(): invalid size", file=sys.stderr, flush=True)
            os.abort()
        case "consequence":
            time.sleep(0.5)
            raise ValueError("the cause")


if __name__ == "__main__":
    raise SystemExit(run_command(lambda: run_rank(sys.argv[1], Path(sys.argv[2]))))
