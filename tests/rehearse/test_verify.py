"""Verify: what is as forecast passes; each quantity of each rank that is not is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.verify import imbalance_lines
from meshwright.core.axes import coordinates_of
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.layouts import Expert
from meshwright.core.measures import Traffic, TrafficRow
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.cost.memory import memory
from meshwright.cost.traffic import traffic
from meshwright.rehearse.verify import ACTIVATION_TOLERANCE, differences, measured_bubble, measured_imbalance
from meshwright.run.folder import RunFolder
from meshwright.train.metrics import MetricsWriter, StepMetrics
from tests.shapes import make_model


@pytest.fixture
def plan() -> Plan:
    strategy = Strategy(dp=2, tp=2, pp=2, num_micro_batches=4)
    job = Job(seq_length=16, global_batch_size=8)
    return Plan(model=make_model(), cluster=load_cluster("local:8"), job=job, strategy=strategy)


def as_forecast(plan: Plan) -> list[RankRecord]:
    """What the ranks would have measured if the forecast were true."""
    records = []
    for rank in range(plan.strategy.world_size):
        at = coordinates_of(rank, plan.strategy.sizes)
        held, sent = memory(plan.model, plan.job, plan.strategy, at), traffic(plan.model, plan.job, plan.strategy, at)
        records.append(RankRecord(rank, at, held, sent, step_time_s=1.0, pipeline_s=4.0, busy_s=3.0))
    return records


def with_row(record: RankRecord, key: tuple[str, str, str], **change: int) -> RankRecord:
    rows = record.traffic.rows
    return replace(record, traffic=Traffic({**rows, key: replace(rows.get(key, TrafficRow()), **change)}))


def test_what_is_as_forecast_passes(plan: Plan) -> None:
    assert differences(plan, as_forecast(plan)) == []


def test_one_byte_more_on_one_rank_is_named(plan: Plan) -> None:
    records = as_forecast(plan)
    key = ("all_reduce", "dp", "gradients")
    expected = records[3].traffic.rows[key].wire_bytes
    records[3] = with_row(records[3], key, wire_bytes=expected + 1)
    (found,) = differences(plan, records)
    assert str(found) == f"rank 3: all_reduce dp gradients: {expected:,} bytes forecast, {expected + 1:,} measured"


def test_as_many_bytes_in_more_calls_are_named(plan: Plan) -> None:
    records = as_forecast(plan)
    key = ("all_reduce", "tp", "forward")
    calls = records[0].traffic.rows[key].calls
    records[0] = with_row(records[0], key, calls=calls + 1)
    (found,) = differences(plan, records)
    assert (found.unit, found.forecast, found.measured) == ("calls", calls, calls + 1)


def test_what_nobody_forecast_is_named(plan: Plan) -> None:
    records = as_forecast(plan)
    records[5] = with_row(records[5], ("broadcast", "dp", "other"), calls=1, payload_bytes=8, wire_bytes=8)
    (found,) = differences(plan, records)
    assert (found.rank, found.what, found.forecast, found.measured) == (5, "broadcast dp other", 0, 8)


@pytest.mark.parametrize("category", ["parameters", "gradients", "optimizer", "buffers"])
def test_states_must_agree_to_the_byte(plan: Plan, category: str) -> None:
    records = as_forecast(plan)
    field = f"{category}_bytes"
    more = {field: getattr(records[1].memory, field) + 1}
    records[1] = replace(records[1], memory=replace(records[1].memory, **more))
    (found,) = differences(plan, records)
    assert (found.rank, found.what) == (1, category)


def test_activations_may_differ_by_their_bound(plan: Plan) -> None:
    for share, count in ((ACTIVATION_TOLERANCE * 0.9, 0), (ACTIVATION_TOLERANCE * 1.1, 1)):
        records = as_forecast(plan)
        kept = round(records[7].memory.activations_bytes * (1 + share))
        records[7] = replace(records[7], memory=replace(records[7].memory, activations_bytes=kept))
        assert len(differences(plan, records)) == count


def test_records_of_other_ranks_are_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="no measurements of rank 7: the plan has 8 ranks"):
        differences(plan, as_forecast(plan)[:-1])
    with pytest.raises(InputError, match="no measurements of ranks 0, 3: "):
        differences(plan, [record for record in as_forecast(plan) if record.rank not in (0, 3)])
    records = as_forecast(plan)
    with pytest.raises(InputError, match="measurements of too many ranks: rank 8"):
        differences(plan, [*records, replace(records[0], rank=8)])


def test_imbalance_is_that_of_the_fullest_rank_in_the_worst_layer() -> None:
    """Eight choices of four experts: by expert 4 times the mean at most, by rank of two 1.5 times."""
    assert measured_imbalance({"0": [4, 2, 1, 1], "1": [0, 4, 4, 0], "2": [0, 0, 0, 0]}, 2) == (1.5, "0")
    assert measured_imbalance({"0": [4, 2, 1, 1], "1": [0, 8, 0, 0]}, 4) == (4.0, "1")


def test_a_run_says_the_imbalance_that_it_was_planned_with_and_had(plan: Plan, tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step, loads in enumerate(([2, 2, 2, 2], [6, 1, 1, 0])):
            writer.write(StepMetrics(step, 1.0, 1.0, 1e-3, 8, 1.0, 1.0, expert_loads={"0": [2, 2, 2, 2], "3": loads}))
    mixture = load_model("demo-moe")  # two of eight experts each: 2 ranks get twice their mean at most
    for imbalance, forecast, advice in ((1.0, 1.0, "; plan with --imbalance 1.75"), (1.8, 1.8, ""), (3.5, 2.0, "")):
        shared = plan.strategy.model_copy(update={"expert": Expert(degree=2)})
        job = plan.job.model_copy(update={"imbalance": imbalance})
        asked = plan.model_copy(update={"strategy": shared, "job": job, "model": mixture})
        (line,) = imbalance_lines(asked, RunFolder(tmp_path))
        assert line.endswith(f"forecast for {forecast:.2f}, measured 1.75 in step 1 (layer 3){advice}")
    assert not list(imbalance_lines(plan, RunFolder(tmp_path)))


def test_choices_without_room_are_no_rows(plan: Plan, tmp_path: Path) -> None:
    """An expert that all choose takes what it has room for."""
    loads, taken = {"0": [8, 8, 0, 0]}, {"0": [2, 2, 1, 1]}
    with MetricsWriter(tmp_path) as writer:
        writer.write(StepMetrics(0, 1.0, 1.0, 1e-3, 8, 1.0, 1.0, expert_loads=loads, expert_taken=taken))
    shared = plan.strategy.model_copy(update={"expert": Expert(degree=2)})
    asked = plan.model_copy(update={"strategy": shared, "model": load_model("demo-moe")})
    (line,) = imbalance_lines(asked, RunFolder(tmp_path))
    assert "measured 1.33 in step 0 (layer 0)" in line


def test_bubble_is_the_idle_share_of_one_pipeline(plan: Plan) -> None:
    records = as_forecast(plan)
    records[0] = replace(records[0], pipeline_s=5.0, busy_s=4.0)  # rank 4 is the other stage of its pipeline
    assert measured_bubble(records) == pytest.approx(1 - (4.0 + 3.0) / (2 * 5.0))
    assert measured_bubble([replace(record, pipeline_s=0.0) for record in records]) is None
