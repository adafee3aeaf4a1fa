"""Products with weights that are laid out once for the processor: the one place that chooses how.

Where there are kernels (`serve.native`), they multiply: in bf16 by matrix tiles or in vectors of pairs where the
processor has them, else in vectors of fp32. Without kernels the layout is oneDNN's, which reads a weight of a small
batch at the speed of memory only where it lies in blocks; it is made by operators that PyTorch uses itself but does not
promise to keep: where they are missing, or refuse a weight, the plain product stays. Layers of one input are one
product, whose output's columns are q, k and v, or gate and up.

    bf16, 768 × 2304 of many, one thread, µs   1 row   16 rows   32 rows   256 rows
    plain                                        469       520       577       1492
    oneDNN's layout                              306       322       401       1075
    tiles                                        232       256       290       1343
    fp32, the same                             1 row   16 rows   64 rows   240 rows
    oneDNN's layout                              605       946      2045       6632
    lanes                                        578       677      1672       5897
    bf16, a processor without tiles              1 row   16 rows   64 rows   240 rows
    oneDNN's layout                              142       240       580       1979
    lanes                                        107       292      1013       3685
    vectors of pairs                              98       164       500       1765
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.differentiable import reduce_from
from meshwright.models.attention import Attention
from meshwright.models.decoder import MLP
from meshwright.models.latent import Latents
from meshwright.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from meshwright.serve.native import NAMES, PANEL, Kernels, LargePages, in_lanes, in_tiles, kernels

Parallel = ColumnParallelLinear | RowParallelLinear
PACKED_DTYPES = (torch.bfloat16, torch.float32)
TYPICAL_ROWS = 16
TOGETHER = {Attention: ("q", "k", "v"), Latents: ("q", "kv"), MLP: ("gate", "up")}
"""Layers of one input."""


class PackedProduct:
    """x [.., in] · Wᵀ + b, with W laid out in blocks by oneDNN. Raises RuntimeError where that cannot be done."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        with torch.inference_mode():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[:-1].numel()
        if (more := padded(rows) - rows) and x.shape[-2] == rows:
            return self._multiply(F.pad(x, (0, 0, 0, more)))[..., :rows, :]
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._linear(x, self._weight, self._bias, "none", [], "")
        return out


def padded(rows: int) -> int:
    """The next of few numbers of rows, at most a quarter more: four between a power of two and the next.

    oneDNN makes code for every shape that it meets, in milliseconds, and keeps half a megabyte of it: steps of all
    lengths would take hundreds of megabytes, and turn each other's code out.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


class TileProduct:
    """x [.., in] · Wᵀ + b in bf16, with W in tiles of pairs of inputs."""

    def __init__(
        self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None, pages: LargePages | None = None
    ) -> None:
        self._product = kernels.product
        self.num_outputs, self.num_inputs = weight.shape
        self.weight = in_tiles(weight, pages)
        self.bias = None if bias is None else F.pad(bias.float(), (0, -len(weight) % PANEL))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias, self.num_outputs)


class LaneProduct:
    """x [.., in] · Wᵀ + b in fp32 or bf16, with W in panels as wide as two of the processor's vectors."""

    def __init__(
        self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None, pages: LargePages | None = None
    ) -> None:
        self._product = kernels.lanes_product
        self.num_outputs, self.num_inputs = weight.shape
        self.weight = in_lanes(weight, kernels.lanes_panel, pages)
        self.bias = None if bias is None else F.pad(bias.float(), (0, -len(weight) % kernels.lanes_panel))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias, self.num_outputs)


def product_of(
    weight: torch.Tensor, bias: torch.Tensor | None, pages: LargePages | None = None
) -> TileProduct | LaneProduct | PackedProduct:
    """The fastest product with a weight [out, in] that this machine has. Raises RuntimeError where there is none."""
    found = kernels()
    if found is not None and found.has_tiles and weight.dtype == torch.bfloat16 and weight.shape[1] % PANEL == 0:
        return TileProduct(found, weight, bias, pages)
    if found is not None and weight.dtype in NAMES:
        return LaneProduct(found, weight, bias, pages)
    return PackedProduct(weight, bias)


class PackedLinear(nn.Module):
    """In the place of a column- or row-parallel layer. [.., in] → [.., out]."""

    def __init__(self, plain: Parallel, pages: LargePages) -> None:
        super().__init__()
        self.axis = plain.region.axis if isinstance(plain, RowParallelLinear) and plain.region.axis.size > 1 else None
        self._bias = plain.bias
        self.product = product_of(plain.weight.detach(), None if self.axis else plain.bias, pages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x)
        if self.axis is None:
            return y
        y = reduce_from(y, self.axis)
        return y if self._bias is None else y + self._bias


class JoinedProjections(nn.Module):
    """In the place of `project`: x [.., in] → views [.., out_i] of one product. The layers are not looked at."""

    def __init__(self, layers: Sequence[ColumnParallelLinear], pages: LargePages) -> None:
        super().__init__()
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers))
        self._sizes = [layer.weight.shape[0] for layer in layers]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.product = product_of(weight, torch.cat(biases) if biases else None, pages)

    def forward(self, x: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...]:
        return self.product(x).split(self._sizes, -1)


def pack(model: nn.Module) -> int:
    """Lay the weights of all linear layers out for this processor, where it can be done; how many were.

    The plain weight of a packed layer is given up, unless it is an embedding's too.
    """
    if kernels() is None and not torch.backends.mkldnn.is_available():
        return 0
    num_packed, pages = 0, LargePages()
    try:
        for module, layers in list(_together(model)):
            module.project = JoinedProjections(layers, pages)
            for layer in layers:
                layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
            num_packed += len(layers)
        for path, single in list(_packable(model)):
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLinear(single, pages))
            num_packed += 1
    except (AttributeError, RuntimeError):  # no such operator in this build of PyTorch, or not for this weight
        pass
    return num_packed


def is_packable(layer: nn.Module) -> bool:
    """Whether :func:`pack` lays its weight out anew."""
    if not isinstance(layer, Parallel) or layer.weight.device.type != "cpu" or not layer.weight.numel():
        return False
    return layer.weight.dtype in PACKED_DTYPES


def _together(model: nn.Module) -> Iterator[tuple[nn.Module, list[ColumnParallelLinear]]]:
    for module in model.modules():
        layers = [layer for name in TOGETHER.get(type(module), ()) if (layer := getattr(module, name)) is not None]
        if layers and all(is_packable(layer) for layer in layers):
            yield module, layers


def _packable(model: nn.Module) -> Iterator[tuple[str, Parallel]]:
    for path, layer in model.named_modules():
        if is_packable(layer):
            yield path, layer
