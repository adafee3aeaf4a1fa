"""What short training steps tell of a rank: a fit finds what is behind them, and ranks that share cores take turns."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.profile import Host, Profile
from meshwright.core.strategy import Strategy
from meshwright.planner.price import Pricer
from meshwright.rehearse.step_fit import TimedStep, least_squares, step_errors, with_steps
from meshwright.run.steps import calibration_plans, time_steps
from tests.parallel.layouts import cluster

PROFILE = Profile(matmul_efficiency=0.8, num_units=1, memory_efficiency=1.0, attention_efficiency=0.5)


def machine(cores: float | None = None, **profile: object) -> ClusterSpec:
    plain = cluster(2)
    change = {"profile": PROFILE.model_copy(update=profile), "cores": cores}
    return plain.model_copy(update={"device": plain.device.model_copy(update=change)})


def timed(on: ClusterSpec) -> list[TimedStep]:
    """Steps that take what `on` forecasts."""
    found = []
    for plan in calibration_plans(on):
        forecast = Pricer(plan.model, on, plan.job).forecast(plan.strategy)
        found.append(TimedStep(plan, forecast.step_time.total_s))
    return found


def test_a_fit_finds_what_is_behind_the_steps() -> None:
    host = Host(layer_s=2e-3, micro_batch_s=3e-3, step_s=4e-3, call_s=5e-4)
    steps = timed(machine(matmul_efficiency=0.4, stream_passes=3.0, optimizer_passes=2.5, host=host))
    found = with_steps(machine(), steps)
    assert max(map(abs, step_errors(machine(), steps))) > 0.2
    assert max(map(abs, step_errors(found, steps))) < 0.03
    profile = found.device.profile
    assert profile is not None
    assert 1.2 < profile.optimizer_passes < 5.0, "what is proportional to parameters is not told apart exactly"
    assert profile.host.layer_s == pytest.approx(2e-3, rel=0.1)
    assert profile.host.step_s == pytest.approx(4e-3, rel=0.2)
    assert profile.host.call_s == pytest.approx(5e-4, rel=0.1)


def test_calls_are_told_from_layers_by_models_that_ranks_divide() -> None:
    """Replicas alone cannot: without the others the fit misses what a call takes, and so every divided model."""
    steps = timed(machine(host=Host(layer_s=2e-3, call_s=1e-3)))
    divided = [step for step in steps if step.plan.strategy.dp == 1]
    assert {(s.plan.strategy.tp, s.plan.strategy.cp, s.plan.strategy.sequence) for s in divided} == {
        (2, 1, "none"), (2, 1, "megatron"), (1, 2, "none"),
    }  # fmt: skip
    alone = with_steps(machine(), [step for step in steps if step.plan.strategy.dp == 2])
    assert max(map(abs, step_errors(alone, divided))) > 0.2
    assert max(map(abs, step_errors(with_steps(machine(), steps), divided))) < 0.03


def test_a_way_that_ranks_cannot_divide_is_left_out() -> None:
    assert all(plan.strategy.tp == 1 for plan in calibration_plans(cluster(3)))
    assert {plan.strategy.world_size for plan in calibration_plans(cluster(1))} == {1}


def test_nothing_is_negative() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(rows, np.array([3.0, 2.0, 1.0])) == [pytest.approx(2.0), 0.0]
    assert least_squares(rows, np.array([-1.0, -1.0, -1.0])) == [0.0, 0.0]


def test_a_device_without_a_profile_is_refused() -> None:
    with pytest.raises(InputError, match="measure its kernels first"):
        with_steps(cluster(2), [])


def test_ranks_that_share_cores_do_not_wait_for_a_bubble() -> None:
    plan = calibration_plans(machine())[3]
    strategy = Strategy(pp=2, schedule="naive", num_micro_batches=4)

    def pipeline(cores: float | None) -> tuple[float, float]:
        pricer = Pricer(plan.model, machine(cores), plan.job)
        forecast = pricer.simulate(pricer.forecast(strategy))
        costs = pricer.step_costs(strategy)
        work_s = 4 * sum(stage.forward_s + stage.backward_s for stage in costs.stages)
        return forecast.step_time.pipeline_s, work_s

    (alone_s, work_s), (shared_s, _) = pipeline(None), pipeline(0.5)
    assert alone_s > 0.95 * work_s, "one rank works at a time"
    assert shared_s == pytest.approx(max(alone_s / 2, work_s / 2)), "and has the core of the other"
    assert pipeline(1.0)[0] == alone_s


def on_ranks(rank: int, world: int) -> list[float]:
    plans = calibration_plans(cluster(world))[:2]
    return [step.seconds for step in time_steps(plans, 1, lambda _: None)]


def test_ranks_time_the_same_steps_and_agree(ranks) -> None:
    first, other = ranks(on_ranks, 2)
    assert first == other
    assert all(seconds > 0 for seconds in first)
