"""fp16 from plan to metrics, and a run whose gradients are not finite any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.core.errors import InputError
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.run.folder import RunFolder
from meshwright.train.metrics import read_metrics
from tests.end_to_end.shell import Result
from tests.end_to_end.tiny import BATCH, SEQ_LENGTH, TEXT_BYTES, make_plan, make_run, options, tiny_model, write_config


@pytest.mark.slow
def test_fp16_is_planned_trained_and_compared(
    cli: Callable[..., Result], on_ranks: Callable[..., list[Result]], tmp_path: Path
) -> None:
    plan, run = tmp_path / "plan.toml", tmp_path / "run"
    planned = cli(
        "plan", write_config(tmp_path), "local:2", "--seq", SEQ_LENGTH, "--batch", BATCH, "--fix", "pp=2",
        "--fix", "precision=fp16", "-o", plan,
    )  # fmt: skip
    assert planned.status == 0, planned.err
    done, _ = on_ranks(
        2, "train", plan, "--out", run, "--stdlib", "--max-text-bytes", TEXT_BYTES, "--steps", 4, "--eval-samples", 8
    )
    assert done.status == 0, done.err
    assert "loss scale 65,536, 0 skipped" in done.out
    rows = read_metrics(run)
    assert [(row.skipped, row.loss_scale) for row in rows] == [(False, 65536.0)] * 4
    assert rows[-1].loss < rows[0].loss
    verified = cli("verify", run)
    assert verified.status == 0, verified.out + verified.err
    compared, _ = on_ranks(2, "parity", plan)
    assert compared.status == 0, compared.err
    assert "precision=fp64 for fp16" in compared.out


def train_with_nan(rank: int, world: int, folder: Path, plan: Plan) -> tuple[str, int]:
    """What a rank says when step 2 has a gradient of nan on the last rank, and how many steps were counted."""
    from meshwright.run.training import Training

    run = RunFolder(folder)
    training = Training(plan, run.options(), run)
    engine, steps = training.engine, iter(range(9))
    healthy = engine.parallel.forward_backward

    def forward_backward(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = healthy(*args, **kwargs)
        if next(steps) == 2 and rank == world - 1:
            shard = next(s for s in engine.optimizer.shards if s.norm_segments)
            shard.bucket.own_gradients[shard.norm_segments[0].start - shard.start] = float("nan")
        return loss

    engine.parallel.forward_backward = forward_backward  # type: ignore[method-assign]
    with pytest.raises(InputError) as caught:
        training.run(resume=False)
    return str(caught.value), int(engine.optimizer.step_count)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_whose_gradients_are_not_finite_stops_before_it_is_spoilt(ranks, tmp_path, precision):
    """No loss scale could mend it: every rank says so in one line, at the same step."""
    plan = make_plan(tiny_model(tmp_path), dp=2)
    strategy = Strategy.parse({**plan.strategy.model_dump(), "precision": precision}, "strategy")
    plan = plan.model_copy(update={"strategy": strategy})
    make_run(plan, options(6), tmp_path / "run")
    for message, num_steps in ranks(train_with_nan, 2, tmp_path / "run", plan):
        assert message.startswith("step 2: loss ")
        assert "lower --learning-rate" in message
        assert "\n" not in message
        assert num_steps == 2
    assert [row.step for row in read_metrics(tmp_path / "run")] == [0, 1]
