"""Several documents in one sequence: who sees whom, and where learned positions begin again.

documents   0 0 0 1 1 2        mask   x . . . . .
positions   0 1 2 0 1 0               x x . . . .
                                      x x x . . .
                                      . . . x . .
                                      . . . x x .
                                      . . . . . x
"""

from __future__ import annotations

import torch

from meshwright.core.batch import Places


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Documents [b, s] → bool [b, query, key]: a key of the same document, and not a later one."""
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return same & torch.ones_like(same[0]).tril()


def position_ids(num_tokens: int, device: torch.device, places: Places | None) -> torch.Tensor:
    """Rows of a table of learned positions, [n] or, with documents, [b, n]: counted from the start of the document.

    Args:
        num_tokens: n, tokens of a sequence that are here.
        places: which ones, and of which documents; None: the first n of one document.
    """
    if places is None or places.documents is None:
        at = None if places is None else places.positions
        return torch.arange(num_tokens, device=device) if at is None else at
    documents, at = places.documents, torch.arange(places.length, device=device)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    within = at - (at * is_first).cummax(dim=1).values
    return within if places.positions is None else within[:, places.positions]
