"""How much token data is copied while something runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("index", "gather", "scatter", "copy", "clone", "cat", "contiguous", "repeat")


class Copied(TorchDispatchMode):
    """Counts the elements of rows of `width` that operations of `COPIES` write; not what the network moves.

    Attributes:
        elements: so far.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_rows = isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] == self._width
        if is_rows and any(word in func.__name__ for word in COPIES):
            self.elements += out.numel()
        return out
