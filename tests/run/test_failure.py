"""Among many ranks that failed, the one that a person must read about."""

import signal
from pathlib import Path

from meshwright.core.errors import InputError, RankError
from meshwright.run.failure import Failure, first_cause, from_exception, from_exit


def test_a_cause_comes_before_its_consequences_whenever_it_was_recorded() -> None:
    consequence = from_exception(0, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4321"))
    cause = from_exception(3, ValueError("bad"))
    assert consequence.is_consequence
    assert not cause.is_consequence
    assert first_cause([consequence, cause]) == cause


def test_of_two_causes_the_earlier_one() -> None:
    late, early = Failure(0, ": late", 10.0, False), Failure(1, ": early", 9.0, False)
    assert first_cause([late, early]) == early


def test_a_rank_killed_later_by_the_launcher_is_not_the_cause() -> None:
    cause = Failure(1, ": ValueError: bad", 100.0, False)
    stopped, killed = from_exit(0, -signal.SIGTERM, 99.0), from_exit(2, -signal.SIGKILL, 130.0)
    assert first_cause([stopped, killed, cause]) == cause


def test_where_all_are_consequences_the_earliest() -> None:
    first, second = from_exception(2, RankError("dp: a peer is gone")), from_exit(1, -signal.SIGTERM, 9e12)
    assert first.is_consequence
    assert first_cause([second, first]) == first


def test_words() -> None:
    assert str(from_exception(2, InputError("x.txt: no such file"))) == "rank 2: x.txt: no such file"
    assert str(from_exception(2, ValueError("one\ntwo"))) == "rank 2: ValueError: one"
    assert str(from_exception(2, KeyError())) == "rank 2: KeyError: no message"
    assert str(from_exit(2, 3, 0.0)) == "rank 2 exited with status 3"
    assert "rank 2 was killed by signal 9 (SIGKILL" in str(from_exit(2, -9, 0.0))


def test_record_round_trip(tmp_path: Path) -> None:
    failure = from_exception(1, ValueError("ü"))
    failure.save(tmp_path / "rank-1.json")
    assert Failure.load(tmp_path / "rank-1.json") == failure
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]
