"""A rank's own costs from measured training steps: what products, streams and updates take over what their formulas
say, and the seconds of Python for each layer, micro-batch, step and call of a collective.

    seconds = θ1 · products + θ2 · (streams, attention) + θ3 · update + θ4 · layers·m + θ5 · m + θ6 + θ7 · calls
              + communication

All but θ is the forecast on the cluster as it is; θ ≥ 0 are those with the least squares of relative errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.plan import Plan
from meshwright.core.profile import Host, Profile
from meshwright.cost.sending import num_waited
from meshwright.planner.price import Pricer

PRODUCTS, STREAMS = ("products", "head"), ("streams", "attention")
LEAST = 0.2
"""Of products, streams and updates, that a fit may find at least: below, short steps could not tell them apart."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A plan, and the seconds of its step."""

    plan: Plan
    seconds: float
    """Median."""
    turns_s: tuple[float, ...] = ()
    """Of each step, in turn with those of other plans."""


def with_steps(cluster: ClusterSpec, steps: Sequence[TimedStep]) -> ClusterSpec:
    """`cluster` with what the steps tell of its ranks. Raises InputError where it has no profile."""
    profile = cluster.device.profile
    if profile is None:
        raise InputError(f"cluster `{cluster.name}`: its device has no profile; measure its kernels first")
    cluster = _on(cluster, profile.model_copy(update={"host": Host(), "optimizer_passes": 1.0}))
    rows = [_row(cluster, step) for step in steps]
    scaled = np.array([row[:-1] for row in rows]) / np.array([[step.seconds] for step in steps])
    left = np.array([1 - row[-1] / step.seconds for row, step in zip(rows, steps, strict=True)])
    products, streams, update, *host = least_squares(scaled, left)
    told = Host(**dict(zip(("layer_s", "micro_batch_s", "step_s", "call_s"), host, strict=True)))
    return _told(cluster, profile, max(LEAST, products), max(LEAST, streams), max(LEAST, update), told)


def least_squares(rows: np.ndarray, values: np.ndarray) -> list[float]:
    """Of all x ≥ 0 the one with the least |rows · x - values|²: the best of the plain solutions with some of the
    unknowns left out, whose others are not negative. For few unknowns."""
    num = rows.shape[1]
    best, least = np.zeros(num), float(values @ values)
    for size in range(1, num + 1):
        for chosen in combinations(range(num), size):
            part = rows[:, chosen]
            found = np.linalg.lstsq(part, values, rcond=None)[0]
            rest = part @ found - values
            if found.min() >= 0 and float(rest @ rest) < least:
                best, least = np.zeros(num), float(rest @ rest)
                best[list(chosen)] = found
    return [float(x) for x in best]


def _on(cluster: ClusterSpec, profile: Profile) -> ClusterSpec:
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"profile": profile})})


def _told(
    cluster: ClusterSpec, profile: Profile, products: float, streams: float, update: float, host: Host
) -> ClusterSpec:
    """Products that are faster in steps than by themselves raise the peaks."""
    reached = profile.matmul_efficiency / products
    peak = max(1.0, reached)
    device = cluster.device
    peaks = {dtype: peak * rate for dtype, rate in device.peak_flops_per_s.items()}
    as_told = profile.model_copy(
        update={
            "matmul_efficiency": min(1.0, reached),
            "stream_passes": max(1.0, profile.stream_passes * streams),
            "attention_efficiency": min(1.0, profile.attention_efficiency / streams / peak),
            "optimizer_passes": update,
            "host": host,
        }
    )
    faster = cluster.device.model_copy(update={"peak_flops_per_s": peaks})
    return _on(cluster.model_copy(update={"device": faster}), as_told)


def _row(cluster: ClusterSpec, step: TimedStep) -> tuple[float, ...]:
    """Seconds by unknown, and what is known."""
    plan = step.plan
    pricer = Pricer(plan.model, cluster, plan.job)
    forecast = pricer.forecast(plan.strategy)
    (stage,) = pricer.step_costs(plan.strategy).stages
    m = plan.strategy.num_micro_batches
    terms = [*stage.forward, *stage.backward]
    products, streams = (m * sum(t.seconds for t in terms if t.name in names) for names in (PRODUCTS, STREAMS))
    update = forecast.step_time.optimizer_s
    known = forecast.step_time.total_s - products - streams - update
    calls = num_waited(forecast.traffic)
    return products, streams, update, float(plan.model.num_layers * m), float(m), 1.0, float(calls), known


def step_errors(cluster: ClusterSpec, steps: Sequence[TimedStep]) -> list[float]:
    """Forecast over measured, less one, of each step."""
    found = []
    for step in steps:
        pricer = Pricer(step.plan.model, cluster, step.plan.job)
        forecast = pricer.simulate(pricer.forecast(step.plan.strategy))
        found.append(forecast.step_time.total_s / step.seconds - 1)
    return found
