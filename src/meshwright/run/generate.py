"""Text from a trained run or a Hugging Face folder, on one process, by the engine that serves it."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.run.served import open_model
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams


def continue_text(path: Path, prompt: str, params: SamplingParams) -> str:
    """The prompt and its continuation.

    Args:
        path: of a training run, or a Hugging Face folder.
        params: how to go on; `max_tokens` is given.

    Raises:
        InputError: a prompt that is empty, no text or too long, or nothing to serve.
        CheckpointError: no checkpoint there, or a damaged one.
    """
    served = open_model(path)
    options = ServeOptions()
    longest = min(served.spec.max_positions, len(prompt.encode(errors="replace")) + 8 + (params.max_tokens or 0))
    engine = served.engine(options=options.model_copy(update={"num_blocks": -(-longest // options.block_size)}))
    if not prompt:
        raise InputError("the prompt is empty; give --prompt some text")
    (answer,) = engine.generate([prompt], params)[0]
    if answer.finish == "error":
        raise InputError("the model's output is not finite: its weights are spoilt; take an earlier checkpoint")
    return prompt + answer.text
