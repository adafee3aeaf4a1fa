"""Text from a plain model, one token at a time. No key/value cache: each token costs a whole forward."""

from __future__ import annotations

from math import inf

import torch

from meshwright.core.errors import InputError
from meshwright.models.decoder import Decoder

MAX_SEED = 2**63


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Continue `tokens`; only the last `max_positions` (or sliding window) of them are looked at.

    Args:
        model: a whole model on one device.
        tokens: [1, s] token ids, s ≥ 1.
        max_new_tokens: how many to add.
        temperature: divides the logits; 0 takes the most likely token (the lowest id among equals).
        top_k: draw only among the k most likely tokens; None for all.
        seed: of the draws.

    Returns:
        [1, s + max_new_tokens] token ids.

    Raises:
        InputError: an empty prompt, a temperature, a `top_k` or a seed that is none; weights that are not finite.
    """
    if tokens.ndim != 2 or len(tokens) != 1 or tokens.shape[1] == 0:
        raise InputError(f"generate continues one prompt of at least one token [1, s], got {list(tokens.shape)}")
    if not 0 <= temperature < inf or (top_k is not None and top_k < 1):
        raise InputError(f"temperature must be at least 0 and top_k at least 1, got {temperature} and {top_k}")
    if not 0 <= seed < MAX_SEED:
        raise InputError(f"seed {seed}: a whole number from 0 to 2⁶³ − 1 was expected")
    spec = model.spec
    window = min(spec.max_positions, spec.sliding_window or spec.max_positions)
    generator = torch.Generator(tokens.device).manual_seed(seed)
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -window:])[:, -1]
        if not logits.isfinite().all():
            raise InputError("the model's output is not finite: its weights are spoilt; take an earlier checkpoint")
        tokens = torch.cat((tokens, _choose(logits, temperature, top_k, generator)), dim=1)
    return tokens


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    """[1, V] → [1, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float()
    logits = (logits - logits.max()) / max(temperature, torch.finfo(torch.float32).tiny)  # the likeliest is 0: no inf
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
