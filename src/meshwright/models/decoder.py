"""A plain decoder for one device: GPT-2, Llama, Mistral, Qwen2, Qwen3 and mixtures of experts are settings of it.

    tokens [b,s] ─ embedding (+ positions) ─▶ [b,s,h] ─ layers ─▶ [b,s,h] ─ final_norm ─ head ─▶ logits [b,s,V]

    layer:  x + attention(attention_norm(x)),  then  x + mlp(mlp_norm(x))

Parameters are named and shaped as `ModelSpec.parameters()` says. Parallelism is applied from outside: a stage
of a pipeline is this model with `embedding`, `positions`, `final_norm`, `head` set to None and layers deleted;
tensor parallelism swaps the projections for ones with fewer heads, which is why head counts are read off the
projected tensors.

Shapes: b sequences, s tokens, h hidden, a query heads, g key/value heads, d head dim, f feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.core.batch import Places
from meshwright.core.model import ModelSpec
from meshwright.models.attention import Attention, Projections, RMSNorm, linear
from meshwright.models.documents import position_ids
from meshwright.models.experts import MoE
from meshwright.models.functions import layer_norm, swiglu
from meshwright.models.latent import LatentAttention
from meshwright.models.rope import Rope


class LayerNorm(nn.Module):
    """Parameters `weight` and `bias` [size]."""

    def __init__(self, size: int, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def _norm(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> nn.Module:
    kind = RMSNorm if spec.norm == "rmsnorm" else LayerNorm
    return kind(spec.hidden_size, spec.norm_eps, device, dtype)


class _Embedding(nn.Embedding):
    """Weights are set from outside; a default initialisation would only take time, on the meta device most."""

    def reset_parameters(self) -> None:
        return


def _embedding(rows: int, size: int, device: torch.device, dtype: torch.dtype) -> nn.Embedding:
    return _Embedding(rows, size, device=device, dtype=dtype)


def _activate(kind: str, x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _inner(kind: str, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """What an MLP's last product takes: act(gate) · up, or act(up)."""
    if gate is None:
        return _activate(kind, up)
    return swiglu(gate, up) if kind == "silu" else _activate(kind, gate) * up


class MLP(nn.Module):
    """down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate. [b, s, h] → [b, s, h]."""

    def __init__(self, spec: ModelSpec, ffn_size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = spec.activation
        sizes = (spec.hidden_size, ffn_size, spec.mlp_bias, device, dtype)
        self.gate = linear(*sizes) if spec.gated_mlp else None
        self.up = linear(*sizes)
        self.project = Projections()
        self.down = linear(ffn_size, spec.hidden_size, spec.mlp_bias, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            (up,) = self.project(x, self.up)
            return self.down(_inner(self.activation, None, up))
        gate, up = self.project(x, self.gate, self.up)
        return self.down(_inner(self.activation, gate, up))


def _moe(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> MoE:
    shared = MLP(spec, spec.shared_ffn_size, device, dtype) if spec.shared_ffn_size else None
    gate = linear(spec.hidden_size, 1, False, device, dtype) if spec.shared_gate else None
    return MoE(spec, shared, gate, device, dtype)


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer, with an MLP or with experts. [b, s, h] → [b, s, h]."""

    def __init__(
        self, spec: ModelSpec, layer: int, rope: Rope | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attention_norm = _norm(spec, device, dtype)
        attention = Attention if spec.latent is None else LatentAttention
        self.attention = attention(spec, rope, device, dtype)
        self.mlp_norm = _norm(spec, device, dtype)
        self.mlp = _moe(spec, device, dtype) if spec.is_sparse(layer) else MLP(spec, spec.ffn_size, device, dtype)
        self.attention_dropout = nn.Identity()
        self.mlp_dropout = nn.Identity()

    def forward(self, x: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), places))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """The whole model, or what a pipeline has left of it. Use :func:`meshwright.models.build.build`.

    Weights are not initialised here. Whoever trains it puts dropout where there is a place for it. A tied head's
    weight is the embedding's Parameter itself.
    """

    def __init__(
        self, spec: ModelSpec, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.spec = spec
        device = torch.device(device)
        rope = Rope(spec) if spec.positions == "rope" else None
        self.embedding = _embedding(spec.vocab_size, spec.hidden_size, device, dtype)
        self.embedding_dropout = nn.Identity()
        self.positions = None
        if spec.positions == "learned":
            self.positions = _embedding(spec.max_positions, spec.hidden_size, device, dtype)
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(spec, layer, rope, device, dtype) for layer in range(spec.num_layers)}
        )
        self.final_norm = _norm(spec, device, dtype)
        self.head = linear(spec.hidden_size, spec.vocab_size, False, device, dtype)
        if spec.tied_embeddings:
            self.head.weight = self.embedding.weight

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of what a checkpoint holds: each parameter once, and the routers' biases."""
        yield from ((name, parameter.detach()) for name, parameter in self.named_parameters())
        biases = {param.name for param in self.spec.router_biases()}
        yield from ((name, buffer) for name, buffer in self.named_buffers() if name in biases)

    def forward(self, x: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        """Logits [b, s, V], or hidden states [b, s, h] where the head was cut away.

        Args:
            x: token ids [b, s], or hidden states [b, s, h] where the embedding was cut away.
            places: which documents share a sequence, and where in it the tokens stand that are here; None: each
                sequence is here as a whole, and is one document.

        Raises:
            InputError: s is more than the learned positions.
            UnsupportedError: s is more than the sliding window.
        """
        self.spec.check_length(x.shape[1] if places is None else places.length)
        if self.embedding is not None:
            tokens, x = x, self.embedding(x)
            if self.positions is not None:
                x = x + self.positions(position_ids(tokens.shape[1], x.device, places))
            x = self.embedding_dropout(x)
        for layer in self.layers.values():
            x = layer(x) if places is None else layer(x, places)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.head is None else self.head(x)
