"""What a user gives an engine is looked at before it is trained on: a wrong token would give a plausible loss.

On the host a token's value is read at once. On a GPU reading one would wait for all work before it, so there the
loss of a batch with a wrong token becomes nan, without waiting; a step whose loss is nan changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.core.batch import IGNORE, MicroBatch, documents_of
from meshwright.core.errors import InputError
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.units import counted


def check_planned(micro_batches: Sequence[MicroBatch], plan: Plan) -> None:
    """Raises InputError unless these are as many micro-batches of the size and length that the plan has for a rank."""
    strategy, length = plan.strategy, plan.job.seq_length
    planned = [[strategy.micro_batch_size, length]] * strategy.num_micro_batches
    given = [list(tokens.shape) for tokens, _ in micro_batches]
    if given != planned:
        shapes = ", ".join(map(str, dict.fromkeys(map(str, given)))) or "nothing"
        raise InputError(
            f"a step was given {counted(len(given), 'micro-batch', 'micro-batches')} of {shapes}, the plan has "
            f"{strategy.num_micro_batches} of {planned[0]}; for another step use forward_backward and update"
        )


def check_micro_batches(
    micro_batches: Sequence[MicroBatch], spec: ModelSpec, token_parts: int = 1
) -> torch.Tensor | None:
    """Refuse what the model cannot be trained on.

    Args:
        micro_batches: any number but none, each of any size, tokens and labels [b, s].
        token_parts: into how many equal parts the ranks divide the tokens of a sequence.

    Returns:
        on a GPU whether a value is out of range (bool scalar); None where the values were looked at here.

    Raises:
        InputError: no micro-batch, shapes or dtypes that do not belong together, values outside the vocabulary.
        UnsupportedError: sequences longer than the model's window.
    """
    if not micro_batches:
        raise InputError("no micro-batches were given; give at least one")
    for index, micro_batch in enumerate(micro_batches):
        tokens, labels = micro_batch
        _check_form(index, tokens, labels, spec)
        _check_documents(index, tokens, documents_of(micro_batch))
        if tokens.shape[1] % token_parts:
            filled = -(-tokens.shape[1] // token_parts) * token_parts
            raise InputError(
                f"micro-batch {index} has sequences of {tokens.shape[1]} tokens, which {token_parts} ranks cannot "
                f"divide evenly; fill them up to {filled} (labels {IGNORE}), or take a plan that does not divide them"
            )
    wrong = [_out_of_range(tokens, labels, spec.vocab_size) for tokens, labels in micro_batches]
    found = torch.stack(wrong)
    if found.device.type != "cpu":
        return found.any()
    if bool(found.any()):
        index = int(found.nonzero()[0])
        _raise_out_of_range(index, *micro_batches[index], spec)
    return None


def _check_form(index: int, tokens: torch.Tensor, labels: torch.Tensor, spec: ModelSpec) -> None:
    for name, values in (("tokens", tokens), ("labels", labels)):
        if values.dtype != torch.int64:
            raise InputError(f"{name} of micro-batch {index} are {values.dtype}; whole numbers (int64) are needed")
    if tokens.ndim != 2 or tokens.shape != labels.shape or not tokens.numel():
        raise InputError(
            f"micro-batch {index} has tokens {list(tokens.shape)} and labels {list(labels.shape)}; both must be "
            "[sequences, tokens], and not empty"
        )
    spec.check_length(tokens.shape[1])


def _check_documents(index: int, tokens: torch.Tensor, documents: torch.Tensor | None) -> None:
    """On a GPU their values are not looked at."""
    if documents is None:
        return
    if documents.shape != tokens.shape or documents.dtype != torch.int64:
        raise InputError(
            f"documents of micro-batch {index} are {documents.dtype} {list(documents.shape)}; whole numbers (int64) "
            f"{list(tokens.shape)} are needed, one for each token"
        )
    if documents.device.type == "cpu" and bool((documents[:, 1:] < documents[:, :-1]).any()):
        raise InputError(
            f"documents of micro-batch {index} go back to a lower number; a document is one run of tokens, so number "
            "them in order"
        )


def _out_of_range(tokens: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bool scalar."""
    least, most = torch.aminmax(tokens)
    counted_labels = labels.masked_fill(labels == IGNORE, 0)
    least_label, most_label = torch.aminmax(counted_labels)
    return (torch.minimum(least, least_label) < 0) | (torch.maximum(most, most_label) >= vocab_size)


def _raise_out_of_range(index: int, tokens: torch.Tensor, labels: torch.Tensor, spec: ModelSpec) -> None:
    for name, values in (("token", tokens), ("label", labels.masked_fill(labels == IGNORE, 0))):
        wrong = values[(values < 0) | (values >= spec.vocab_size)]
        if wrong.numel():
            ignored = f", or {IGNORE} where a position does not count" if name == "label" else ""
            raise InputError(
                f"micro-batch {index} has the {name} {int(wrong[0])}; `{spec.name}` has tokens 0 to "
                f"{spec.vocab_size - 1}{ignored}"
            )
