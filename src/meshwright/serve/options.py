"""How a model is served: sizes that the planner or a person chooses before the first request."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.core.values import MAX_SIZE, Value

Preemption = Literal["recompute", "swap", "auto"]
"""What becomes of a sequence's keys and values when the cache is full and it goes back to the queue: forgotten and
computed again, copied to the memory of the host and back, or whichever of the two takes less time."""


class ServeOptions(Value):
    """Sizes of the cache, of a step and of the queue."""

    block_size: int = Field(default=16, gt=0, le=4096)
    """Tokens of one block of the key/value cache."""
    num_blocks: int | None = Field(default=None, gt=0, le=MAX_SIZE)
    """Blocks of the cache; None takes as many as `cache_bytes` holds."""
    cache_bytes: int = Field(default=2**29, gt=0)
    """Memory of the cache on each rank, where `num_blocks` is not given."""
    step_tokens: int = Field(default=256, gt=0, le=MAX_SIZE)
    """Tokens that one step computes at most: one of each running sequence, the rest is for prompts."""
    max_running: int = Field(default=64, gt=0, le=MAX_SIZE)
    """Sequences that take part in a step at most."""
    max_waiting: int = Field(default=1024, gt=0, le=MAX_SIZE)
    """Sequences that may wait; more are refused."""
    preempt: Preemption = "recompute"
    """How sequences give up their blocks when the cache is full."""
    swap_bytes: int = Field(default=2**29, gt=0)
    """Memory of the host, on each rank, for what is swapped; nothing is taken where `preempt` is `recompute`."""
    prefix_cache: bool = True
    """Whether blocks of earlier prompts and answers are used again by requests that begin with the same tokens."""
    priority_s: float = Field(default=10.0, ge=0)
    """How many seconds earlier a request counts as arrived for each step of its priority: nobody waits for ever."""
