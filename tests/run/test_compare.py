"""Trials: which ones the ranks allow, and what is refused before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.run.compare import Request, precision_trials, set_up_trials, zero_trials
from meshwright.run.options import TrainOptions
from tests.shapes import make_model


@pytest.mark.parametrize(
    ("ranks", "precision", "more"),
    [(1, "fp32", {"DataParallel"}), (2, "fp64", {"DataParallel"}), (3, "bf16", set()),
     (4, "fp32", {"DataParallel", "zero3-node"}), (6, "bf16-16", {"zero3-node"})],
)  # fmt: skip
def test_every_way_that_the_ranks_allow(ranks: int, precision: str, more: set[str]) -> None:
    trials = zero_trials(Request(make_model(), ranks, 8, 2 * ranks), precision)
    assert {t.name for t in trials} == {"zero0", "zero1", "zero2", "zero3", "zero3-kept", *more}
    assert {t.plan.strategy.precision for t in trials} == {precision}
    assert {t.plan.strategy.dp for t in trials} == {ranks}
    assert all(t.one_process == (t.name == "DataParallel") for t in trials)


def test_shards_lie_within_half_of_the_ranks() -> None:
    trials = {t.name: t.plan.strategy for t in zero_trials(Request(make_model(), 4, 8, 8), "fp32")}
    assert (trials["zero3-node"].dp_local, trials["zero3"].dp_local) == (2, 4)


def test_precisions_differ_in_nothing_else() -> None:
    one, other = precision_trials(Request(make_model(), 2, 8, 8, 2), ("fp32", "bf16"))
    assert one.plan.strategy == other.plan.strategy.model_copy(update={"precision": "fp32"})


@pytest.mark.parametrize(("batch", "micro"), [(3, 1), (1, 1), (0, 1), (6, 2)])
def test_a_batch_that_cannot_be_dealt_is_refused(batch: int, micro: int) -> None:
    with pytest.raises(InputError, match=f"positive multiple of {2 * micro}"):
        zero_trials(Request(make_model(), 2, 8, batch, micro), "fp32")


def test_nothing_is_written_where_something_is_wrong(tmp_path: Path) -> None:
    trials = precision_trials(Request(make_model(), 1, 8, 4), ("fp32",))
    with pytest.raises(InputError, match="step 3 is the one that is measured"):
        set_up_trials(trials, TrainOptions(steps=2), tmp_path / "new")
    (tmp_path / "note.txt").touch()
    with pytest.raises(InputError, match="choose another folder"):
        set_up_trials(trials, TrainOptions(steps=3), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
