"""Published training layouts that are dense, 3D and ZeRO 0 or 1: each is a legal Plan, and its degrees multiply out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from meshwright.core.job import Job
from meshwright.core.layouts import Expert
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.planner.price import Pricer
from meshwright.planner.rank import plan


@dataclass(frozen=True)
class Published:
    """One row: shape, devices, degrees, global batch. Sequences of 2,048 tokens unless stated."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    num_devices: int
    tp: int
    pp: int
    dp: int
    batch: int
    zero: int = 0
    seq_length: int = 2048
    memory_gb: int = 80


ROWS = (
    # Narayanan et al. 2021, table 1
    Published("gpt-145.6b", 80, 12288, 96, 51200, 1536, 8, 8, 24, 2304),
    Published("gpt-310.1b", 96, 16384, 128, 51200, 1920, 8, 16, 15, 2160),
    Published("gpt-529.6b", 105, 20480, 128, 51200, 2520, 8, 35, 9, 2520),
    Published("gpt-1t", 128, 25600, 160, 51200, 3072, 8, 64, 6, 3072),
    # the same, section 5.2: GPT-3 beside ZeRO-3
    Published("gpt-3-175b, 384", 96, 12288, 96, 51200, 384, 8, 12, 4, 1536),
    Published("gpt-3-175b, 768", 96, 12288, 96, 51200, 768, 8, 12, 8, 1536),
    Published("gpt-3-175b, 1536", 96, 12288, 96, 51200, 1536, 8, 12, 16, 1536),
    # Smith et al. 2022
    Published("mt-nlg-530b, 2240", 105, 20480, 128, 50304, 2240, 8, 35, 8, 1920),
    Published("mt-nlg-530b, 2800", 105, 20480, 128, 50304, 2800, 8, 35, 10, 1920),
    Published("mt-nlg-530b, 3360", 105, 20480, 128, 50304, 3360, 8, 35, 12, 1920),
    # Black et al. 2022: batch 3.15M tokens
    Published("gpt-neox-20b", 44, 6144, 64, 50432, 96, 2, 4, 12, 1536, zero=1, memory_gb=40),
    # Le Scao et al. 2022
    Published("bloom-176b", 70, 14336, 112, 250880, 384, 4, 12, 8, 2048, zero=1),
    # Zeng et al. 2022: batch 4,224
    Published("glm-130b", 70, 12288, 96, 150528, 768, 4, 8, 24, 4224, memory_gb=40),
)  # fmt: skip


def build(row: Published, model, cluster) -> Plan:
    spec = model(
        name=row.name, num_layers=row.num_layers, hidden_size=row.hidden_size, num_heads=row.num_heads,
        num_kv_heads=row.num_heads, head_dim=row.hidden_size // row.num_heads, ffn_size=4 * row.hidden_size,
        vocab_size=row.vocab_size, activation="gelu", gated_mlp=False, max_positions=row.seq_length,
    )  # fmt: skip
    strategy = Strategy(
        dp=row.dp, tp=row.tp, pp=row.pp, zero=row.zero, num_micro_batches=row.batch // row.dp, precision="bf16"
    )
    machines = cluster(row.num_devices // 8, 8, memory_bytes=row.memory_gb * 2**30)
    return Plan(
        model=spec, cluster=machines, job=Job(seq_length=row.seq_length, global_batch_size=row.batch), strategy=strategy
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_published_layout_is_a_legal_plan(row, model, cluster):
    built = build(row, model, cluster)
    assert built.strategy.tp * built.strategy.pp * built.strategy.dp == row.num_devices == built.cluster.num_devices
    assert built.strategy.dp * built.strategy.num_micro_batches * built.strategy.micro_batch_size == row.batch
    assert sum(len(layers) for layers in built.strategy.stage_layers(row.num_layers)) == row.num_layers
    assert Plan.from_toml(built.to_toml()) == built


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-145.6b", 145.6), ("gpt-310.1b", 310.1), ("gpt-529.6b", 529.6), ("gpt-1t", 1008.0), ("bloom-176b", 176.2)],
)
def test_the_shapes_are_those_published(name, billions, model, cluster):
    """Our table has an untied head and no biases; the published counts are tied: take one vocabulary matrix off."""
    row = next(r for r in ROWS if r.name == name)
    spec = build(row, model, cluster).model
    assert (spec.num_parameters - row.vocab_size * row.hidden_size) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_llama_3_405b_at_8k_gpus(model, cluster):
    """Llama 3 §3.3: 8,192 H100, tp 8, pp 16, dp 64 (its ZeRO differs), 126 layers with fewer at the ends."""
    spec = model(
        name="llama-3-405b", num_layers=126, hidden_size=16384, num_heads=128, num_kv_heads=8, head_dim=128,
        ffn_size=53248, vocab_size=128256, max_positions=8192,
    )  # fmt: skip
    counts = (7, *[8] * 14, 7)
    for dp, batch in ((64, 2048), (128, 2048)):
        strategy = Strategy(
            dp=dp, tp=8, pp=16, zero=1, num_micro_batches=batch // dp, precision="bf16", layers_per_stage=counts
        )
        built = Plan(
            model=spec,
            cluster=cluster(dp * 16, 8),
            job=Job(seq_length=8192, global_batch_size=batch),
            strategy=strategy,
        )
        assert built.strategy.world_size == {64: 8192, 128: 16384}[dp]


def test_the_planner_finds_the_layout_that_bloom_was_trained_with(model, cluster):
    """Le Scao et al. 2022, §3.2: tp 4, pp 12, dp 8 and ZeRO-1 on 384 A100."""
    row = next(r for r in ROWS if r.name == "bloom-176b")
    published = build(row, model, cluster)
    ranked = plan(published.model, published.cluster, published.job).ranked
    assert (8, 4, 12, 1) in [(f.strategy.dp, f.strategy.tp, f.strategy.pp, f.strategy.zero) for f in ranked[:3]]


def test_deepseek_v3_at_2048_gpus():
    """DeepSeek-AI 2024 (V3), §3.2 and §4.2: 2,048 H800 of 80 GB, no tensor parallelism, pp 16 by DualPipe, ep 64 over
    8 nodes, ZeRO-1, 15,360 sequences of 4,096 tokens.

    Theirs keeps activations in 8 bits, and recomputes norms, up-projections and SwiGLU. Here W keeps what it needs in
    16 bits, so that DualPipe fits the next device's memory; 1F1B with recomputation fits theirs. 18 bytes a parameter.
    """
    spec, job = load_model("deepseek-v3"), Job(seq_length=4096, global_batch_size=15360)
    layout = {"dp": 128, "pp": 16, "expert": Expert(degree=64), "zero": 1, "num_micro_batches": 120,
              "recompute": "full", "precision": "bf16"}  # fmt: skip
    fits = {}
    for schedule in ("dualpipe", "1f1b"):
        for device in ("h100", "h200"):
            machines = load_cluster(f"256x8x{device}")
            built = Plan(model=spec, cluster=machines, job=job, strategy=Strategy(schedule=schedule, **layout))
            assert built.strategy.world_size == 2048
            found = Pricer(spec, machines, job).forecast(built.strategy)
            fits[schedule, device] = found.fits
    assert fits == {
        ("dualpipe", "h100"): False, ("dualpipe", "h200"): True, ("1f1b", "h100"): True, ("1f1b", "h200"): True,
    }  # fmt: skip
