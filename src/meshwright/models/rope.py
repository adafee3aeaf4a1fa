"""Rotary position tables, computed once and shared by all layers."""

from __future__ import annotations

import math

import torch
from torch import nn

from meshwright.core.latent import RopeScaling, YarnScaling
from meshwright.core.model import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians per position of each dim pair: [rotary_dim/2], fp32 as in the models' reference implementation."""
    exponents = torch.arange(0, spec.rotary_dim, 2, device="cpu", dtype=torch.float32) / spec.rotary_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    if isinstance(spec.rope_scaling, YarnScaling):
        return _yarn(frequencies, spec.rope_scaling, spec)
    return frequencies if spec.rope_scaling is None else _llama3(frequencies, spec.rope_scaling)


def _yarn(frequencies: torch.Tensor, scaling: YarnScaling, spec: ModelSpec) -> torch.Tensor:
    """Likewise; blended by the dim's number, between those that turn `beta_fast` and `beta_slow` times.

    Source: Peng et al. 2023 (YaRN), §3.2, with bounds rounded to whole dims as in its published implementation.
    """
    dim, base = spec.rotary_dim, spec.rope_theta

    def dim_of(turns: float) -> float:
        return dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), dim - 1)
    number = torch.arange(dim // 2, device="cpu", dtype=torch.float32)
    slow = ((number - low) / (max(high - low, 1e-3))).clamp(0, 1)
    return frequencies / scaling.factor * slow + frequencies * (1 - slow)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow dims turn `factor` times slower, fast ones as before, those between are blended.

    Source: Grattafiori et al. 2024 (Llama 3.1), as published with the weights.
    """
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


class Rope(nn.Module):
    """cos and sin for positions 0 to s−1, or for those of the tokens that are here. Made on first use, so that a model
    can be built without storage."""

    cos: torch.Tensor | None
    sin: torch.Tensor | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        self._positions: torch.Tensor | None = None
        """Those of the tables; None: 0 to s−1."""

    def forward(
        self, length: int, device: torch.device, dtype: torch.dtype, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos [length, 1, rotary_dim] and sin [length, 1, rotary_dim/2].

        Args:
            length: tokens of a sequence that are here.
            positions: [length], where they stand in it; None: from 0 on. The same tensor has the same tables.
        """
        cos, sin = self.cos, self.sin
        known = cos is not None and self._positions is positions and len(cos) >= length
        if cos is None or sin is None or not known or cos.device != device or cos.dtype != dtype:
            self._positions = positions
            at = torch.arange(length, device=device) if positions is None else positions
            cos, sin = self.cos, self.sin = self._tables(at, dtype)
        return cos[:length], sin[:length]

    @torch.no_grad()
    def _tables(self, at: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        positions, device = at.to(torch.float32), at.device
        angles = torch.outer(positions, inverse_frequencies(self.spec).to(device)).unsqueeze(1)
        scaling = self.spec.rope_scaling
        scale = scaling.table_scale if isinstance(scaling, YarnScaling) else 1.0
        cos = angles.cos() * scale
        return torch.cat((cos, cos), dim=-1).to(dtype), (angles.sin() * scale).to(dtype)
