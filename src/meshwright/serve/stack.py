"""A whole step in one call: a model's layers as `steps.cpp` reads them.

Between two products of one request there is less to compute than Python takes to ask for it, and where another process
has a core, each of dozens of parallel regions waits for it. The modules of `serve.layers` run models that this does not
know, and give the same, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import POINTER, Structure, c_float, c_long, c_void_p, cast
from typing import Any

import torch
from torch import nn

from meshwright.models.decoder import DecoderLayer
from meshwright.parallel.layers import layers_of, part_of
from meshwright.serve.layers import NativeAttention, NativeMLP, NativeNorm
from meshwright.serve.linear import JoinedProjections, LaneProduct, PackedLinear, TileProduct
from meshwright.serve.native import Kernels, NativeStep, kernels


class _Product(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("inputs", c_long), ("outputs", c_long)]


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm", "keys", "values")),
        *((name, _Product) for name in ("qkv", "o", "gate_up", "down")),
    ]


class _Stack(Structure):
    _fields_ = [
        ("kind", c_long),
        ("layers", POINTER(_Layer)),
        *((name, c_long) for name in ("num_layers", "hidden", "ffn")),
        *((name, c_float) for name in ("eps", "head_eps")),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", _Product),
    ]


TILES, LANES_BFLOAT16, LANES_FLOAT32 = range(3)
"""How a stack's products are computed: `Kind` of `steps.cpp`."""


class Stack:
    """Embedding, layers, the last norm and the head of a model whose modules are those of `serve.layers`.

    Args:
        model: with kernels and packed weights.
        caches: of each layer.
        kernels: compiled.
    """

    def __init__(self, model: nn.Module, caches: list[torch.Tensor], kernels: Kernels) -> None:
        self._kernels = kernels
        self._model, self._caches = model, caches  # what the pointers point into
        parts = _named(model)
        layers: list[Any] = list(layers_of(model).values())
        made = [_layer(layer, cache) for layer, cache in zip(layers, caches, strict=True)]
        self._layers = (_Layer * len(made))(*made)
        first, head = layers[0], parts.head.product
        q_norm = first.attention.plain.q_norm
        self._num_outputs = head.num_outputs
        self.c = _Stack(
            _kind(head, parts.embedding.weight.dtype), cast(self._layers, POINTER(_Layer)), len(made),
            head.num_inputs, first.mlp.plain.down.product.num_inputs,
            parts.final_norm.eps, 0.0 if q_norm is None else q_norm.eps,
            parts.embedding.weight.data_ptr(), parts.final_norm.weight.data_ptr(), _product(head),
        )  # fmt: skip
        self._room = torch.empty(0, dtype=torch.uint8)

    def __call__(self, tokens: torch.Tensor, step: NativeStep) -> torch.Tensor:
        """Logits [W, V], fp32, of the wanted rows of tokens [T]."""
        needed = self._kernels.stack_room_bytes(self.c, step)
        if len(self._room) < needed:
            self._room = torch.empty(needed, dtype=torch.uint8)
        logits = torch.empty(step.num_wanted, self._num_outputs)
        self._kernels.run_stack(self.c, step, tokens, logits, self._room)
        return logits


def _named(model: nn.Module) -> Any:
    """The model, whose parts are used by name."""
    return model


def _kind(product: TileProduct | LaneProduct, dtype: torch.dtype) -> int:
    if type(product) is TileProduct:
        return TILES
    return LANES_BFLOAT16 if dtype == torch.bfloat16 else LANES_FLOAT32


def stack_of(model: nn.Module, caches: list[torch.Tensor]) -> Stack | None:
    """The stack of a whole model; None where a module is one that it does not know."""
    found, parts = kernels(), _named(model)
    layers: list[Any] = list(layers_of(model).values())
    if found is None or not all(map(_is_known, layers)):
        return None
    norms = {module.eps for layer in layers for module in (layer.attention_norm, layer.mlp_norm)}
    if parts.positions is not None or parts.embedding.region.axis.size > 1:
        return None
    if type(parts.final_norm) is not NativeNorm or norms != {parts.final_norm.eps}:
        return None
    if len(set(_products(model))) != 1 or _products(model)[0] not in (TileProduct, LaneProduct):
        return None
    return Stack(model, caches, found)


def _is_known(layer: Any) -> bool:
    kinds = (layer.attention_norm, NativeNorm), (layer.mlp_norm, NativeNorm), (layer.attention, NativeAttention)
    mlp: Any = layer.mlp
    if type(layer) is not DecoderLayer or not all(type(module) is kind for module, kind in kinds):
        return False
    if type(mlp) is not NativeMLP:
        return False
    attention: Any = layer.attention
    head_norms = attention.plain.q_norm, attention.plain.k_norm
    return all(norm is None or type(norm) is NativeNorm for norm in head_norms)


def _products(model: nn.Module) -> list[type | None]:
    """The kind of each product; None where one is summed over ranks, or not known."""
    modules = [_named(model).head]
    for layer in layers_of(model).values():
        attention, mlp = part_of(layer, "attention").plain, part_of(layer, "mlp").plain
        modules += [attention.project, attention.o, mlp.project, mlp.down]
    return [_kind_of(module) for module in modules]


def _kind_of(module: nn.Module) -> type | None:
    if type(module) is PackedLinear and module.axis is not None:
        return None
    return type(module.product) if isinstance(module, PackedLinear | JoinedProjections) else None


def _layer(layer: Any, cache: torch.Tensor) -> _Layer:
    plain, mlp = layer.attention.plain, layer.mlp.plain
    norms = (layer.attention_norm, plain.q_norm, plain.k_norm, layer.mlp_norm)
    products = (plain.project, plain.o, mlp.project, mlp.down)
    return _Layer(
        *_pointers(norms), cache[0].data_ptr(), cache[1].data_ptr(), *(_product(module.product) for module in products)
    )


def _pointers(norms: tuple[NativeNorm | None, ...]) -> Iterator[int | None]:
    return (None if norm is None else norm.weight.data_ptr() for norm in norms)


def _product(product: TileProduct | LaneProduct) -> _Product:
    bias = None if product.bias is None else product.bias.data_ptr()
    return _Product(product.weight.data_ptr(), bias, product.num_inputs, product.num_outputs)
