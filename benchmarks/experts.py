"""The dropless layer of experts beside its matrix products alone, a plain loop over experts, and transformers' block.

    python benchmarks/experts.py [--experts 8 64] [--repeats 6] [--kept]

One thread, fp32, 4,096 tokens, top-2, forward + backward; CPU time of runs in turn: medians, and medians and quartiles
of ratios within a turn. `products`: the matrix products alone, of the same rows. `as trained`: the layer with gradients
that have their place, as a run of ours gives it; all others have new ones. The loop and transformers' block (its
default and its eager experts) have the same router and weights of the same shapes.

With --kept the process keeps what is freed, so that nobody's tensors, as the products', lie in pages that the operating
system has yet to make.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from meshwright.core.model import ModelSpec
from meshwright.core.router import RouterSpec
from meshwright.core.sources import load_model
from meshwright.models.decoder import _moe
from meshwright.models.experts import MoE
from meshwright.parallel.states import GradientSink

CONTENDERS = ("products", "as trained", "ours", "loop", "grouped_mm", "eager")
TOKENS, HIDDEN = 4096, 1024
SIZES = {8: 1024, 64: 512}
"""Number of experts → their inner width."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt."""


def spec_of(num_experts: int) -> ModelSpec:
    change = {"hidden_size": HIDDEN, "ffn_size": SIZES[num_experts], "num_experts": num_experts}
    return load_model("demo-moe").model_copy(update={**change, "router": RouterSpec(renormalise="before_drop")})


def layer_of(spec: ModelSpec) -> MoE:
    layer = _moe(spec, torch.device("cpu"), torch.float32)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return layer


def loop_over(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """Every expert by itself, over the tokens that chose it."""
    weights, choice = layer.router(x)
    tokens, experts, out = x.flatten(0, 1), layer.experts, torch.zeros_like(x.flatten(0, 1))
    for expert in range(experts.num_experts):
        token, place = torch.where(choice.experts == expert)
        rows = tokens[token]
        inner = F.silu(rows @ experts.gate.weight[expert].t()) * (rows @ experts.up.weight[expert].t())
        own = (inner @ experts.down.weight[expert].t()) * weights[token, place, None]
        out = out.index_add(0, token, own)
    return out.view_as(x)


class Products:
    """The nine products of each expert and step, of the loads that the router gives, into memory that is there."""

    def __init__(self, layer: MoE, x: torch.Tensor) -> None:
        experts = layer.experts
        self._weights = [part.weight.detach() for part in (experts.gate, experts.up, experts.down)]
        self._gradients = [torch.zeros_like(weight) for weight in self._weights]
        with torch.no_grad():
            loads: list[int] = layer.router(x)[1].loads(experts.num_experts).tolist()
        self._loads, ffn = loads, self._weights[0].shape[1]
        self._rows, self._out = torch.randn(sum(loads), HIDDEN), torch.zeros(sum(loads), HIDDEN)
        self._gate, self._up, self._inner = (torch.randn(sum(loads), ffn) for _ in range(3))

    @torch.no_grad()
    def __call__(self) -> float:
        """CPU seconds."""
        began_s, start = time.process_time(), 0
        for expert, load in enumerate(self._loads):
            run, start = slice(start, start + load), start + load
            self._forward([weight[expert] for weight in self._weights], run)
        start = 0
        for expert, load in enumerate(self._loads):
            run, start = slice(start, start + load), start + load
            tensors = [
                (weight[expert], grad[expert]) for weight, grad in zip(self._weights, self._gradients, strict=True)
            ]
            self._backward(tensors, run)
        return time.process_time() - began_s

    def _forward(self, weights: list[torch.Tensor], run: slice) -> None:
        gate, up, down = weights
        torch.mm(self._rows[run], gate.t(), out=self._gate[run])
        torch.mm(self._rows[run], up.t(), out=self._up[run])
        torch.mm(self._inner[run], down.t(), out=self._out[run])

    def _backward(self, tensors: list[tuple[torch.Tensor, torch.Tensor]], run: slice) -> None:
        (gate, of_gate), (up, of_up), (down, of_down) = tensors
        torch.mm(self._rows[run], down, out=self._gate[run])
        torch.mm(self._gate[run], gate, out=self._out[run])
        torch.mm(self._up[run], up, out=self._out[run])
        torch.mm(self._gate[run].t(), self._rows[run], out=of_gate)
        torch.mm(self._up[run].t(), self._rows[run], out=of_up)
        torch.mm(self._rows[run].t(), self._inner[run], out=of_down)


def as_trained(layer: MoE) -> list[GradientSink]:
    """The layer with the places of gradients that a run gives it; who keeps them calls `start_step`."""
    sinks = []
    for name in ("gate", "up", "down"):
        part = getattr(layer.experts, name)
        sink = GradientSink(torch.zeros_like(part.weight), 1)
        part.write = sink.add_product
        sinks.append(sink)
    return sinks


def theirs(spec: ModelSpec, implementation: str) -> torch.nn.Module:
    """transformers' Mixtral block."""
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = transformers.MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=spec.ffn_size,
        num_local_experts=spec.num_experts,
        num_experts_per_tok=spec.experts_per_token,
        experts_implementation=implementation,
    )
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return block


def cpu_s(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, module: torch.nn.Module) -> float:
    module.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    began_s = time.process_time()
    run(leaf).backward(x)
    return time.process_time() - began_s


def trained_s(layer: MoE, x: torch.Tensor, sinks: list[GradientSink]) -> float:
    """CPU seconds of the layer as a run trains it."""
    for sink in sinks:
        sink.start_step()
    return cpu_s(layer, x, layer)


def keep_freed_memory() -> None:
    """From here on glibc gives nothing back to the operating system."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # as unsigned: never


def rounds(num_experts: int, x: torch.Tensor, repeats: int) -> list[list[float]]:
    """CPU seconds of all in turn; the first round is left out."""
    spec = spec_of(num_experts)
    layer, trained = layer_of(spec), layer_of(spec)
    products, sinks = Products(trained, x), as_trained(trained)
    blocks = [theirs(spec, kind) for kind in ("grouped_mm", "eager")]
    found = []
    for _ in range(repeats + 1):
        row = [
            products(),
            trained_s(trained, x, sinks),
            cpu_s(layer, x, layer),
            cpu_s(partial(loop_over, layer), x, layer),
        ]
        found.append([*row, *(cpu_s(block, x, block) for block in blocks)])
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--experts", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--kept", action="store_true")
    given = parser.parse_args()
    if given.kept:
        keep_freed_memory()
    torch.set_num_threads(1)
    x = torch.randn(4, TOKENS // 4, HIDDEN)
    print(f"{'experts':>10}" + "".join(f"{name:>16}" for name in CONTENDERS))
    for num_experts in given.experts:
        found = rounds(num_experts, x, given.repeats)
        columns = list(zip(*found, strict=True))
        print(f"{num_experts:10}" + "".join(f"{1e3 * statistics.median(column):14.0f}ms" for column in columns))
        for what, at in (("as trained", 1), ("ours", 2)):
            ratios = [[row[at] / row[other] for row in found] for other in range(len(CONTENDERS))]
            print(f"{what:>10}" + "".join(f"{_quartiles(column):>16}" for column in ratios))


def _quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} {low:.2f}-{high:.2f}"


if __name__ == "__main__":
    main()
