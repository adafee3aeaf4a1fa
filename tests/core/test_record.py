"""What a rank measured: written, read back, and refused where it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.record import RankRecord


def make_record(rank: int) -> RankRecord:
    sent = Traffic()
    sent.add("all_reduce", "dp", "gradients", 4096, 4, calls=3)
    sent.add("send", "pp", "forward", 512, 2)
    held = MemoryBreakdown(4, 5, 6, 7, 8)
    return RankRecord(
        rank,
        {"pp": 0, "dp": rank, "tp": 0},
        held,
        sent,
        step_time_s=0.25,
        pipeline_s=0.2,
        busy_s=0.15,
        waited_s={"gradients": 0.05},
        trace=(("F0@0", 0.0, 0.1), ("B0@0", 0.1, 0.25)),
    )


def test_records_are_read_back_by_rank(tmp_path: Path) -> None:
    for rank in (10, 2):
        make_record(rank).save(tmp_path / "measured")
    assert RankRecord.load_all(tmp_path / "measured") == [make_record(2), make_record(10)]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"rank": 0}'])
def test_damage_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    with pytest.raises(InputError, match=r"rank-0\.json: not a record of a run"):
        RankRecord.load(tmp_path / "rank-0.json")


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text("{}")
    with pytest.raises(InputError, match="not a record of a run: 'memory' is not in it"):
        RankRecord.load(tmp_path / "rank-0.json")


def test_no_records_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no measurements; a run leaves them when it ends"):
        RankRecord.load_all(tmp_path)
