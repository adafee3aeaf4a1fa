"""The dropless layer of experts beside its matrix products alone, a plain loop over experts, and transformers' block.

    python benchmarks/experts.py [--experts 8 64] [--repeats 6] [--precision fp32 bf16] [--only trained] [--kept]

One thread, 4,096 tokens, top-2, forward + backward; CPU time of runs in turn, each turn beginning with another one:
medians, and medians and quartiles of ratios within a turn. `trained`: the layer with gradients that have their place,
as a run of ours gives it; all others have new ones. The loop and transformers' block (its default and its eager
experts) have the same router and weights of the same shapes.

`products`: the nine matrix products of each expert alone, of the loads that the router gives: the shapes, transposes
and order of the layer, each result in its own memory as there, by the same calls. They are favoured in one thing: their
memory is there before, where the layer has new rows in every step, as whatever trains has.

With --kept the process keeps what is freed, so that nobody's tensors lie in pages that the operating system has yet to
make.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, product

import torch
import torch.nn.functional as F

from meshwright.core.model import ModelSpec
from meshwright.core.router import RouterSpec
from meshwright.core.sources import load_model
from meshwright.models.decoder import _moe
from meshwright.models.experts import MoE
from meshwright.parallel.states import GradientSink

CONTENDERS = ("products", "trained", "ours", "loop", "grouped_mm", "eager")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS, HIDDEN = 4096, 1024
SIZES = {8: 1024, 64: 512}
"""Number of experts → their inner width."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt."""


def spec_of(num_experts: int) -> ModelSpec:
    change = {"hidden_size": HIDDEN, "ffn_size": SIZES[num_experts], "num_experts": num_experts}
    return load_model("demo-moe").model_copy(update={**change, "router": RouterSpec(renormalise="before_drop")})


def layer_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> MoE:
    layer = _moe(spec, torch.device("cpu"), dtype)
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
        out = out.index_add(0, token, own.to(x.dtype))
    return out.view_as(x)


class Products:
    """The nine products of each expert and step, of the loads that the router gives, into memory that is there."""

    def __init__(self, layer: MoE, x: torch.Tensor) -> None:
        experts = layer.experts
        self._weights = [part.weight.detach() for part in (experts.gate, experts.up, experts.down)]
        self._gradients = [torch.zeros_like(weight) for weight in self._weights]
        with torch.no_grad():
            loads: list[int] = layer.router(x)[1].loads(experts.num_experts).tolist()
        ends = list(accumulate(loads))
        self._runs = [slice(end - load, end) for load, end in zip(loads, ends, strict=True)]
        self._rows, self._out, self._grad, self._grad_rows = (
            torch.randn(ends[-1], HIDDEN).to(x.dtype) for _ in range(4)
        )
        self._gate, self._up, self._inner = (
            torch.randn(ends[-1], self._weights[0].shape[1]).to(x.dtype) for _ in range(3)
        )
        self._grad_inner = torch.empty_like(self._inner[: max(loads)])

    @torch.no_grad()
    def __call__(self) -> float:
        """CPU seconds."""
        began_s = time.process_time()
        for run, *weights in zip(self._runs, *self._weights, strict=True):
            self._forward(weights, run)
        for run, *tensors in zip(self._runs, *self._weights, *self._gradients, strict=True):
            self._backward(tensors, run)
        return time.process_time() - began_s

    def _forward(self, weights: list[torch.Tensor], run: slice) -> None:
        gate, up, down = weights
        torch.mm(self._rows[run], gate.t(), out=self._gate[run])
        torch.mm(self._rows[run], up.t(), out=self._up[run])
        torch.mm(self._inner[run], down.t(), out=self._out[run])

    def _backward(self, tensors: list[torch.Tensor], run: slice) -> None:
        gate, up, down, of_gate, of_up, of_down = tensors
        torch.mm(self._grad[run], down, out=self._grad_inner[: run.stop - run.start])
        torch.mm(self._up[run], up, out=self._grad_rows[run])
        self._grad_rows[run].addmm_(self._gate[run], gate)
        of_gate.addmm_(self._gate[run].t(), self._rows[run], beta=0)
        of_up.addmm_(self._up[run].t(), self._rows[run], beta=0)
        of_down.addmm_(self._grad[run].t(), self._inner[run], beta=0)


def as_trained(layer: MoE) -> list[GradientSink]:
    """The layer with the places of gradients that a run gives it; who keeps them calls `start_step`."""
    sinks = []
    for name in ("gate", "up", "down"):
        part = getattr(layer.experts, name)
        sink = GradientSink(torch.zeros_like(part.weight), 1)
        part.write = sink.take_runs
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


def contenders(num_experts: int, x: torch.Tensor) -> dict[str, Callable[[], float]]:
    """Name → what returns the CPU seconds of a step of it."""
    spec = spec_of(num_experts)
    layer, trained = layer_of(spec, x.dtype), layer_of(spec, x.dtype)
    sinks = as_trained(trained)
    blocks = {kind: theirs(spec, kind).to(x.dtype) for kind in ("grouped_mm", "eager")}
    return {
        "products": Products(trained, x),
        "trained": partial(trained_s, trained, x, sinks),
        "ours": partial(cpu_s, layer, x, layer),
        "loop": partial(cpu_s, partial(loop_over, layer), x, layer),
        **{kind: partial(cpu_s, block, x, block) for kind, block in blocks.items()},
    }


def rounds(steps: Sequence[Callable[[], float]], repeats: int) -> list[list[float]]:
    """CPU seconds of all in turn; the first round is left out."""
    found = []
    for turn in range(repeats + 1):
        row = [0.0] * len(steps)
        for at in range(len(steps)):
            place = (turn + at) % len(steps)
            row[place] = steps[place]()
        found.append(row)
    return found[1:]


def compare(num_experts: int, x: torch.Tensor, names: Sequence[str], repeats: int, what: str) -> None:
    """Print a line of times, and one of ratios for each layer of ours."""
    all_steps = contenders(num_experts, x)
    found = rounds([all_steps[name] for name in names], repeats)
    columns = list(zip(*found, strict=True))
    print(f"{what:>10}" + "".join(f"{1e3 * statistics.median(column):14.0f}ms" for column in columns))
    for at, name in enumerate(names):
        if name in ("trained", "ours"):
            ratios = [[row[at] / row[other] for row in found] for other in range(len(names))]
            print(f"{name:>10}" + "".join(f"{_quartiles(column):>16}" for column in ratios), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--experts", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="beside products")
    parser.add_argument("--kept", action="store_true")
    given = parser.parse_args()
    if given.kept:
        keep_freed_memory()
    torch.set_num_threads(1)
    names = [name for name in CONTENDERS if name in ("products", *(given.only or CONTENDERS))]
    print(f"{'experts':>10}" + "".join(f"{name:>16}" for name in names))
    for num_experts, precision in product(given.experts, given.precision):
        x = torch.randn(4, TOKENS // 4, HIDDEN).to(DTYPES[precision])
        compare(num_experts, x, names, given.repeats, f"{num_experts} {precision}")


def _quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} {low:.2f}-{high:.2f}"


if __name__ == "__main__":
    main()
