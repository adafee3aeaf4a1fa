"""Answers that must match a JSON schema: llguidance says which tokens may come next.

Source: Koo et al. 2024 (automata over tokens); the library is https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from meshwright.core.errors import InputError

_COMPACT: Any = {"whitespace_flexible": False}
"""No white space between the parts: legal white space without an end would fill the answer."""


class Matcher:
    """Follows one answer through its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def again(self) -> Matcher:
        """Another one, as far as this one is: a grammar may take seconds to make, and its copy takes none."""
        return Matcher(self._matcher.deep_copy())

    @property
    def is_done(self) -> bool:
        """Whether nothing more may come."""
        return bool(self._matcher.is_stopped())

    @property
    def fault(self) -> str | None:
        """Why no text can match any more: a schema without an end, or too complex to follow."""
        if not self._matcher.is_error():
            return None
        said = _line(str(self._matcher.get_error()).partition("<state>")[0])
        return f"response_format: {said or 'no text matches this schema'}"

    def mask(self, logits: torch.Tensor) -> None:
        """Logits [V] of tokens that may not come next become −inf, in place."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        known = min(len(bits), len(logits))
        allowed[:known] = torch.from_numpy(bits[:known].astype(bool)).to(logits.device)
        logits.masked_fill_(~allowed, float("-inf"))

    def accept(self, token: int) -> None:
        """The token that came."""
        self._matcher.consume_token(token)


class Grammars:
    """Makes matchers for one tokenizer.

    Args:
        tokenizer: of the model; None: grammars are refused.
        vocab_size: of the model.
        end_tokens: that may come where an answer is whole.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = sorted(end_tokens)
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, "grammar")

    async def make(self, schema: str) -> Callable[[], Any]:
        """As :meth:`matchers`, in a thread of its own: nobody who asks without a schema waits behind one."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.matchers, schema)

    def matchers(self, schema: str) -> Callable[[], Any]:
        """Makes what follows a JSON schema, one for each answer.

        Raises:
            InputError: a schema that is none, or of a kind that cannot be followed; a model without end token.
        """
        tokenizer = self._made()
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, _COMPACT)
        except ValueError as error:
            raise InputError(f"response_format: {_line(error)}") from None
        if fault := LLMatcher.validate_grammar(grammar, tokenizer):
            raise InputError(f"response_format: {_line(fault)}")
        first = Matcher(LLMatcher(tokenizer, grammar, log_level=0))
        first.mask(torch.zeros(self._vocab_size))
        if first.fault is not None:
            raise InputError(first.fault)
        return first.again

    def _made(self) -> LLTokenizer:
        if self._source is None or not self._end_tokens:
            raise InputError("response_format: it needs a model with a tokenizer and an end token")
        if self._tokenizer is None:
            rows = max(self._vocab_size, self._source.get_vocab_size())
            self._tokenizer = LLTokenizer(self._source.to_str(), n_vocab=rows, eos_token=self._end_tokens)
        return self._tokenizer


def _line(fault: object) -> str:
    return " ".join(str(fault).split())[:300]
