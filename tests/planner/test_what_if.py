"""What if: what follows from a change, what both plans cost, and which changes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.core.errors import InputError, RuleError
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Strategy
from meshwright.planner.price import price
from meshwright.planner.what_if import changed, parse_changes, priced
from tests.shapes import make_model


@pytest.fixture
def plan() -> Plan:
    return Plan(
        model=make_model(),
        cluster=load_cluster("local:8"),
        job=Job(seq_length=16, global_batch_size=16),
        strategy=Strategy(dp=4, tp=2, pp=1, num_micro_batches=4),
    )


def summary(plan: Plan) -> dict[str, int]:
    s = plan.strategy
    return {"dp": s.dp, "tp": s.tp, "pp": s.pp, "m": s.num_micro_batches, "zero": s.zero}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["tp=1"], {"dp": 8, "tp": 1, "pp": 1, "m": 2, "zero": 0}),
        (["pp=2", "zero=1"], {"dp": 2, "tp": 2, "pp": 2, "m": 8, "zero": 1}),
        (["global_batch_size=64"], {"dp": 4, "tp": 2, "pp": 1, "m": 16, "zero": 0}),
        (["micro_batch_size=2"], {"dp": 4, "tp": 2, "pp": 1, "m": 2, "zero": 0}),
        (["dp=8", "tp=1", "num_micro_batches=2"], {"dp": 8, "tp": 1, "pp": 1, "m": 2, "zero": 0}),
    ],
)
def test_what_was_not_named_follows(plan: Plan, changes: list[str], expected: dict[str, Any]) -> None:
    assert summary(changed(plan, parse_changes(changes))) == expected


def test_a_list_of_layers_is_given_up_only_where_the_number_of_stages_changes(plan: Plan) -> None:
    two = changed(plan, parse_changes(["pp=2", "layers_per_stage=3,5"]))
    assert two.strategy.layers_per_stage == (3, 5)
    assert changed(two, parse_changes(["zero=1"])).strategy.layers_per_stage == (3, 5)
    assert changed(two, parse_changes(["pp=1"])).strategy.layers_per_stage is None


def test_parts_that_were_not_named_stay(plan: Plan) -> None:
    four = changed(plan, parse_changes(["context=degree:4,kind:ulysses", "tp=1"]))
    two = changed(four, parse_changes(["context=degree:2"])).strategy
    assert (two.context.kind, two.cp, two.dp) == ("ulysses", 2, 4)
    assert changed(four, parse_changes(["context=kind:ring"])).strategy.cp == 4
    square = changed(plan, parse_changes(["tp=8", "tensor=kind:2.5d,depth:2", "micro_batch_size=4"]))
    assert changed(square, parse_changes(["tp=4", "tensor=kind:2d"])).strategy.tensor.depth == 1


def test_both_are_priced_as_plans_are(plan: Plan) -> None:
    for each in (plan, changed(plan, parse_changes(["zero=3"]))):
        found = priced(each)
        assert found.forecast == price(each.model, each.cluster, each.job, each.strategy)
        assert sum(term.seconds for term in found.terms) == pytest.approx(found.forecast.step_time.total_s)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (["tp=3"], RuleError, "rule `tp-heads`"),
        (["dp=8"], RuleError, "rule `world`"),
        (["num_micro_batches=3"], RuleError, "rule `batch`"),
        (["tp=2"], InputError, "nothing is changed"),
        (["tq=2"], InputError, "--set tq=2: not a field of a strategy or a job; fields: dp, tp"),
        (["seq_lenth=9"], InputError, "did you mean `seq_length`"),
        (["tp"], InputError, "--set tp: write FIELD=VALUE, for example --set dp=2"),
        (["tp=1", "tp=2"], InputError, "--set tp=2: `tp` is already 1"),
        (["seq_length=8", "seq_length=9"], InputError, "`seq_length` is already 8"),
        (["seq_length=many"], InputError, "seq_length"),
        (["optimizer=lion"], InputError, "optimizer"),
        (["expert=4"], InputError, "--set expert=4: 4 names no part of it; write PART:VALUE"),
        (["context=degree:2,kin:ring"], InputError, "kin:ring names no part of it"),
        (["context=degree:2,degree:4"], InputError, "--set context=degree:2,degree:4: `degree` is already 2"),
        (["expert=degree:2", "expert=tensor:1"], InputError, "at once: --set expert=degree:2,tensor:1"),
        (["expert=degree:2", "expert=degree:4"], InputError, "`expert` is already degree:2$"),
        (["expert={degree=2,tensor=1}"], InputError, "expert=degree:VALUE,tensor:VALUE"),
        (
            ["schedule=zb-v", "num_chunks=3"],
            RuleError,
            "--set schedule=zb-v, num_chunks=3: schedule `zb-v` puts 2 stages",
        ),
        (["ranks_per_node=2"], InputError, "--set ranks_per_node=2: a plan takes it from its cluster"),
        (["imbalance=2"], RuleError, "imbalance=2: .* has no experts"),
    ],
)
def test_what_is_refused(plan: Plan, changes: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        changed(plan, parse_changes(changes))


def test_command_prints_terms_and_writes_the_plan(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "plan.toml", tmp_path / "new" / "other.toml"
    plan.save(path)
    assert main(["what-if", str(path), "--set", "zero=3", "--set", "tp=1", "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in ("now: D4 T2", "what if: D8 T1", "optimizer", "gather: all_gather over dp", "tokens per second"):
        assert words in shown
    assert Plan.load(out) == changed(plan, parse_changes(["zero=3", "tp=1"]))
    with pytest.raises(InputError, match="nothing to change"):
        main(["what-if", str(path)])
