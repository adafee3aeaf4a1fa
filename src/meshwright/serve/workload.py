"""What a load generator asks of a server, and when. Free of torch.

    Workload + seed ─▶ planned requests, one after the other: words of the prompt, tokens of the answer, gap before it

Lengths, words and gaps have draws of their own: another rate asks the same questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
from pydantic import Field, field_validator, model_validator

from meshwright.core.errors import InputError
from meshwright.core.values import MAX_SIZE, Value

MAX_TOKENS = 10**7
PREFIX, TRIAL = MAX_SIZE, MAX_SIZE + 1
"""In the place of a request's number: the words with which all begin, and those of requests before the load."""
_SHAPES = {"uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
"""Distribution → how many numbers it takes."""
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of numbers of tokens: `128`, `uniform:64,256`, `normal:128,32`, `lognormal:128,0.8` (median, and
    deviation of the logarithm) or `exponential:128` (mean)."""

    shape: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises InputError."""
        shape, colon, rest = text.strip().partition(":")
        if not colon:
            shape, rest = "uniform", f"{text},{text}"
        wanted = _SHAPES.get(shape)
        try:
            numbers = tuple(float(part) for part in rest.split(","))
        except ValueError:
            numbers = ()
        if wanted != len(numbers) or not all(0 <= number <= MAX_TOKENS for number in numbers) or numbers[0] < 1:
            raise InputError(
                f"{text!r} are no lengths: write 128, uniform:64,256, normal:128,32, lognormal:128,0.8 or "
                "exponential:128"
            )
        if shape == "uniform" and numbers[0] > numbers[1]:
            raise InputError(f"{text!r}: the shortest length comes first")
        if shape == "lognormal" and numbers[1] > 5:
            raise InputError(
                f"{text!r}: a deviation of {numbers[1]:g} in the logarithm spreads beyond all lengths; 1 is much"
            )
        return cls(shape, numbers)

    def draw(self, rng: np.random.Generator) -> int:
        """One length, at least 1 token."""
        first, second = self.numbers[0], self.numbers[-1]
        draws: dict[str, Callable[[], SupportsFloat]] = {
            "uniform": lambda: rng.integers(int(first), int(second) + 1),
            "normal": lambda: rng.normal(first, second),
            "lognormal": lambda: rng.lognormal(np.log(first), second),
            "exponential": lambda: rng.exponential(first),
        }
        return int(min(max(1, round(float(draws[self.shape]()))), MAX_TOKENS))


class Workload(Value):
    """A load: how requests come, how long they are, when it ends."""

    rate: float | None = Field(default=None, gt=0, le=1e6)
    """Requests a second, at Poisson's times, whatever the server does."""
    concurrency: int | None = Field(default=None, gt=0, le=100_000)
    """So many clients, each asking again when its answer is whole."""
    num_requests: int | None = Field(default=None, gt=0, le=MAX_SIZE)
    duration_s: float | None = Field(default=None, gt=0, le=10**7)
    """No request begins later; those under way are waited for."""
    prompt_tokens: str = "128"
    """:class:`Lengths` of prompts, about: words are made to it."""
    output_tokens: str = "128"
    """:class:`Lengths` of answers at most."""
    prefix_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """So many tokens of each prompt, about, are the same for all."""
    seed: int = Field(default=0, ge=0)
    chat: bool = False
    """Ask `/v1/chat/completions` instead of `/v1/completions`."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    ignore_eos: bool = True
    """Ask the server to go on after the model's end token, so that answers are as long as planned."""
    timeout_s: float = Field(default=600.0, gt=0, le=10**6)
    """Of one request."""

    @field_validator("prompt_tokens", "output_tokens")
    @classmethod
    def _lengths(cls, text: str) -> str:
        try:
            Lengths.parse(text)
        except InputError as error:
            raise ValueError(str(error)) from None
        return text

    @model_validator(mode="after")
    def _complete(self) -> Workload:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("say how requests come: either a rate (requests/s) or a concurrency (clients)")
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("say when it ends: after a number of requests, or a duration")
        return self


@dataclass(frozen=True, slots=True)
class Planned:
    """One request, before it is asked."""

    index: int
    prompt_tokens: int
    output_tokens: int
    gap_s: float
    """After the one before it; 0 where clients ask as they are ready."""


def planned(workload: Workload) -> Iterator[Planned]:
    """The requests in order, without an end where only the time is limited."""
    lengths, gaps = (np.random.default_rng([workload.seed, stream]) for stream in (0, 1))
    prompts, outputs = Lengths.parse(workload.prompt_tokens), Lengths.parse(workload.output_tokens)
    index = 0
    while workload.num_requests is None or index < workload.num_requests:
        gap_s = 0.0 if workload.rate is None else float(gaps.exponential(1 / workload.rate))
        yield Planned(index, prompts.draw(lengths), outputs.draw(lengths), gap_s)
        index += 1


def words(seed: int, index: int, count: int) -> str:
    """So many words that depend on the seed and the request's number; `PREFIX` is what all begin with."""
    rng = np.random.default_rng([seed, 2, index])
    return " ".join(_WORDS[at] for at in rng.integers(0, len(_WORDS), count))
