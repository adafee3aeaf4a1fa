"""How far a forecast of seconds may be off on devices that nobody has calibrated.

Of the published runs that are marked `fit` and train models of a billion parameters or more, nine of ten took between
0.74 and 1.64 times what the model without a profile says of them; below that size the host's launches rule, and a step
may take several times as long.
"""

from __future__ import annotations

from meshwright.core.cluster import ClusterSpec

UNCALIBRATED = (0.7, 1.7)
"""Least and most of a forecast, rounded outwards."""


def is_calibrated(cluster: ClusterSpec) -> bool:
    """Whether the device's kernels have a measured profile."""
    return cluster.device.profile is not None


def interval_s(seconds: float, cluster: ClusterSpec) -> tuple[float, float]:
    """Least and most seconds; the same number twice for a calibrated device."""
    least, most = (1.0, 1.0) if is_calibrated(cluster) else UNCALIBRATED
    return least * seconds, most * seconds
