"""What a rank trains on: the unit of work, and the label that does not count."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""Label of a position that counts for nothing, as in `torch.nn.functional.cross_entropy`."""

MicroBatch: TypeAlias = "tuple[Tensor, Tensor]"
"""tokens [b, s] and labels [b, s], int64; labels[i, t] is the token after tokens[i, t], or IGNORE."""
