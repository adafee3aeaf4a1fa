"""Tiny models and plans for tests of parallel runs."""

from __future__ import annotations

from typing import Any

from meshwright.core.cluster import ClusterSpec, Device, Link
from meshwright.core.job import Job
from meshwright.core.latent import LatentAttention, YarnScaling
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.router import RouterSpec
from meshwright.core.strategy import Strategy

SEQ_LENGTH = 8


def llama(**changes: Any) -> ModelSpec:
    """Gated, RMSNorm, rotary, grouped key/value heads; odd vocabulary, layers that few degrees divide."""
    shape: dict[str, Any] = {
        "name": "tiny-llama", "family": "llama", "vocab_size": 29, "hidden_size": 16, "num_layers": 5,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "ffn_size": 24, "max_positions": 64, "norm": "rmsnorm",
        "positions": "rope", "activation": "silu", "gated_mlp": True, "tied_embeddings": False,
    }  # fmt: skip
    return ModelSpec(**{**shape, **changes})


def qwen3(**changes: Any) -> ModelSpec:
    """Norms on q and k, tied embeddings, one key/value head: every kind of partial gradient at once."""
    return llama(**{"name": "tiny-qwen3", "family": "qwen3", "qk_norm": True, "tied_embeddings": True,
                    "num_kv_heads": 1, **changes})  # fmt: skip


def gpt2(**changes: Any) -> ModelSpec:
    """LayerNorm, learned positions, biases everywhere, plain MLP, tied embeddings."""
    return llama(**{"name": "tiny-gpt2", "family": "gpt2", "norm": "layernorm", "positions": "learned",
                    "activation": "gelu_tanh", "gated_mlp": False, "qkv_bias": True, "out_bias": True,
                    "mlp_bias": True, "tied_embeddings": True, "num_kv_heads": 4, **changes})  # fmt: skip


def mixture(router: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    """Four layers, the first of them dense; eight experts, two per token."""
    gate = {"renormalise": "before_drop", "balance_loss": 0.1, "z_loss": 0.05, **(router or {})}
    shape = {"name": "tiny-moe", "family": "mixture", "num_layers": 4, "num_experts": 8, "experts_per_token": 2,
             "expert_ffn_size": 8, "dense_layers": (0,), "router": RouterSpec(**gate)}  # fmt: skip
    return llama(**{**shape, **changes})


def latent(q_lora_rank: int | None = 12, **changes: Any) -> ModelSpec:
    """Multi-head latent attention: values narrower than keys, scores scaled; four heads."""
    sizes = LatentAttention(
        q_lora_rank=q_lora_rank, kv_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3
    )
    yarn = YarnScaling(factor=4.0, original_max_positions=4, mscale=0.7, mscale_all_dim=1.0)
    shape = {"name": "tiny-latent", "family": "deepseek_v3", "num_layers": 3, "num_kv_heads": 4, "head_dim": 6,
             "latent": sizes, "rope_scaling": yarn}  # fmt: skip
    return llama(**{**shape, **changes})


def cluster(num_ranks: int, num_nodes: int = 1) -> ClusterSpec:
    """CPU ranks of one machine (or what a plan takes for several), with round numbers."""
    device = Device(
        name="cpu", memory_bytes=10**9, memory_bandwidth_bytes_per_s=1e10, peak_flops_per_s={"fp32": 1e10, "fp64": 5e9}
    )
    link = Link(name="loopback", bandwidth_bytes_per_s=1e9, latency_s=1e-4)
    return ClusterSpec(
        name="test", num_nodes=num_nodes, devices_per_node=num_ranks // num_nodes, device=device,
        intra_link=link, inter_link=link, backend="gloo",
    )  # fmt: skip


def make_job(split: Strategy, num_nodes: int = 1) -> tuple[ClusterSpec, Job]:
    """The cluster and the batch that follow from a strategy."""
    batch = split.dp * split.num_micro_batches * split.micro_batch_size
    return cluster(split.world_size, num_nodes), Job(seq_length=SEQ_LENGTH, global_batch_size=batch)


def make_plan(model: ModelSpec, num_nodes: int = 1, **strategy: Any) -> Plan:
    """A plan whose batch and cluster follow from the strategy."""
    split = Strategy(**{"precision": "fp64", "bucket_bytes": 4000, "micro_batch_size": 1, **strategy})
    cluster, job = make_job(split, num_nodes)
    return Plan(model=model, cluster=cluster, job=job, strategy=split)
