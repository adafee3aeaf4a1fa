"""The dropless layer of experts beside its matrix products alone, a plain loop over experts, and transformers' block.

    python benchmarks/experts.py

One thread, fp32, 4,096 tokens, top-2, forward + backward; CPU time, medians of runs in turn. The loop and transformers'
block (its default and its eager experts) have the same router and weights of the same shapes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from meshwright.core.model import ModelSpec
from meshwright.core.router import RouterSpec
from meshwright.core.sources import load_model
from meshwright.models.decoder import _moe
from meshwright.models.experts import MoE

TOKENS, HIDDEN = 4096, 1024
SIZES = {8: 1024, 64: 512}
"""Number of experts → their inner width."""
REPEATS = 4


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


def products_alone(layer: MoE, x: torch.Tensor) -> float:
    """Seconds of the nine products of each expert and step, of an even load, into memory that is there."""
    experts, rows_each = layer.experts, 2 * TOKENS // layer.experts.num_experts
    ffn = experts.up.weight.shape[1]
    rows, inner = torch.randn(rows_each, HIDDEN), torch.randn(rows_each, ffn)
    out_f, out_h = torch.empty(rows_each, ffn), torch.empty(rows_each, HIDDEN)
    grad_up, grad_down = torch.empty(ffn, HIDDEN), torch.empty(HIDDEN, ffn)
    began_s = time.process_time()
    with torch.no_grad():
        for e in range(experts.num_experts):
            up, down = experts.up.weight[e], experts.down.weight[e]
            for _ in range(2):  # gate and up
                torch.mm(rows, up.t(), out=out_f)
                torch.mm(inner, up, out=out_h)
                torch.mm(inner.t(), rows, out=grad_up)
            torch.mm(inner, down.t(), out=out_h)
            torch.mm(rows, down, out=out_f)
            torch.mm(rows.t(), inner, out=grad_down)
    return time.process_time() - began_s


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


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(4, TOKENS // 4, HIDDEN)
    print(f"{'experts':>8}{'products alone':>16}{'ours':>10}{'loop':>10}{'theirs':>10}{'eager':>10}   ours ÷ each")
    for num_experts in SIZES:
        spec = spec_of(num_experts)
        layer = layer_of(spec)
        blocks = [theirs(spec, kind) for kind in ("grouped_mm", "eager")]
        rounds = []
        for _ in range(REPEATS):
            row = [products_alone(layer, x), cpu_s(layer, x, layer), cpu_s(partial(loop_over, layer), x, layer)]
            rounds.append([*row, *(cpu_s(block, x, block) for block in blocks)])
        alone, ours, *others = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        ratios = " ".join(f"{ours / other:.2f}" for other in (alone, *others))
        times = "".join(f"{1e3 * seconds:8.0f}ms" for seconds in (ours, *others))
        print(f"{num_experts:8}{1e3 * alone:14.0f}ms{times}   {ratios}")


if __name__ == "__main__":
    main()
