"""ZeRO in closed form, against the paper's table and against the forecast of what runs."""

from __future__ import annotations

import pytest

from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.precision import RECIPES
from meshwright.core.sources import load_model
from meshwright.core.strategy import Strategy
from meshwright.cost.memory import memory
from meshwright.cost.traffic import traffic
from meshwright.cost.zero import STAGES, zero_states_bytes, zero_traffic

PAPER = RECIPES["bf16-16"]


@pytest.mark.parametrize(
    ("dp", "gigabytes"),
    [
        (1, (120, 120, 120, 120)),
        (4, (120, 52.5, 41.3, 30)),
        (64, (120, 31.4, 16.6, 1.88)),
        (1024, (120, 30.1, 15.1, 0.12)),
    ],
)
def test_table_1_of_the_paper(dp, gigabytes):
    """7.5 billion parameters; the table prints three digits."""
    for stage, published in zip(STAGES, gigabytes, strict=True):
        held = sum(zero_states_bytes(7_500_000_000, dp, stage, PAPER).values())
        assert held / 1e9 == pytest.approx(published, rel=4e-3 if published >= 1 else 3e-2)


def test_each_stage_divides_one_more_state():
    whole = zero_states_bytes(800, 1, 0, PAPER)
    divided = [zero_states_bytes(800, 8, stage, PAPER) for stage in STAGES]
    assert whole == divided[0] == {"parameters": 1600, "gradients": 1600, "optimizer": 9600}
    assert divided[1] == {**whole, "optimizer": 1200}
    assert divided[2] == {**divided[1], "gradients": 200}
    assert divided[3] == {**divided[2], "parameters": 200}


@pytest.mark.parametrize("stage", STAGES)
def test_shards_are_padded(stage):
    assert zero_states_bytes(7, 4, stage, PAPER)["optimizer"] == 12 * (7 if stage == 0 else 2)
    rows = zero_traffic(7, 4, stage, PAPER).rows.values()
    assert {row.payload_bytes // row.calls for row in rows} == {16}


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16-16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_stages_that_run_are_forecast_alike(recipe, stage):
    """One bucket that holds everything, so that calls agree too; 5 ranks, so that it is padded."""
    model, job = load_model("qwen3-0.6b"), Job(seq_length=64, global_batch_size=5)
    strategy = Strategy(dp=5, zero=stage, precision=recipe, bucket_bytes=2**50)
    at = {"pp": 0, "dp": 0, "tp": 0}
    sent = traffic(model, job, strategy, at).rows
    ours = zero_traffic(model.num_parameters, 5, stage, strategy.recipe)
    assert ours.rows == {key: row for key, row in sent.items() if key[2] in ("gradients", "parameters")}
    held = memory(model, job, strategy, at)
    padded = -(-model.num_parameters // 5) * 5
    states = zero_states_bytes(padded, 5, stage, strategy.recipe)
    assert states == {
        "parameters": held.parameters_bytes,
        "gradients": held.gradients_bytes,
        "optimizer": held.optimizer_bytes,
    }


def test_volume_in_units_of_the_parameters():
    """(dp−1)/dp of 2, 2, 2 and 3 times the parameters' bytes."""
    sent = [zero_traffic(1600, 16, stage, PAPER).wire_bytes / 3200 * 16 / 15 for stage in STAGES]
    assert sent == [2, 2, 2, 3]
    assert zero_traffic(1600, 16, 3, PAPER, gather_again=False).wire_bytes / 3200 * 16 / 15 == 2


def test_gradients_are_reduced_per_micro_batch_from_stage_2_on():
    calls = [
        {phase: row.calls for (_, _, phase), row in zero_traffic(64, 4, stage, PAPER, num_micro_batches=8).rows.items()}
        for stage in STAGES
    ]
    assert calls == [
        {"gradients": 1},
        {"gradients": 1, "parameters": 1},
        {"gradients": 8, "parameters": 1},
        {"gradients": 8, "forward": 8, "backward": 8},
    ]


def test_one_rank_sends_nothing():
    assert all(zero_traffic(100, 1, stage, PAPER).wire_bytes == 0 for stage in STAGES)


@pytest.mark.parametrize(("dp", "stage"), [(2, 4), (2, -1), (0, 1)])
def test_wrong_arguments_are_one_clear_error(dp, stage):
    with pytest.raises(InputError, match="stages go from 0 to 3"):
        zero_states_bytes(10, dp, stage, PAPER)
    with pytest.raises(InputError, match="stages go from 0 to 3"):
        zero_traffic(10, dp, stage, PAPER)
