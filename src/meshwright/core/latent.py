"""Multi-head latent attention, and the rotary scaling that comes with it: sizes and factors.

    h ──▶ c_q [q_lora_rank] ──norm──▶ q of each head: [nope | rope]
    h ──▶ [c_kv | k_rope]   ──norm of c_kv──▶ of each head: [k_nope | v];   k = [k_nope | k_rope], k_rope of all heads

A cache keeps c_kv and k_rope of a token instead of the keys and values of all heads.

Sources: DeepSeek-AI 2024 (V2), §2.1 and appendix C; Peng et al. 2023 (YaRN), §3.
"""

from __future__ import annotations

from math import log
from typing import Literal

from pydantic import Field, model_validator

from meshwright.core.values import MAX_SIZE, Value


class LatentAttention(Value):
    """Sizes of latent attention, by the names that their configurations use."""

    q_lora_rank: int | None = Field(default=None, gt=0, le=MAX_SIZE)
    """Width of the queries' latent; None: queries are projected from the hidden state itself."""
    kv_lora_rank: int = Field(gt=0, le=MAX_SIZE)
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int = Field(gt=0, le=MAX_SIZE)
    """Of each head of queries and keys, the dims that do not turn with the position."""
    qk_rope_head_dim: int = Field(gt=0, le=MAX_SIZE)
    """Likewise those that do; of keys they are the same for all heads."""
    v_head_dim: int = Field(gt=0, le=MAX_SIZE)
    """Of each head of values."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Of the norms of the latents."""

    @model_validator(mode="after")
    def _consistent(self) -> LatentAttention:
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd; rotary positions rotate pairs")
        if self.v_head_dim > self.head_dim:
            raise ValueError(
                f"v_head_dim {self.v_head_dim} is more than qk_nope_head_dim + qk_rope_head_dim = {self.head_dim}; "
                "values wider than keys are not built"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_down_size(self) -> int:
        """Of a token: the latent of keys and values, and the rotary part of its key. What a cache keeps."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_up_size(self) -> int:
        """Of a token and a head: what its latent is projected up to."""
        return self.qk_nope_head_dim + self.v_head_dim


class RopeScaling(Value):
    """Llama 3.1 frequency scaling."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_positions: int = Field(gt=0)


class YarnScaling(Value):
    """YaRN: slow dims turn `factor` times slower, fast ones as before, those between are blended."""

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(gt=0)
    original_max_positions: int = Field(gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    """Turns within the original positions from which on a dim is fast."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Likewise below which it is slow."""
    mscale: float | None = Field(default=None, gt=0)
    mscale_all_dim: float | None = Field(default=None, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    """What the tables are multiplied by; None: it follows from the factors above."""

    @property
    def table_scale(self) -> float:
        """What cosines and sines are multiplied by (Peng et al. 2023, §3.4, and its variant in DeepSeek-V2)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _temperature(self.factor, self.mscale) / _temperature(self.factor, self.mscale_all_dim)
        return _temperature(self.factor, 1.0)

    @property
    def score_scale(self) -> float:
        """What latent attention multiplies its scores by."""
        return _temperature(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0
