"""Messages between two ranks of an axis. Both sides know shape and dtype; nothing but the data travels.

A send and its receive carry the same tag. Messages of one pair with the same tag arrive in order.
On GPUs there are no tags: a pair must post its messages in the same order on both sides.
"""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.mesh import Axis
from meshwright.comm.transports.gloo import FIRST_OWN_TAG
from meshwright.comm.work import Work, begin, begin_counted
from meshwright.core.errors import InputError


def send_start(x: Tensor, axis: Axis, to: int, tag: int) -> Work:
    """Send x (contiguous) to the rank at position `to`. One ledger row, primitive `send`.

    Raises:
        InputError: no such peer, or a tag outside [0, 2^24).
        RankError: here or in `wait`: the peer is lost.
    """
    _check("send", x, axis, to, tag)
    return begin_counted("send", axis, x.nbytes, lambda: axis.transport.send(x, to, tag))


def recv_start(out: Tensor, axis: Axis, source: int, tag: int) -> Work:
    """Receive into `out` (contiguous) from the rank at position `source`. Counted by the sender.

    Raises: as :func:`send_start`.
    """
    _check("receive", out, axis, source, tag)
    return begin("receive", axis, lambda: axis.transport.recv(out, source, tag))


def _check(what: str, x: Tensor, axis: Axis, peer: int, tag: int) -> None:
    if not 0 <= peer < axis.size or peer == axis.index:
        raise InputError(f"{what}: position {axis.index} of {axis} has no peer {peer}; it has {axis.size} positions")
    if not 0 <= tag < FIRST_OWN_TAG:
        raise InputError(f"{what}: tag {tag} is outside [0, {FIRST_OWN_TAG})")
    if not x.is_contiguous():
        raise InputError(f"{what} of shape {list(x.shape)}, strides {list(x.stride())}: tensors must be contiguous")
