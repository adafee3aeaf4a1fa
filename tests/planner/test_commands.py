"""`meshwright plan` and `meshwright show`, as typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.errors import InputError, RuleError
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.schedule.build import build_program

SMALL = ["plan", "demo-s", "local:8", "--seq", "256", "--batch", "32"]


def test_plan_prints_the_ranking_the_bytes_and_the_reason(capsys):
    assert main(SMALL) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for word in ("param", "activ", "dp wire", "bubble", "gradients", "fits", "Not offered", "Rules of thumb that hold"):
        assert word in shown
    assert re.search(r"tp-heads ×\d+", shown)


def test_sequences_beyond_the_positions_of_a_model_are_noted(capsys):
    few = ["plan", "demo-s", "local:1", "--batch", "1", "--fix", "micro_batch_size=1"]
    assert main([*few, "--seq", "4096"]) == 0
    assert "note: sequences of 4,096 tokens, but `demo-s` is made for 2,048 positions" in capsys.readouterr().out
    assert main([*few, "--seq", "512"]) == 0
    assert "is made for" not in capsys.readouterr().out


def test_what_is_planned_can_be_shown(capsys, tmp_path):
    file = str(tmp_path / "plan.toml")
    fixed = ["--fix", "dp=2", "--fix", "tp=2", "--fix", "layers_per_stage=1,3", "--zero", "1", "--recompute", "full"]
    assert main([*SMALL, *fixed, "--schedule", "gpipe", "--precision", "bf16", "-o", file]) == 0
    strategy = Plan.load(file).strategy
    assert (strategy.dp, strategy.tp, strategy.pp, strategy.zero) == (2, 2, 2, 1)
    assert (strategy.layers_per_stage, strategy.recompute) == ((1, 3), "full")
    assert (strategy.schedule, strategy.precision) == ("gpipe", "bf16")
    capsys.readouterr()
    assert main(["show", file]) == 0
    shown = capsys.readouterr().out
    assert "layers per stage" in shown
    assert "1, 3" in shown
    assert "stage 1" in shown
    assert "recomputation" in shown
    assert re.search(r"^r0: F0 ", shown, re.MULTILINE)
    assert re.search(r"^r1: \. +F0 ", shown, re.MULTILINE)


def test_what_is_shown_can_be_drawn_and_taken_away(capsys, tmp_path):
    plan, page, trace, program = (tmp_path / name for name in ("plan.toml", "page.html", "trace.json", "program.csv"))
    assert main([*SMALL, "--fix", "pp=4", "--fix", "dp=2", "--fix", "tp=1", "-o", str(plan)]) == 0
    capsys.readouterr()
    assert main(["show", str(plan), "--html", str(page), "--trace", str(trace), "--csv", str(program)]) == 0
    shown = capsys.readouterr().out
    for what, path in (("page", page), ("trace", trace), ("program", program)):
        assert f"{what} written to {path}" in shown
    drawn = page.read_text(encoding="utf-8")
    for words in ("Memory of one rank at the peak of a step", "What one rank sends in a step", "bubble"):
        assert words in drawn
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', drawn)
    strategy = Plan.load(plan).strategy
    events = [e for e in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if e["ph"] == "X"]
    assert sum(e["cat"] == "F" for e in events) == 4 * strategy.num_micro_batches
    assert {e["pid"] for e in events} == {0, 1, 2, 3}
    rows = tuple(tuple(map(Action.parse, line.split(","))) for line in program.read_text(encoding="utf-8").splitlines())
    assert rows == build_program(strategy).rows


@pytest.mark.parametrize("option", ["--html", "--trace", "--csv"])
def test_what_cannot_be_written_is_one_line(tmp_path, option):
    plan = str(tmp_path / "plan.toml")
    assert main([*SMALL, "-o", plan]) == 0
    with pytest.raises(InputError, match="cannot be written: Is a directory") as caught:
        main(["show", plan, option, str(tmp_path)])
    assert "\n" not in str(caught.value)


def test_a_long_pipeline_is_shortened(capsys, tmp_path):
    file = str(tmp_path / "plan.toml")
    wide = ["plan", "llama-3-70b", "20x8xh100", "--seq", "4096", "--batch", "160", "--fix", "pp=20", "--fix", "tp=8"]
    assert main([*wide, "-o", file]) == 0
    capsys.readouterr()
    assert main(["show", file]) == 0
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if re.match(r"r\d+:", line)]
    assert len(rows) == 16
    assert "… and 4 more ranks" in shown
    assert max(map(len, rows)) <= 220


def test_options_that_a_command_line_gets_wrong(tmp_path):
    for argv, error, words in (
        ([*SMALL, "--fix", "dp=3"], RuleError, "nearest legal"),
        ([*SMALL, "--fix", "zero=4"], InputError, "0, 1, 2 or 3"),
        ([*SMALL, "--fix", "zero=1", "--zero", "0"], InputError, "`zero` is already 1"),
        ([*SMALL, "--imbalance", "2"], RuleError, "has no experts"),
        (["plan", "mixtral-8x7b", "8xh100", "--imbalance", "4.5"], RuleError, "= 8/2 = 4 of `mixtral-8x7b`"),
        (["plan", "mixtral-8x7b", "8xh100", "--serve", "--imbalance", "2"], InputError, "--imbalance says how"),
        ([*SMALL, "--fix", "expert.tensor=1"], InputError, "--fix expert=degree:VALUE,tensor:VALUE"),
        ([*SMALL, "--optimizer", "adam"], InputError, "'adamw' or 'sgd'"),
        ([*SMALL, "-o", str(tmp_path)], InputError, "cannot be written: Is a directory"),
        (["plan", "demo-xl", "local:2"], InputError, "no model `demo-xl`"),
        (["show", str(tmp_path / "plan.toml")], InputError, "no such file"),
        (["plan", "llama-3-405b", "8xh100"], RuleError, "it fits on"),
    ):
        with pytest.raises(error) as caught:
            main(argv)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_nothing_is_written_where_nothing_is_planned(tmp_path):
    file = tmp_path / "plan.toml"
    with pytest.raises(RuleError):
        main([*SMALL, "--fix", "tp=3", "-o", str(file)])
    assert not file.exists()


def test_the_folders_of_a_plan_are_made(tmp_path):
    file = tmp_path / "plans" / "of today" / "plan.toml"
    assert main([*SMALL, "-o", str(file)]) == 0
    Plan.load(file)


def test_a_damaged_plan_is_one_line(tmp_path):
    file = tmp_path / "plan.toml"
    assert main([*SMALL, "-o", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    for damaged in (text[: len(text) // 2], text.replace("dp = ", "dq = "), ""):
        file.write_text(damaged, encoding="utf-8")
        with pytest.raises(InputError) as caught:
            main(["show", str(file)])
        assert str(Path(file)) in str(caught.value)


def test_a_plan_edited_by_hand_into_something_illegal_is_refused(tmp_path):
    file = tmp_path / "plan.toml"
    assert main([*SMALL, "--fix", "dp=4", "-o", str(file)]) == 0
    file.write_text(file.read_text(encoding="utf-8").replace("dp = 4", "dp = 5"), encoding="utf-8")
    with pytest.raises(RuleError, match="nearest legal"):
        main(["show", str(file)])


def test_every_preset_can_be_planned(capsys):
    from meshwright.core.sources import load_model, model_names

    few = ["--fix", "dp=8", "--fix", "micro_batch_size=1", "--zero", "1"]
    for name in model_names():
        devices = "64x8xh100" if any(size in name for size in ("405b", "175b", "176b", "dots", "v3")) else "8x8xh100"
        devices = "256x8xh100" if name.startswith(("glam", "gshard")) else devices
        gate = load_model(name).gate  # a loss over the batch needs all forwards first, noise no second one
        schedule = ["--schedule", "gpipe" if gate.balance_over == "batch" else "1f1b"]
        recompute = ["--recompute", "full" if gate.noise == "none" else "none"]
        assert main(["plan", name, devices, "--seq", "512", "--batch", "512", *few, *schedule, *recompute]) == 0
        assert "is the fastest that fits" in capsys.readouterr().out
