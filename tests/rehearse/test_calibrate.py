"""Calibration: a fit finds the figures behind its calls, ranks measure what there is, and a plan takes the file."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from meshwright.core.cluster import ClusterSpec, Link
from meshwright.core.profile import Server
from meshwright.core.sources import load_cluster
from meshwright.cost.network import flat_s
from meshwright.rehearse import measure as m
from meshwright.rehearse import measure_serving as served
from meshwright.rehearse.calibrate import calibrated, fit_error
from tests.parallel.layouts import cluster

LATENCY_S, BANDWIDTH, SHARE = 3e-5, 4e9, 0.4
RATE, HALF_KEYS = 2e10, 300.0


def calls(link: str, size: int, backend: str) -> tuple[m.Call, ...]:
    """What a link of known figures would take."""
    known = Link(name="known", bandwidth_bytes_per_s=BANDWIDTH, latency_s=LATENCY_S, collective_share=SHARE)
    return tuple(
        m.Call(primitive, link, group, payload, flat_s(primitive, payload, group, known, backend))
        for payload in m.CALL_BYTES
        for primitive, group in (("all_reduce", size), ("reduce_scatter", size), ("all_gather", size), ("send", 2))
    )


def measured(*found: m.Call) -> m.Measured:
    """Products at half and at the whole of 10 GFLOP/s; attention of known rate."""
    products = (("fp32", 100, 100, 100, 2e6 / 1e10), ("fp32", 10, 10, 10, 2e3 / 5e9))
    flops = {s: 2 * m.HEADS * m.HEAD_DIM * s * s for s in m.LENGTHS}
    attention = tuple((s, flops[s] / (RATE * s / (s + HALF_KEYS))) for s in m.LENGTHS)
    return m.Measured(products, 5e9, 2e9, attention, found, 1.25)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_fit_finds_the_link_behind_its_calls(size: int) -> None:
    found = calibrated(cluster(size), measured(*calls("intra", size, "gloo")), "here").intra_link
    assert found.latency_s == pytest.approx(LATENCY_S, rel=1e-6)
    assert found.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH, rel=1e-6)
    assert found.collective_share == pytest.approx(SHARE, rel=1e-6)


def test_each_link_is_fitted_by_its_own_calls() -> None:
    before = cluster(8, 2)
    found = calibrated(before, measured(*calls("inter", 2, "gloo")), "here")
    assert found.inter_link.latency_s == pytest.approx(LATENCY_S, rel=1e-6)
    assert found.intra_link == before.intra_link


def test_a_fit_that_explains_its_calls_says_so() -> None:
    exact = measured(*calls("intra", 4, "gloo"))
    assert max(fit_error(calibrated(cluster(4), exact, "here"), exact).values()) < 1e-6
    assert min(fit_error(cluster(4), exact).values()) > 0.1


def test_the_device_is_what_its_kernels_reached() -> None:
    device = calibrated(cluster(2), measured(), "here").device
    assert device.peak_flops_per_s == {"fp32": pytest.approx(1e10)}
    assert device.memory_bandwidth_bytes_per_s == 5e9
    profile = device.profile
    assert profile is not None
    assert profile.matmul_efficiency == pytest.approx(0.75)
    assert profile.attention_half_keys == pytest.approx(HALF_KEYS, rel=1e-6)
    assert profile.attention_efficiency == pytest.approx(1.0)  # twice the products' peak: a share is at most all
    assert profile.overlap_slowdown == 1.25
    assert profile.server == Server()


def test_offloaded_states_pass_at_the_speed_of_copies_to_the_host() -> None:
    found = calibrated(cluster(2), measured(), "here")
    assert ClusterSpec.from_toml(found.to_toml()).tier_bytes_per_s("cpu") == (2e9, 2e9)
    assert found.host_is_device  # its speed says nothing of its size


@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_a_copy_there_and_back_counts_both_ways(seconds: float) -> None:
    class Stopwatch:
        device, is_gpu = torch.device("cpu"), False

        def seconds(self, call: object) -> float:
            return seconds

    assert m._host_bytes_per_s(Stopwatch()) == 2 * 4 * m.STREAM_NUMEL / seconds


def test_what_a_server_takes_is_in_the_file_as_it_was_measured() -> None:
    rows = (("fp32", 1, 2e9), ("bf16", 16, 5e10))
    server = Server(few_rows=rows, step_s=1e-3, layer_s=2e-4, sequence_s=3e-5)
    found = calibrated(cluster(2), replace(measured(), server=server), "here")
    profile = ClusterSpec.from_toml(found.to_toml()).device.profile
    assert profile is not None
    assert profile.server == server


def test_attention_that_is_slower_on_long_sequences_is_taken_as_it_is() -> None:
    slow = m.Measured(measured().products, 5e9, 2e9, ((256, 1e-3), (1024, 1e-1)), (), 1.0)
    profile = calibrated(cluster(2), slow, "here").device.profile
    assert profile is not None
    assert profile.attention_half_keys == 0.0


def on_ranks(rank: int, world: int) -> m.Measured:
    from meshwright.comm.mesh import Mesh

    m.SHAPES, m.LENGTHS, m.CALL_BYTES, m.STREAM_NUMEL = ((64, 64, 64),), (64, 128), (2**12, 2**16), 2**16
    served.NUM_WEIGHTS, served.OUTPUTS, served.INPUTS, served.STEPS = 2, 64, 64, 6
    by_node, in_line = Mesh.create({"dp": world}, dp_local=2), Mesh.create({"pp": world})
    return m.measure(by_node, in_line, 0.001, lambda what: None)


def test_ranks_measure_every_figure_of_both_links_and_agree(ranks) -> None:
    first, *others = ranks(on_ranks, 4)
    assert all(other == first for other in others)
    assert {name for name, *_ in first.products} == {"fp32", "fp64", "bf16", "fp16"}
    kinds = {(call.primitive, call.link) for call in first.calls}
    assert kinds == {
        (p, link) for p in ("all_reduce", "reduce_scatter", "all_gather", "send") for link in ("intra", "inter")
    }
    assert all(call.seconds > 0 for call in first.calls)
    assert 0 < first.host_bytes_per_s < math.inf
    assert 1.0 <= first.overlap_slowdown <= 2.0
    assert {(name, rows) for name, rows, _ in first.server.few_rows} <= set(product(served.DTYPES, served.ROWS))
    assert {("fp32", rows) for rows in served.ROWS} <= {(name, rows) for name, rows, _ in first.server.few_rows}
    assert all(rate > 0 for _, _, rate in first.server.few_rows)
    assert first.server.step_s + 2 * first.server.layer_s + first.server.sequence_s > 0


def test_a_plan_takes_the_file(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    found = calibrated(cluster(2), measured(*calls("intra", 2, "gloo")), "here")
    file.write_text(found.to_toml())
    loaded = load_cluster(str(file))
    assert isinstance(loaded, ClusterSpec)
    assert loaded.device.profile == found.device.profile
    assert loaded.intra_link == found.intra_link
