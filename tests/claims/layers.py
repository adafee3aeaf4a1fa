"""Claims about one layer and its shards: 10 to 15, 30, 31."""

from __future__ import annotations

from meshwright.core.job import Job
from meshwright.core.placement import kv_replicas, param_box
from meshwright.core.rules import violations
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import layer_terms, total_bytes
from meshwright.cost.flops import layer_forward_terms
from tests.claims.claim import Answer, Claim

LLAMA = load_model("llama-2-70b")
PARAMETERS = {p.name: p for p in LLAMA.parameters()}


def shapes(name: str) -> Answer:
    """A weight of the first layer, stored [out, in], whole and on one of 8 ranks."""
    param = PARAMETERS[f"layers.0.{name}.weight"]
    return {"whole [out, in]": param.shape, "of 8": param_box(LLAMA, param, Strategy(tp=8).grid, 0).sizes}


def all_reduces(part: str, measured: Answer) -> Answer:
    agrees, forward, backward = measured[part]
    return {"as on one process": agrees, "all-reduces forward": forward, "backward": backward}


def heads() -> Answer:
    def local(name: str, tp: int) -> int:
        return (
            param_box(LLAMA, PARAMETERS[f"layers.0.attention.{name}.weight"], Strategy(tp=tp).grid, 0).sizes[0]
            // LLAMA.head_dim
        )

    job = Job(seq_length=4096, global_batch_size=1)
    broken = violations(Strategy(tp=3), LLAMA, load_cluster("3xh100"), job)
    return {
        "T=8, query and key/value heads": (local("q", 8), local("k", 8)),
        "T=16": (local("q", 16), local("k", 16)),
        "T=16, replicas of a key/value head": kv_replicas(LLAMA, 16),
        "T=3": broken[0].rule.id,
    }


def attention_flops(seq_length: int) -> int:
    """Scores, and their product with the values, of one sequence in one layer of GPT-3."""
    terms = layer_forward_terms(load_model("gpt-3-175b"), seq_length)
    return seq_length * sum(term.flops for term in terms if term.name.startswith("attention "))


def growth() -> Answer:
    short, long = 4096, 32768
    kept = [total_bytes(layer_terms(LLAMA, Strategy(precision="bf16"), 1, s)) for s in (short, long)]
    return {
        "score FLOPs": attention_flops(long) / attention_flops(short),
        "activations with flash attention": kept[1] / kept[0],
    }


def ffn_ratios() -> Answer:
    specs = {name: load_model(name) for name in ("gpt-3-175b", "llama-2-7b", "llama-2-70b")}
    return {name: spec.ffn_size / spec.hidden_size for name, spec in specs.items()}


CLAIMS = [
    Claim(
        10, "column parallel: Wᵢ is d_in × d_out/p, and Y = [Yᵢ]", ("core.placement.param_box", "parallel.tensor"),
        lambda measured: {**shapes("mlp.up"), **all_reduces("column layer", measured)},
        {
            "whole [out, in]": (28672, 8192), "of 8": (3584, 8192), "as on one process": True,
            "all-reduces forward": 0, "backward": 1,
        },
        "holds for forward; the gradient of the input needs an all-reduce, one for all layers of the same input (12)",
        on_ranks=True,
    ),
    Claim(
        11, "row parallel: Y = Σ Zᵢ, one all-reduce", ("core.placement.param_box", "parallel.tensor"),
        lambda measured: {**shapes("mlp.down"), **all_reduces("row layer", measured)},
        {
            "whole [out, in]": (8192, 28672), "of 8": (8192, 3584), "as on one process": True,
            "all-reduces forward": 1, "backward": 0,
        },
        "holds; none in backward",
        on_ranks=True,
    ),
    Claim(
        12, "an MLP of columns, then rows, needs one all-reduce, after the second matrix", ("parallel.tensor",),
        lambda measured: all_reduces("mlp", measured),
        {"as on one process": True, "all-reduces forward": 1, "backward": 1}, "one forward, and one more in backward",
        on_ranks=True,
    ),
    Claim(
        13, "d_ffn is about 4·d_model", ("core.sources.load_model",), lambda _: ffn_ratios(),
        {"gpt-3-175b": 4.0, "llama-2-7b": 2.6875, "llama-2-70b": 3.5}, "of plain MLPs; gated ones take 8/3 to 3.5",
    ),
    Claim(
        14, "each rank has h/p heads", ("core.placement.param_box", "core.rules.violations"), lambda _: heads(),
        {
            "T=8, query and key/value heads": (8, 1), "T=16": (4, 1), "T=16, replicas of a key/value head": 2,
            "T=3": "tp-heads",
        },
        "T must divide the heads; fewer key/value heads than ranks are replicated",
    ),
    Claim(
        15, "the output projection of attention usually needs one communication", ("parallel.tensor",),
        lambda measured: all_reduces("attention", measured),
        {"as on one process": True, "all-reduces forward": 1, "backward": 1}, "holds for forward; one more in backward",
        on_ranks=True,
    ),
    Claim(
        30, "attention costs O(s²·h)", ("cost.flops.layer_forward_terms",),
        lambda _: {"forward FLOPs per layer / s²h": attention_flops(2048) / (2048**2 * 12288)},
        {"forward FLOPs per layer / s²h": 4.0}, "4·s²·h per layer and sequence, forward, full mask",
    ),
    Claim(
        31, "from 4K to 32K tokens the score matrix grows 64 times",
        ("cost.flops.layer_forward_terms", "cost.activations.layer_terms"), lambda _: growth(),
        {"score FLOPs": 64.0, "activations with flash attention": 8.0},
        "holds for scores and their FLOPs; flash attention never stores them, so kept activations grow 8 times",
    ),
]  # fmt: skip
