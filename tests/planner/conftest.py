"""Models and clusters of known shape, small enough to enumerate by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.core.cluster import ClusterSpec, Device, Link
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from tests.shapes import make_model


def make_cluster(
    num_nodes: int = 1, devices_per_node: int = 8, memory_bytes: int = 80 * 10**9, backend: str = "nccl"
) -> ClusterSpec:
    """Nodes of round figures: 1 PFLOP/s bf16, 3 TB/s, 450 GB/s inside a node, 50 GB/s between."""
    device = Device(
        name="round",
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=3e12,
        peak_flops_per_s={"bf16": 1e15, "fp32": 1e14, "fp64": 5e13},
    )
    return ClusterSpec(
        name=f"{num_nodes}x{devices_per_node}xround",
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=device,
        intra_link=Link(name="inside", bandwidth_bytes_per_s=450e9, latency_s=3e-6),
        inter_link=Link(name="between", bandwidth_bytes_per_s=50e9, latency_s=8e-6),
        backend=backend,
    )


@pytest.fixture(scope="session")
def model() -> Callable[..., ModelSpec]:
    return make_model


@pytest.fixture(scope="session")
def cluster() -> Callable[..., ClusterSpec]:
    return make_cluster


@pytest.fixture(scope="session")
def llama_70b() -> ModelSpec:
    """Llama 3 70B, from its published shape."""
    return make_model(
        name="llama-3-70b", vocab_size=128256, hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8,
        head_dim=128, ffn_size=28672, max_positions=8192, rope_theta=500000.0,
    )  # fmt: skip


@pytest.fixture(scope="session")
def job() -> Job:
    return Job(seq_length=32, global_batch_size=16)
