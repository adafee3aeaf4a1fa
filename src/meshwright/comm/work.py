"""Work: a call in flight. A rank that is lost shows here, as a RankError that says which call missed it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from meshwright.comm.mesh import Axis, brief
from meshwright.comm.transports.base import Handle
from meshwright.core.errors import RankError


class Work:
    """A started call. Its tensors may be read, changed or freed after `wait` only."""

    __slots__ = ("_axis", "_handle", "_phase", "_primitive")

    def __init__(self, handle: Handle | None, primitive: str, axis: Axis) -> None:
        self._handle, self._primitive, self._axis = handle, primitive, axis
        self._phase = axis.ledger.current_phase

    def wait(self) -> None:
        """Return when the result is there; on CUDA, when the current stream will see it.

        Raises:
            RankError: a rank of the group died, or did not come within the timeout.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return
        began_s = perf_counter()
        try:
            handle.wait()
        except RuntimeError as error:
            raise _lost(self._primitive, self._axis, error) from error
        self._axis.ledger.record_wait(self._phase, self._axis.name, perf_counter() - began_s)


def begin(primitive: str, axis: Axis, post: Callable[[], Handle]) -> Work:
    """Start a call. Raises RankError."""
    try:
        return Work(post(), primitive, axis)
    except RuntimeError as error:
        raise _lost(primitive, axis, error) from error


def begin_counted(
    primitive: str, axis: Axis, payload_bytes: int, post: Callable[[], Handle], sent_bytes: int | None = None
) -> Work:
    """Start a call and write its row in the ledger; `sent_bytes` where they do not follow from the payload.

    Raises RankError.
    """
    axis.ledger.record(primitive, axis.name, payload_bytes, axis.size, sent_bytes)
    return begin(primitive, axis, post)


def _lost(primitive: str, axis: Axis, error: RuntimeError) -> RankError:
    rank = axis.ranks[axis.index]
    return RankError(f"rank {rank}: {primitive} on {axis} failed, another of these ranks was lost: {brief(error)}")
