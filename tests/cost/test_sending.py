"""What the host adds to calls of collectives."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.core.axes import EP, MESH_ORDER, PP, TENSOR_AXES
from meshwright.core.job import Job
from meshwright.core.measures import Traffic
from meshwright.core.profile import Host, Profile
from meshwright.core.strategy import Strategy
from meshwright.cost.compute import EXCHANGE, REDUCTIONS
from meshwright.cost.sending import num_waited, seconds_by_phase
from meshwright.cost.traffic import traffic
from meshwright.planner.price import Pricer
from tests.parallel.layouts import cluster, llama, mixture

CALL_S = 1e-3


def spent(call_s: float, **choice: Any) -> tuple[float, Traffic]:
    """(seconds in collectives, what is sent) of rank 0 of a strategy."""
    strategy, model = Strategy.model_validate(choice), llama()
    job = Job(seq_length=8, global_batch_size=strategy.dp * strategy.micro_batch_size * strategy.num_micro_batches)
    plain = cluster(strategy.world_size)
    profile = Profile(
        matmul_efficiency=0.8, num_units=1, memory_efficiency=1.0, attention_efficiency=0.5, host=Host(call_s=call_s)
    )
    ours = plain.model_copy(update={"device": plain.device.model_copy(update={"profile": profile})})
    sent = traffic(model, job, strategy, dict.fromkeys(MESH_ORDER, 0))
    return sum(seconds_by_phase(model, strategy, ours, sent).values()), sent


@pytest.mark.parametrize("choice", [{"tp": 2}, {"dp": 2, "zero": 3}, {"context": {"degree": 2}}, {"pp": 2, "tp": 2}])
def test_each_call_takes_what_the_host_adds(choice: dict[str, Any]) -> None:
    (without_s, sent), (with_s, _) = spent(0.0, **choice), spent(CALL_S, **choice)
    calls = sum(row.calls for (_, axis, _), row in sent.rows.items() if axis != PP)
    assert num_waited(sent) == calls > 0
    assert with_s - without_s == pytest.approx(calls * CALL_S)


def test_calls_of_a_grid_start_ahead_of_products() -> None:
    choice = {"tp": 4, "tensor": {"kind": "2d"}, "micro_batch_size": 4}
    (without_s, sent), (with_s, _) = spent(0.0, **choice), spent(CALL_S, **choice)
    others = sum(row.calls for (_, axis, _), row in sent.rows.items() if axis not in TENSOR_AXES)
    assert others < sum(row.calls for row in sent.rows.values())
    assert with_s - without_s == pytest.approx(others * CALL_S)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_experts_wait_for_is_named_apart_from_reductions_over_tp(tp: int) -> None:
    strategy = Strategy.model_validate({"dp": 4, "tp": tp, "expert": {"degree": 2, "tensor": tp}})
    model, job, machines = mixture(), Job(seq_length=8, global_batch_size=4), cluster(strategy.world_size)
    sent = traffic(model, job, strategy, dict.fromkeys(MESH_ORDER, 0))
    (stage,) = Pricer(model, machines, job).step_costs(strategy).stages
    found = {term.name: term.seconds for term in stage.forward}
    exchanged = Traffic({key: row for key, row in sent.rows.items() if key[1:] == (EP, "forward")})
    assert found[EXCHANGE] == pytest.approx(sum(seconds_by_phase(model, strategy, machines, exchanged).values()))
    assert (found[REDUCTIONS] > 0) == (tp > 1)
