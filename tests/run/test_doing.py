"""What a rank did last, as its launcher reads it."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.program import Action, Kind
from meshwright.run.doing import Doing, read_doing
from meshwright.run.failure import Failure


def test_the_last_action_is_read(tmp_path: Path):
    path = tmp_path / "rank-0.doing"
    assert read_doing(path) is None
    doing = Doing(path)
    assert read_doing(path) is None
    for action in (Action(Kind.RECV_F, 12, 345), Action(Kind.F, 1, 3)):
        doing.note(action)
        assert read_doing(path) == action
    doing.note(None)
    assert read_doing(path) is None


def test_what_is_no_action_says_nothing(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"\xff\x00garbage")
    assert read_doing(tmp_path / "x") is None


def test_a_failure_says_what_the_rank_was_doing():
    failure = Failure(1, " was killed", 0.0, False, Action(Kind.W, 1, 3).words)
    assert str(failure) == "rank 1 was killed, in the weight gradients of micro-batch 3 on stage 1 (W3@1)"
    assert Action(Kind.REDUCE, 2).words == "reduction of gradients on stage 2 (REDUCE@2)"
