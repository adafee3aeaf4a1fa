"""From a ModelSpec to a model."""

from __future__ import annotations

import torch

from meshwright.core.errors import UnsupportedError
from meshwright.core.model import ModelSpec
from meshwright.models.decoder import Decoder


def build(spec: ModelSpec, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder of this shape, without storage by default.

    On any other device the weights are allocated and NOT set: fill them with
    :func:`meshwright.models.init.initialize` or :func:`meshwright.models.hf.load`.

    Raises:
        UnsupportedError: ALiBi positions or a norm after the embedding.
    """
    missing = {
        "ALiBi positions": spec.positions == "alibi",
        "a norm after the embedding": spec.embedding_norm,
    }
    for feature, wanted in missing.items():
        if wanted:
            raise UnsupportedError(f"`{spec.name}` needs {feature}: it can be planned, not yet built")
    return Decoder(spec, device, dtype)
