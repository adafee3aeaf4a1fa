"""Text from a trained run: its tokenizer, its newest weights on one process, and no cache."""

from __future__ import annotations

import torch

from meshwright.core.errors import InputError
from meshwright.models.generate import generate
from meshwright.run.folder import RunFolder
from meshwright.run.restore import restore_plain
from meshwright.train.prepare import load_prepared


def continue_text(
    run: RunFolder, prompt: str, max_tokens: int, temperature: float, top_k: int | None, seed: int
) -> str:
    """The prompt and its continuation.

    Args:
        max_tokens: tokens to add.
        temperature: 0 takes the likeliest token.
        top_k: choose among so many of the likeliest; None: among all.
        seed: of the choice.

    Raises:
        InputError: a prompt that is empty or no text, a temperature or seed that is none, or no run.
        CheckpointError: no checkpoint in it.
    """
    run.plan()
    if any(0xD800 <= ord(character) < 0xE000 for character in prompt):  # what Python makes of bytes that are no text
        raise InputError("the prompt is not valid UTF-8 text")
    tokenizer = load_prepared(run.data).tokenizer()
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise InputError("the prompt is empty; give --prompt some text")
    tokens = generate(restore_plain(run), torch.tensor([ids]), max_tokens, temperature, top_k, seed)
    return str(tokenizer.decode(tokens[0].tolist()))
