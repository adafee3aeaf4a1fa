"""The choice of the next token, for each sequence by its own parameters and its own seed.

    logits [V] ─ penalties, biases, grammar ─ / temperature ─ top_k, min_p, top_p ─ one number of the seed ─▶ token

A draw inverts the cumulative probabilities at one number that depends on the seed and the token's place in the answer
alone: neither neighbours nor a preemption can change it.

Source: Holtzman et al. 2020 (top_p); Nguyen et al. 2024 (min_p); Keskar et al. 2019 (repetition penalty).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch

from meshwright.serve.native import kernels
from meshwright.serve.request import SamplingParams, Sequence, uniform


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one token: its log probability by the model's own logits, and the likeliest tokens beside it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log probability), likeliest first."""


class Choice(NamedTuple):
    """A chosen token; None where the model's output is not finite."""

    token: int | None
    logprobs: Logprobs | None = None


def choose(logits: torch.Tensor, sequences: Ordered[Sequence], end_tokens: frozenset[int]) -> list[Choice]:
    """One token for each sequence.

    Args:
        logits: [n, V], row i of sequence i; not changed.
        end_tokens: ids that end an answer; kept out while it is shorter than `min_tokens`.
    """
    if not sequences:
        return []
    largest, places = _largest(logits)
    finite, likeliest = list(map(isfinite, largest.tolist())), places.tolist()
    if all(finite) and all(s.takes_likeliest for s in sequences):
        return list(map(Choice, likeliest))
    return _choose_each(logits, largest, finite, likeliest, sequences, end_tokens)


@torch.inference_mode()
def _choose_each(
    logits: torch.Tensor,
    largest: torch.Tensor,
    finite: list[bool],
    likeliest: list[int],
    sequences: Ordered[Sequence],
    end_tokens: frozenset[int],
) -> list[Choice]:
    """As :func:`choose`, by each sequence's own parameters.

    Args:
        largest: [n], the largest of each row, whether it is finite, and where it is.
    """
    together = [row for row, s in enumerate(sequences) if finite[row] and _draws_simply(s.params) and not _changes(s)]
    drawn = dict(zip(together, _draw_all(logits, largest, together, sequences)))
    choices = []
    for row, sequence in enumerate(sequences):
        if not finite[row]:
            choices.append(Choice(None))
            continue
        params, own = sequence.params, logits[row]
        changed = change(own, sequence, end_tokens) if _changes(sequence) else own
        if row in drawn:
            token = drawn[row]
        elif not params.is_greedy:
            token = draw(changed, params, uniform(sequence.seed, len(sequence.output)))
        else:
            token = likeliest[row] if changed is own else int(changed.argmax())
        logprobs = None if params.logprobs is None else logprobs_of(own, token, params.logprobs)
        choices.append(Choice(token, logprobs))
    return choices


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and places [n] of the largest of each row [n, V]."""
    found = kernels() if logits.device.type == "cpu" and logits.dtype == torch.float32 else None
    return logits.max(dim=-1) if found is None else found.largest(logits)


def _draws_simply(params: SamplingParams) -> bool:
    """Whether a draw is among all tokens, so that nothing needs to be sorted."""
    return not (params.is_greedy or params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _draw_all(logits: torch.Tensor, largest: torch.Tensor, rows: list[int], sequences: Ordered[Sequence]) -> list[int]:
    """Draws of several rows at once, each as :func:`draw` makes it.

    Args:
        logits: [n, V].
        largest: [n], of each row.
        rows: which of them, all with plain parameters but for the temperature.
    """
    if not rows:
        return []
    least = torch.finfo(torch.float64).tiny
    chosen = [sequences[row] for row in rows]
    heats = [max(s.params.temperature, least) for s in chosen]
    heat = torch.tensor(heats, dtype=torch.float64, device=logits.device)
    places = [uniform(s.seed, len(s.output)) for s in chosen]
    at = torch.tensor(places, dtype=torch.float64, device=logits.device)
    weights = ((logits[rows] - largest[rows].unsqueeze(1)).double() / heat.unsqueeze(1)).exp_()
    cumulative = weights.cumsum(1)
    found = torch.searchsorted(cumulative, (at * cumulative[:, -1]).unsqueeze(1), right=True)
    found.clamp_(max=weights.shape[1] - 1)
    has_weight = weights.gather(1, found).ne(0).squeeze(1).tolist()
    return [
        token if fine else _invert(weights[row], float(at[row]))
        for row, (token, fine) in enumerate(zip(found.squeeze(1).tolist(), has_weight))
    ]


def _changes(sequence: Sequence) -> bool:
    return sequence.params.changes_logits or len(sequence.output) < sequence.params.min_tokens


def change(logits: torch.Tensor, sequence: Sequence, end_tokens: frozenset[int]) -> torch.Tensor:
    """Logits [V] after penalties, biases, the grammar and `min_tokens`; a copy."""
    params, logits = sequence.params, logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*sequence.prompt, *sequence.output}), device=logits.device)
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(sequence.output)
        seen = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[biased] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if sequence.matcher is not None:
        sequence.matcher.mask(logits)
    if len(sequence.output) < params.min_tokens:
        logits[sorted(end_tokens | set(params.stop_token_ids))] = float("-inf")
    return logits


def draw(logits: torch.Tensor, params: SamplingParams, at: float) -> int:
    """The token at `at` in [0, 1) of the cumulative probabilities, likeliest token first.

    Args:
        logits: [V].
    """
    top_k = params.top_k if 0 < params.top_k < len(logits) else None
    sorts = top_k is not None or params.top_p < 1 or params.min_p > 0
    if not sorts:
        return _invert(_scaled(logits, logits.max(), params).exp(), at)
    values, ids = logits.topk(top_k) if top_k is not None else logits.sort(descending=True, stable=True)
    weights = _scaled(values, values[0], params).exp()
    if params.min_p > 0:
        weights = weights[: max(1, int((weights >= params.min_p).sum()))]
    if params.top_p < 1:
        before = weights.cumsum(0) - weights
        weights = weights[: max(1, int((before < params.top_p * weights.sum()).sum()))]
    return int(ids[_invert(weights, at)])


def _scaled(logits: torch.Tensor, largest: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Divided by the temperature, fp64, the largest 0: no temperature is too small."""
    shifted = (logits - largest).double()
    return shifted / max(params.temperature, torch.finfo(torch.float64).tiny)


def _invert(weights: torch.Tensor, at: float) -> int:
    """Index whose cumulative weight first exceeds `at` of the total."""
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, at * float(cumulative[-1]), right=True))
    index = min(index, len(weights) - 1)
    while index and float(weights[index]) == 0.0:  # rounding may point behind the last token with any weight
        index -= 1
    return index


def logprobs_of(logits: torch.Tensor, token: int, num_top: int) -> Logprobs:
    """By the logits [V] as the model gave them: no temperature, no penalty."""
    wide = logits.double()
    total = float(wide.logsumexp(0))
    best = wide.topk(min(num_top, len(wide)))
    top = tuple(zip(best.indices.tolist(), (value - total for value in best.values.tolist()), strict=True))
    return Logprobs(token, float(wide[token]) - total, top)
