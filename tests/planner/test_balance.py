"""Pipelines cut by what a run measured: what its ends took, the cut that follows, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.axes import DP, PP, TP
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.plan import Plan
from meshwright.core.program import COMPUTE_KINDS, Kind
from meshwright.core.record import RankRecord
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.planner.balance import Ends, balance, measured_ends
from meshwright.planner.rank import Options, plan
from meshwright.run.folder import RunFolder
from meshwright.run.options import TrainOptions
from meshwright.schedule.build import build_program

LAYER_S = 0.03
"""Of a forward, in the runs below; a backward takes twice as much."""


def taken_s(strategy: Strategy, num_layers: int, first: float, last: float) -> dict[tuple[Kind, int], float]:
    """What actions take where the ends take so many layers' time."""
    found = {}
    for stage, layers in enumerate(strategy.stage_layers(num_layers)):
        is_first, is_last = strategy.stage_ends(stage)
        forward = LAYER_S * (len(layers) + first * is_first + last * is_last)
        found |= {(Kind.F, stage): forward, (Kind.B, stage): 2 * forward}
        found |= {(Kind.I, stage): 0.7 * forward, (Kind.W, stage): 1.3 * forward} if strategy.splits_backward else {}
        if strategy.splits_backward:
            del found[Kind.B, stage]
    return found


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(pp=4, num_micro_batches=4),
        Strategy(pp=4, num_micro_batches=4, layers_per_stage=(1, 2, 4, 1)),
        Strategy(pp=2, num_micro_batches=4, schedule="interleaved-1f1b", num_chunks=2),
        Strategy(pp=2, num_micro_batches=4, schedule="zb-v"),
        Strategy(pp=4, num_micro_batches=8, schedule="dualpipe"),
    ],
)
def test_the_ends_are_found_whatever_the_schedule_and_the_cut(strategy: Strategy) -> None:
    ends = measured_ends(taken_s(strategy, 8, 0.25, 1.5), strategy, 8)
    assert (ends.first, ends.last) == (pytest.approx(0.25), pytest.approx(1.5))


def test_of_two_stages_the_embedding_is_free_and_of_one_nothing_is_known() -> None:
    two = Strategy(pp=2, num_micro_batches=2)
    ends = measured_ends(taken_s(two, 8, 0.0, 2.0), two, 8)
    assert (ends.first, ends.last) == (0.0, pytest.approx(2.0))
    with pytest.raises(InputError, match="one stage does not say"):
        measured_ends({(Kind.F, 0): 1.0}, Strategy(), 8)


def test_a_cut_by_both_ends() -> None:
    assert balance(12, 4, Ends(0.0, 0.0)) == (3, 3, 3, 3)
    assert balance(12, 4, Ends(0.0, 2.0)) == (3, 4, 4, 1)
    assert balance(12, 4, Ends(2.0, 2.0)) == (2, 4, 4, 2)


def write_run(folder: Path, first: float, last: float, pp: int = 4) -> RunFolder:
    """A run of `demo-s` over four stages, with ends that take so much."""
    strategy = Strategy(pp=pp, num_micro_batches=4)
    job = Job(seq_length=64, global_batch_size=4)
    run, model = RunFolder(folder), load_model("demo-s")
    run.write(Plan(model=model, cluster=load_cluster(f"local:{pp}"), job=job, strategy=strategy), TrainOptions())
    costs, nothing = taken_s(strategy, model.num_layers, first, last), MemoryBreakdown(0, 0, 0, 0, 0)
    for rank, row in enumerate(build_program(strategy).rows):
        trace, now_s = [], 0.0
        for action in row:
            lasts_s = costs[action.kind, action.stage] if action.kind in COMPUTE_KINDS else 0.0
            trace.append((str(action), now_s, now_s + lasts_s))
            now_s += lasts_s
        RankRecord(rank, {PP: rank, DP: 0, TP: 0}, nothing, Traffic(), trace=tuple(trace)).save(run.measured)
    return run


ASK = ["plan", "demo-s", "local:2", "--seq", "64", "--batch", "8", "--fix", "pp=2"]


@pytest.mark.parametrize(("last", "counts"), [(0.0, (2, 2)), (2.0, (3, 1))])
def test_a_plan_is_cut_by_a_run(last: float, counts: tuple[int, ...], tmp_path: Path, capsys) -> None:
    write_run(tmp_path / "run", 0.0, last)
    assert main([*ASK, "--balance-from", str(tmp_path / "run"), "-o", str(tmp_path / "plan.toml")]) == 0
    assert f"the embedding took 0.00 and the head {last:.2f} times what a layer takes" in capsys.readouterr().out
    strategy = Plan.load(tmp_path / "plan.toml").strategy
    assert tuple(map(len, strategy.stage_layers(4)))[: strategy.num_parts] == counts


def test_every_pipeline_of_the_ranking_is_cut_so(tmp_path: Path) -> None:
    model, job = load_model("demo-s"), Job(seq_length=64, global_batch_size=8)
    result = plan(model, load_cluster("local:4"), job, options=Options(ends=Ends(0.0, 1.0)))
    pipelines = [f.strategy for f in result.ranked if f.strategy.pp > 1]
    assert pipelines
    for strategy in pipelines:
        assert strategy.layers_per_stage == balance(model.num_layers, strategy.num_parts, Ends(0.0, 1.0))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--fix", "layers_per_stage=2,2"], "layers_per_stage is fixed already"),
        (["--fix", "dp=1"], "not a run"),
    ],
)
def test_what_says_nothing_is_refused(more: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        main([*ASK, *more, "--balance-from", str(tmp_path)])


def test_a_run_of_another_model_or_of_one_stage_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "four", 0.0, 1.0)
    with pytest.raises(InputError, match=r"trained `demo-s`, 4 layers .* not the `gpt2` of this plan"):
        main(["plan", "gpt2", "local:2", "--balance-from", str(tmp_path / "four")])
    write_run(tmp_path / "one", 0.0, 1.0, pp=1)
    with pytest.raises(InputError, match=r"one: a run whose model is one stage"):
        main([*ASK, "--balance-from", str(tmp_path / "one")])
