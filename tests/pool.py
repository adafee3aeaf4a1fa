"""A pool of worker processes for tests over ranks, started once per session.

    run_ranks(fn, world, *args) calls fn(rank, world, *args) on `world` workers that share a fresh
    gloo process group, and returns the results in order of rank.

`fn` is a top-level function: it is pickled by reference. Workers that failed, hung or died are
replaced, so that one broken test does not break the next.
"""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerProcess
from typing import Any

NUM_WORKERS = 8
_PRELOAD = ["torch", "torch.distributed", "pytest", "torch._dynamo", "meshwright.comm.p2p", "meshwright.run.parity"]
_GRACE_S = 5.0
"""How long the other ranks may take to notice that one has failed."""


class RanksFailed(Exception):
    """Some ranks raised, died or hung. `errors` maps rank → what happened."""

    def __init__(self, errors: dict[int, str]) -> None:
        # A rank that merely lost its peer says less than the rank that raised first.
        cause_first = sorted(errors, key=lambda rank: ("RankError" in errors[rank], rank))
        super().__init__("\n" + "\n".join(f"--- rank {rank} ---\n{errors[rank]}" for rank in cause_first))
        self.errors = errors


@dataclass(frozen=True)
class _Job:
    """What one worker is to do."""

    call: bytes
    """Pickled (fn, args)."""
    rank: int
    world: int
    meeting_file: str
    group_timeout_s: float


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    pipe: connection.Connection

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Workers, started when first needed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._workers: list[_Worker] = []
        self._num_jobs = 0

    def run_ranks(
        self,
        fn: Callable[..., Any],
        world: int,
        *args: Any,
        timeout_s: float = 60.0,
        group_timeout_s: float | None = None,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """Call fn(rank, world, *args) on every rank; the results in order.

        Args:
            timeout_s: the whole job.
            group_timeout_s: how long a collective waits for a rank; the job's time by default.
            may_die: ranks that the test kills or stops; they are not waited for, their result is None.

        Raises:
            RanksFailed: a rank raised, died or did not answer in time; with each rank's traceback.
        """
        call = pickle.dumps((fn, args))
        self._fill(world)
        self._num_jobs += 1
        meeting_file = os.path.join(self._folder.name, f"job{self._num_jobs}")
        for rank in range(world):
            job = _Job(call, rank, world, meeting_file, group_timeout_s or timeout_s)
            self._workers[rank].pipe.send_bytes(pickle.dumps(job))
        answers = self._collect(world, timeout_s, may_die)
        errors = {rank: text for rank, (ok, text) in answers.items() if not ok and rank not in may_die}
        if errors or may_die:
            self._replace(range(world))
        if errors:
            raise RanksFailed(errors)
        return [pickle.loads(answers[rank][1]) if answers[rank][0] else None for rank in range(world)]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._folder.cleanup()

    def _fill(self, world: int) -> None:
        if world > NUM_WORKERS:
            raise ValueError(f"{world} ranks asked for, the pool has {NUM_WORKERS} workers")
        if not self._workers:
            os.environ["OMP_NUM_THREADS"] = "1"
            get_context("forkserver").set_forkserver_preload(_PRELOAD)
        while len(self._workers) < world:
            self._workers.append(_start_worker())

    def _replace(self, ranks: Sequence[int]) -> None:
        """Kill these workers; new ones start at once, while the test goes on."""
        for rank in ranks:
            self._workers[rank].kill()
            self._workers[rank] = _start_worker()

    def _collect(self, world: int, timeout_s: float, may_die: Collection[int]) -> dict[int, tuple[bool, Any]]:
        """Rank → (True, pickled result) or (False, what happened)."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, tuple[bool, Any]] = {}
        while set(range(world)) - set(answers) - set(may_die):
            waiting = {self._workers[r].pipe: r for r in range(world) if r not in answers}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                answers[rank] = self._answer(rank)
                if not answers[rank][0] and rank not in may_die:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for rank in set(range(world)) - set(answers):
            answers[rank] = (False, f"RankError: no answer; the job had {timeout_s} s")
        return answers

    def _answer(self, rank: int) -> tuple[bool, Any]:
        worker = self._workers[rank]
        try:
            ok, value = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            worker.process.join(1.0)
            return False, f"the process died, exit code {worker.process.exitcode}"
        return ok, value


def _start_worker() -> _Worker:
    context = get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _serve(pipe: connection.Connection) -> None:
    """A worker's life: jobs in, answers out, until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        ok, value = _perform(job)
        pipe.send_bytes(pickle.dumps((ok, value)))
        if not ok:
            return  # the process ends, its sockets close, and the other ranks stop waiting for it


def _perform(job: _Job) -> tuple[bool, Any]:
    """Plain pickle on both ways: tensors travel by value, never by shared file descriptors."""
    from torch.distributed import barrier  # noqa: TID251 before there is a mesh

    from meshwright.comm import mesh

    try:
        fn, args = pickle.loads(job.call)
        mesh.start_local(job.meeting_file, job.rank, job.world, job.group_timeout_s)
        barrier()  # a rank that ends at once would leave others that still connect
        return True, pickle.dumps(fn(job.rank, job.world, *args))
    except BaseException:
        return False, traceback.format_exc()
    finally:
        gc.collect()  # an exception that fn caught may still hold the sockets for which others wait
        mesh.stop()
