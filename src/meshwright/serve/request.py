"""What a request asks for, and how far its sequences have come. Free of torch.

One request has `n` sequences. A sequence is prompt + output tokens; `num_computed` of them have keys and values in
the cache:

    prompt ───────────────────────── output ──────
    |<────────── num_computed ─────────>|  the last token of a running sequence is computed in its next step
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from meshwright.core.errors import InputError
from meshwright.core.model import ModelSpec
from meshwright.core.units import counted
from meshwright.core.values import Value

Finish = Literal["stop", "length", "abort", "deadline", "error"]
MAX_TOKENS = 2**31
MAX_SEED = 2**63
MAX_BIASES = 1024
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_N = 128
MAX_LOGPROBS = 20


class SamplingParams(Value):
    """How the tokens of a request are chosen, and when it ends."""

    max_tokens: int | None = Field(default=16, ge=0, lt=MAX_TOKENS)
    """Tokens of the answer at most; None: until the context is full."""
    min_tokens: int = Field(default=0, ge=0, lt=MAX_TOKENS)
    """Before so many tokens nothing ends the answer."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Divides the logits; 0 takes the likeliest token (the lowest id among equals)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Choose among the likeliest tokens that together have so much probability."""
    top_k: int = Field(default=0, ge=-1, lt=MAX_TOKENS)
    """Choose among so many of the likeliest tokens; 0 or −1: among all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Choose among tokens with at least this share of the likeliest one's probability."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logits of tokens that the answer has."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logits of the answer's tokens, once for each time."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """Divides positive and multiplies negative logits of tokens that prompt or answer have."""
    logit_bias: dict[int, float] = Field(default={}, max_length=MAX_BIASES)
    """Token id → what is added to its logit."""
    seed: int | None = Field(default=None, ge=-MAX_SEED, lt=MAX_SEED)
    """Of the draws; None: one of its own."""
    n: int = Field(default=1, ge=1, le=MAX_N)
    """Answers to the prompt; answer i draws with a seed derived from `seed` and i."""
    stop: tuple[str, ...] = Field(default=(), max_length=MAX_STOPS)
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = Field(default=(), max_length=MAX_BIASES)
    """Tokens that end the answer, besides the model's own end token; their text is not part of it."""
    ignore_eos: bool = False
    """Go on after the model's end token."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Report the log probability of each token, and of so many of the likeliest beside it."""
    prompt_logprobs: bool = False
    """Report those of the prompt's tokens too."""
    grammar: str | None = None
    """What the answer must match, as :mod:`meshwright.serve.grammar` writes it; None: anything."""

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, biases: dict[int, float]) -> dict[int, float]:
        for token, bias in biases.items():
            if not (-100 <= bias <= 100 and 0 <= token < MAX_TOKENS):
                raise ValueError(f"token {token} with bias {bias}: a token's id and a bias from -100 to 100 are meant")
        return biases

    @field_validator("stop")
    @classmethod
    def _stops(cls, stops: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stops:
            raise ValueError("an empty stop string would end every answer before its first token; leave it out")
        if (longest := max(map(len, stops), default=0)) > MAX_STOP_LENGTH:
            raise ValueError(f"a stop string of {longest:,} characters; it has {MAX_STOP_LENGTH:,} at most")
        return stops

    @model_validator(mode="after")
    def _lengths(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Whether anything changes the logits before the choice."""
        return bool(
            self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.grammar is not None
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer under way."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_length: int
    """Prompt and answer together are never longer."""
    order: float
    """Smaller goes first: seconds of arrival, moved by the priority."""
    deadline_s: float | None = None
    """On the scheduler's clock."""
    leader: Sequence | None = None
    """Another answer to the same prompt, whose prompt is computed first and then shared."""
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Of the cache, in order of the tokens that they hold."""
    chain: list[int] = field(default_factory=list)
    """Serial numbers of the full blocks whose content is known to the prefix cache."""
    num_computed: int = 0
    host_blocks: list[int] = field(default_factory=list)
    """While it waits: of the host's memory, in order, where its keys and values are; empty where they are nowhere."""
    num_swapped: int = 0
    """Tokens whose keys and values those hold."""
    num_cached: int = 0
    """Tokens of the prompt that the prefix cache had when the sequence first started."""
    num_told: int = 0
    """Tokens of the prompt after which log probabilities were reported, where they are asked for."""
    num_preemptions: int = 0
    arrived_s: float = 0.0
    """On the scheduler's clock."""
    started_s: float | None = None
    """When it first took part in a step."""
    finish: Finish | None = None
    matcher: Any = None
    """What follows its grammar, where it has one."""
    takes_likeliest: bool = False
    """Whether each of its tokens is the likeliest, and nothing more is asked about it."""
    _tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = list(self.prompt)
        params = self.params
        self.takes_likeliest = (
            params.is_greedy and not params.changes_logits and params.logprobs is None and not params.min_tokens
        )

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_left(self) -> int:
        """Tokens that are not computed yet: 1 while it decodes, more while its prompt is."""
        return len(self._tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return bool(self.output) and self.num_left == 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and answer at positions `start` to `end`−1."""
        return self._tokens[start:end]

    def append(self, token: int) -> None:
        """A new token of the answer."""
        self.output.append(token)
        self._tokens.append(token)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the seed and on which token of the answer it chooses, and on nothing else."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def derived_seed(seed: int, answer: int) -> int:
    """Seed of one answer of a request that asks for several; the first keeps the request's."""
    if answer == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/answer {answer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sequences(
    first_id: int,
    prompt: Ordered[int],
    params: SamplingParams,
    seed: int,
    max_length: int,
    order: float,
    deadline_s: float | None,
) -> list[Sequence]:
    """The `n` sequences of a request; the first is the leader of the others."""
    length = max_length if params.max_tokens is None else min(max_length, len(prompt) + params.max_tokens)
    made: list[Sequence] = []
    for answer in range(params.n):
        own = derived_seed(seed, answer)
        leader = made[0] if made else None
        made.append(Sequence(first_id + answer, tuple(prompt), params, own, length, order, deadline_s, leader))
    return made


def context_of(spec: ModelSpec) -> int:
    """Tokens of prompt and answer together, by the model."""
    return min(spec.max_positions, spec.sliding_window or spec.max_positions)


def check_request(prompt: Ordered[int], params: SamplingParams, vocab: int, max_length: int, what: str) -> None:
    """Raises InputError where a request could never be answered.

    Args:
        prompt: token ids.
        params: how to answer.
        vocab: ids that the model knows.
        max_length: tokens of prompt and answer together.
        what: has room for so many.
    """
    if not prompt:
        raise InputError("the prompt is empty: give at least one token")
    needed = len(prompt) + (1 if params.max_tokens != 0 else 0)
    if needed > max_length:
        raise InputError(
            f"the prompt has {counted(len(prompt), 'token')}, but {what} is {max_length} tokens, answer included; "
            "shorten the prompt"
        )
    named = {"prompt": prompt, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
    for where, tokens in named.items():
        if (wrong := next((t for t in tokens if not 0 <= t < vocab), None)) is not None:
            raise InputError(f"{where}: token {wrong} is none of the model's: ids go from 0 to {vocab - 1}")
