"""A trained run's model as a plain one, on one process: for generation and export."""

from __future__ import annotations

from meshwright.checkpoint import Piece, load
from meshwright.core.placement import Box
from meshwright.models.build import build
from meshwright.models.decoder import Decoder
from meshwright.parallel.states import DTYPES
from meshwright.run.folder import RunFolder


def restore_plain(run: RunFolder) -> Decoder:
    """The newest checkpoint's weights in a plain model, whatever layout wrote them.

    Raises:
        InputError, CheckpointError: no run, or no checkpoint in it.
    """
    plan = run.plan()
    model = build(plan.model, "cpu", DTYPES[plan.strategy.recipe.parameter])
    shapes = {p.name: p.shape for p in (*plan.model.parameters(), *plan.model.router_biases())}
    pieces = [
        Piece(f"parameters/{name}", shapes[name], Box.whole(shapes[name]), values) for name, values in model.stored()
    ]
    load(run.checkpoints, pieces)
    return model.eval()
