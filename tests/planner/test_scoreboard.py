"""The scoreboard, on small tables made for it; on the published ones where MESHWRIGHT_TABLES names their folder."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.planner.scoreboard.express import express, link_bytes_per_s
from meshwright.planner.scoreboard.published import GIB, read_tables
from meshwright.planner.scoreboard.score import regrets, scoreboard

ROW = {
    "kind": "training",
    "id": "made#0",
    "use": "fit",
    "search_group": "g",
    "model": {"name": "tiny", "layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn_hidden": 4096,
              "vocab": 50257, "seq_len": 1024, "gated_mlp": False, "tied_embeddings": True, "pos": "learned",
              "dtype": "fp16"},
    "hardware": {"gpu": "A100-SXM4-80GB", "gpus": 8, "gpus_per_node": 8, "inter_node": "8x 200 Gb/s per node"},
    "strategy": {"dp": 2, "tp": 2, "pp": 2, "vpp": 1, "micro_batch": 1, "global_batch": 16, "zero_stage": 0,
                 "recompute": "full", "sequence_parallel": False},
    "measured": {"iter_s": 0.2},
    "layout_check": "ok",
}  # fmt: skip


def row(id: str = "made#0", **changes: dict) -> dict:
    """The row above, with changes to its parts."""
    made = copy.deepcopy(ROW)
    made["id"] = id
    for part, change in changes.items():
        made[part] = {**made[part], **change} if isinstance(made.get(part), dict) else change
    return made


@pytest.fixture
def tables(tmp_path):
    def write(*rows: dict, name: str = "made") -> Path:
        text = json.dumps({"name": name, "description": "", "rows": rows})
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
        return tmp_path

    return write


def only(tables, **changes):
    """The one row of a table, as it is read."""
    return read_tables(tables(row(**changes)))[0].rows[0]


def test_a_row_becomes_the_strategy_it_states(tables):
    asked = express(only(tables))
    (strategy,) = asked.candidates
    assert (strategy.dp, strategy.tp, strategy.pp, strategy.micro_batch_size, strategy.num_micro_batches) == (
        2, 2, 2, 1, 8,
    )  # fmt: skip
    assert (strategy.recompute, strategy.precision, strategy.schedule) == ("full", "fp16", "1f1b")
    assert asked.model.vocab_size == 50432, "padded to a multiple of 128 × tp"
    assert asked.cluster.inter_link.bandwidth_bytes_per_s == 25e9


def test_what_a_source_leaves_open_is_tried_in_every_legal_way(tables):
    found = express(only(tables, strategy={"micro_batch": None, "recompute": None})).candidates
    assert {(s.micro_batch_size, s.recompute) for s in found} == {
        (size, recompute) for size in (1, 2, 4, 8) for recompute in ("none", "full", "selective")
    }
    interleaved = express(only(tables, strategy={"vpp": None, "schedule": "interleaved 1F1B"})).candidates
    assert {s.num_chunks for s in interleaved} == {2, 4}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout_check": "mismatch"}, "multiply out"),
        ({"model": {"experts": 8}}, "experts"),
        ({"model": {"dtype": "fp8"}}, "8-bit"),
        ({"model": {"hidden": None}}, "hidden not stated"),
        ({"hardware": {"gpu": "Gaudi 3"}}, "device Gaudi 3"),
        ({"strategy": {"ep": 4}}, "expert"),
        ({"strategy": {"dp": 3}}, "batch not a multiple"),
        ({"strategy": {"tp": 4, "dp": 1}, "model": {"heads": 2, "kv_heads": 2}}, "rule tp-heads"),
        ({"strategy": {"dp": 4}}, "rule"),
    ],
)
def test_what_cannot_be_expressed_is_said(tables, changes, reason):
    with pytest.raises(UnsupportedError, match=reason):
        express(only(tables, **changes))


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("8x HDR InfiniBand 200 Gb/s per node", 25e9),
        ("8x 400 Gb/s NDR InfiniBand per node", 50e9),
        ("4x Omni-Path 100 Gb/s per node", 6.25e9),
        ("800 Gb/s InfiniBand per node (4x HDR)", 12.5e9),
        ("400 Gb/s RDMA per GPU (3200 Gb/s per node)", 50e9),
        ("25 Gb/s Ethernet per node", 0.390625e9),
        ("not stated (3200 Gb/s typical)", None),
        ("", None),
    ],
)
def test_networks_in_words(text, bytes_per_s):
    assert link_bytes_per_s(text, 8) == bytes_per_s


def test_errors_bias_and_constants_follow_from_the_rows(tables):
    folder = tables(row("a"), row("b", use="check"), row("c", use="check", strategy={"cp": 2, "dp": 1}))
    (first,) = scoreboard(read_tables(folder), "fit")
    seconds = first.replayed[0].forecast_s
    exact = row("a", measured={"iter_s": seconds})
    half = row("b", use="check", measured={"iter_s": seconds / 2})
    (score,) = scoreboard(read_tables(tables(exact, half)))
    assert score.time.mean == score.time.worst == score.time.bias == pytest.approx(1.0)
    assert score.own_constant.mean == pytest.approx(1.0), "the constant is fitted on the fit row, twice as slow"
    assert score.borrowed_constant.mean is None, "there is no other table"
    (fitted,) = scoreboard(read_tables(tables(exact, half)), "fit")
    assert fitted.time.mean == pytest.approx(0.0)


def test_memory_false_fits_and_false_refusals(tables):
    big = {"hidden": 16384, "heads": 128, "kv_heads": 128, "ffn_hidden": 65536, "layers": 48}
    folder = tables(
        row("held", measured={"peak_mem_gb": 8, "mem_kind": "nvidia-smi"}),
        row("oom", measured={"iter_s": None, "oom": True}),
        row("refused", model=big),
    )
    (score,) = scoreboard(read_tables(folder), "fit")
    held = next(r for r in score.replayed if r.row.id == "held")
    assert held.memory_error == pytest.approx(held.forecast_bytes / (8 * GIB) - 1), "who rounds MiB means GiB"
    assert (score.false_fits, score.false_refusals) == (1, 1)


def test_regret_is_the_measured_loss_of_the_forecasts_choice(tables):
    choices = [{"dp": 8, "tp": 1, "pp": 1}, {"dp": 1, "tp": 1, "pp": 8}]
    folder = tables(*(row(f"r{i}", strategy=choice) for i, choice in enumerate(choices)))
    (score,) = scoreboard(read_tables(folder), "fit")
    best = min(score.replayed, key=lambda r: r.forecast_s).row.id
    times = {id: {"iter_s": 0.3 if id == best else 0.2} for id in ("r0", "r1")}
    folder = tables(*(row(f"r{i}", strategy=choice, measured=times[f"r{i}"]) for i, choice in enumerate(choices)))
    (score,) = scoreboard(read_tables(folder), "fit")
    assert score.regrets == (pytest.approx(0.5),)
    assert regrets(score.replayed[:1]) == [], "one row is no choice"


def test_the_command_prints_the_board(tables, capsys):
    folder = tables(row("a", use="check"), row("b", use="check", strategy={"ep": 2}))
    assert main(["scoreboard", str(folder), "--rows"]) == 0
    shown = capsys.readouterr().out
    assert "1/2" in shown
    assert "not expressed: expert parallelism ×1" in shown
    assert "D2 T2 P2 zero0 1f1b" in shown


def test_folders_without_tables_are_refused_in_one_line(tables, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        main(["scoreboard", str(tmp_path / "none")])
    with pytest.raises(InputError, match="no table of training runs"):
        main(["scoreboard", str(tmp_path)])
    with pytest.raises(InputError, match="no row is marked `check`"):
        main(["scoreboard", str(tables(row()))])
    (tmp_path / "made.json").write_text('{"rows": [', encoding="utf-8")
    with pytest.raises(InputError, match=r"made\.json"):
        main(["scoreboard", str(tmp_path)])


@pytest.mark.skipif("MESHWRIGHT_TABLES" not in os.environ, reason="MESHWRIGHT_TABLES names no folder")
def test_the_published_tables_can_be_read():
    scores = scoreboard(read_tables(os.environ["MESHWRIGHT_TABLES"]))
    assert sum(score.num_expressed for score in scores) > 100
