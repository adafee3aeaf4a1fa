"""What a server's products and its own code take on CPU ranks, measured by all ranks at once.

few rows   seconds of [rows, k] × [k, n] with weights that the server has laid out, many in turn: decoding
           reads each weight once for a few rows, at rates that neither memory bandwidth nor large products tell
host       steps of models so small that only the code around the products takes time: what each step, each layer
           and each sequence adds
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from meshwright.comm.mesh import Mesh
from meshwright.core.model import ModelSpec
from meshwright.core.profile import Server
from meshwright.models.build import build
from meshwright.serve.engine import Engine
from meshwright.serve.linear import product_of
from meshwright.serve.native import LargePages
from meshwright.serve.options import ServeOptions
from meshwright.serve.ranks import Alone
from meshwright.serve.request import SamplingParams

ROWS = (1, 4, 16, 64)
NUM_WEIGHTS, OUTPUTS, INPUTS = 24, 3072, 1024
"""Together larger than a cache, each of a usual size."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL = ModelSpec(
    name="small", family="llama", vocab_size=256, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2,
    head_dim=16, ffn_size=64, max_positions=256, norm="rmsnorm", positions="rope", activation="silu", gated_mlp=True,
)  # fmt: skip
FEW_LAYERS, MORE_LAYERS, SEQUENCES, STEPS = 2, 6, 8, 25


Timer = Callable[[Callable[[], object]], float]
"""Seconds of a call that all ranks make at once."""


def measure_server(mesh: Mesh, seconds: Timer, mean: Callable[[float], float]) -> Server:
    """All of it. All ranks call it together.

    Args:
        mesh: of all ranks, none of them along tp or pp.
        seconds: times a call on all ranks at once.
        mean: over the ranks.
    """
    base_s = mean(_step_s(mesh, FEW_LAYERS, 1))
    layer_s = max(0.0, mean(_step_s(mesh, MORE_LAYERS, 1)) - base_s) / (MORE_LAYERS - FEW_LAYERS)
    sequence_s = max(0.0, mean(_step_s(mesh, FEW_LAYERS, SEQUENCES)) - base_s) / (SEQUENCES - 1)
    return Server(
        few_rows=tuple(_few_rows(seconds)),
        step_s=max(0.0, base_s - FEW_LAYERS * layer_s - sequence_s),
        layer_s=layer_s,
        sequence_s=sequence_s,
    )


def _few_rows(seconds: Timer) -> Iterator[tuple[str, int, float]]:
    """(dtype, rows, FLOP/s) of each dtype that the server has a product for."""
    for name, dtype in DTYPES.items():
        pages = LargePages()
        try:
            products = [product_of(torch.ones(OUTPUTS, INPUTS, dtype=dtype), None, pages) for _ in range(NUM_WEIGHTS)]
        except (AttributeError, RuntimeError):  # this processor, or build of PyTorch, has none
            continue
        for rows in ROWS:
            x = torch.ones(1, rows, INPUTS, dtype=dtype)
            flops = 2 * rows * OUTPUTS * INPUTS * NUM_WEIGHTS
            yield name, rows, flops / seconds(partial(_all, products, x))


def _all(products: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> None:
    for product in products:
        product(x)


def _step_s(mesh: Mesh, num_layers: int, num_sequences: int) -> float:
    """The median of a step that decodes."""
    model = build(SMALL.model_copy(update={"num_layers": num_layers}), "cpu", torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    engine = Engine(model, options=ServeOptions(num_blocks=64, prefix_cache=False), mesh=mesh, ranks=Alone)
    params = SamplingParams(max_tokens=STEPS + 4, temperature=0, ignore_eos=True)
    for at in range(num_sequences):
        engine.submit([at] * 8, params)
    times = []
    while not engine.is_idle:
        began_s = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[2:-2])
