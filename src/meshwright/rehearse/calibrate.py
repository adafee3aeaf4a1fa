"""A cluster whose figures are measured: what :mod:`meshwright.rehearse.measure` found, as the cost model reads it.

peak FLOP/s           the best rate of any product of the dtype
matmul efficiency     median rate of the products, over that
memory bandwidth      of a stream that reads two arrays and writes one
host bandwidth        of copies to the host and back
attention             1 / rate = (1 + half_keys / s) / endless rate, through two lengths
server                as it was measured, of CPU ranks
latency, bandwidth    seconds = rounds · latency + bytes on the wire / bandwidth, least squares of relative errors;
                      of messages and of collectives apart, whose share of the bandwidth is the link's
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.core.cluster import ClusterSpec, Link
from meshwright.core.measures import wire_bytes
from meshwright.core.profile import Profile
from meshwright.cost.network import flat_s, num_rounds
from meshwright.rehearse.measure import HEAD_DIM, HEADS, Call, Measured

MIN_LATENCY_S = 1e-7
"""A fit may find less than nothing."""


def calibrated(cluster: ClusterSpec, measured: Measured, source: str, cores: float | None = None) -> ClusterSpec:
    """`cluster` with measured figures in place of its own; a link that no call crossed keeps them.

    Args:
        cores: of each rank, where ranks have less than one.
        cluster: number of nodes and devices, memory, backend.
        measured: by its ranks.
        source: what stands in the file for where the figures come from.
    """
    peaks = _peaks(measured)
    dtype = "bf16" if cluster.backend == "nccl" else "fp32"
    profile = Profile(
        matmul_efficiency=_matmul_efficiency(measured, peaks),
        num_units=1 if cluster.backend == "gloo" or cluster.device.profile is None else _num_units(cluster),
        memory_efficiency=1.0,
        overlap_slowdown=measured.overlap_slowdown,
        server=measured.server,
        source=source,
        **_attention(measured, peaks[dtype]),
    )
    device = cluster.device.model_copy(
        update={
            "peak_flops_per_s": peaks,
            "memory_bandwidth_bytes_per_s": measured.stream_bytes_per_s,
            "profile": profile,
            "cores": cores,
            "source": source,
        }
    )
    links = {
        "intra_link": _fitted(cluster.intra_link, [c for c in measured.calls if c.link == "intra"], cluster.backend),
        "inter_link": _fitted(cluster.inter_link, [c for c in measured.calls if c.link == "inter"], cluster.backend),
    }
    return cluster.model_copy(
        update={"device": device, "host_bandwidth_bytes_per_s": measured.host_bytes_per_s, **links}
    )


def _num_units(cluster: ClusterSpec) -> int:
    assert cluster.device.profile is not None
    return cluster.device.profile.num_units


def _rates(measured: Measured, dtype: str) -> list[float]:
    return [2 * m * n * k / seconds for name, m, n, k, seconds in measured.products if name == dtype]


def _peaks(measured: Measured) -> dict[str, float]:
    return {dtype: max(_rates(measured, dtype)) for dtype in dict.fromkeys(name for name, *_ in measured.products)}


def _matmul_efficiency(measured: Measured, peaks: dict[str, float]) -> float:
    """Of the dtypes that were measured over all shapes."""
    shares = [rate / peak for dtype, peak in peaks.items() for rate in _rates(measured, dtype) if peak > 0]
    return statistics.median(shares)


def _attention(measured: Measured, peak: float) -> dict[str, Any]:
    """Endless rate and half keys of the two outer lengths."""
    (short, short_s), (long, long_s) = measured.attention[0], measured.attention[-1]
    inverse = [seconds / (2 * HEADS * HEAD_DIM * s * s) for s, seconds in ((short, short_s), (long, long_s))]
    slope = (inverse[0] - inverse[1]) / (1 / short - 1 / long)
    endless = max(inverse[1] - slope / long, inverse[1] / 10)
    return {
        "attention_efficiency": min(1.0, 1 / (endless * peak)),
        "attention_half_keys": max(0.0, slope / endless),
    }


def _fitted(link: Link, calls: Sequence[Call], backend: str) -> Link:
    messages = [c for c in calls if c.primitive == "send"]
    collectives = [c for c in calls if c.primitive != "send"]
    if not collectives:
        return link
    latency_s, of_collectives = _line(collectives, backend)
    bandwidth = max(of_collectives, _line(messages, backend)[1] if messages else 0.0)
    return link.model_copy(
        update={
            "bandwidth_bytes_per_s": bandwidth,
            "latency_s": latency_s,
            "collective_share": min(1.0, of_collectives / bandwidth),
        }
    )


def _line(calls: Sequence[Call], backend: str) -> tuple[float, float]:
    """(latency, bandwidth) that explain the calls with the least squares of relative errors."""
    rows = [
        (
            num_rounds(c.primitive, c.size, backend) / c.seconds,
            wire_bytes(c.primitive, c.payload_bytes, c.size) / c.seconds,
        )
        for c in calls
    ]
    (latency_s, per_byte_s), *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    slowest = max(calls, key=lambda c: c.payload_bytes)
    least = wire_bytes(slowest.primitive, slowest.payload_bytes, slowest.size) / slowest.seconds
    return max(MIN_LATENCY_S, float(latency_s)), 1 / per_byte_s if per_byte_s > 0 else least


def fit_error(cluster: ClusterSpec, measured: Measured) -> dict[str, float]:
    """Primitive → median of |forecast − measured| / measured of its calls: how well a line explains them."""
    errors: dict[str, list[float]] = {}
    for call in measured.calls:
        link = cluster.intra_link if call.link == "intra" else cluster.inter_link
        seconds = flat_s(call.primitive, call.payload_bytes, call.size, link, cluster.backend)
        errors.setdefault(call.primitive, []).append(abs(seconds - call.seconds) / call.seconds)
    return {primitive: statistics.median(found) for primitive, found in errors.items()}
