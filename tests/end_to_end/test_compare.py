"""`meshwright compare` in real ranks: every way is as forecast, and one that isn't is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from meshwright.cli.compare import What, show
from meshwright.core.measures import Traffic
from meshwright.core.record import RankRecord
from tests.end_to_end import shell
from tests.end_to_end.shell import Result
from tests.end_to_end.tiny import TEXT_BYTES, write_config
from tests.run.outcomes import as_forecast, outcomes

COMMON = ("--seq", 32, "--steps", 4, "--max-text-bytes", TEXT_BYTES, "--learning-rate", 0.01)
OnRanks = Callable[..., list[Result]]


def _one_more_byte(patch: pytest.MonkeyPatch) -> None:
    """Of every gather, as the ledger counts it."""
    add = Traffic.add

    def one_more(self: Traffic, primitive: str, axis: str, phase: str, payload_bytes: int, size: int, *more: Any,
                 **named: Any) -> None:  # fmt: skip
        counted = sys._getframe(1).f_code.co_name == "record" and primitive == "all_gather"
        add(self, primitive, axis, phase, payload_bytes + 4 * size * counted, size, *more, **named)

    patch.setattr(Traffic, "add", one_more)


def compare(on_ranks: OnRanks, world: int, folder: Path, what: str, *options: object, **change: Any) -> Result:
    """Of the tiny model; what rank 0 says."""
    model, out = write_config(folder), folder / "kept"
    argv = ("compare", what, "--model", model, *COMMON, "--out", out, *options)
    first, *others = on_ranks(world, *argv, **change)
    assert all(other.out == "" for other in others)
    return first


@pytest.mark.slow
def test_all_stages_are_as_forecast(on_ranks: OnRanks, tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / "kept"
    done = compare(on_ranks, 4, tmp_path, "zero", "--ranks", 4, "--micro-batches", 2, "--html", page)
    assert done.status == 0, done.err + done.out
    rows = [line.split() for line in done.out.splitlines() if line.count("as forecast") == 2]
    names = ["DataParallel", "zero0", "zero1", "zero2", "zero3", "zero3-kept", "zero3-node"]
    assert [row[0] for row in rows] == names
    assert len({row[1] for row in rows}) == 1  # the last loss
    assert "differs:" not in done.out
    assert page.stat().st_size > 1_000_000
    assert all(len(RankRecord.load_all(out / name / "measured")) == 4 for name in names)


@pytest.mark.slow
def test_bytes_that_were_not_forecast_are_named(on_ranks: OnRanks, tmp_path: Path) -> None:
    done = compare(on_ranks, 2, tmp_path, "zero", change=_one_more_byte)
    assert done.status == 1, done.err
    assert "differs: zero1: rank 0: all_gather dp parameters:" in done.out
    assert "differs: zero0" not in done.out


@pytest.mark.slow
def test_ranks_that_it_starts_itself(tmp_path: Path) -> None:
    """In 16 bits without `DataParallel`, which keeps no master copies; in a folder that it makes and removes."""
    done = shell.meshwright("compare", "zero", "--model", write_config(tmp_path), *COMMON, "--precision", "bf16")
    assert done.status == 0, done.err
    assert done.out.count("as forecast") == 2 * 5


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_of_torchrun_need_a_folder(
    tmp_path: Path, rank: str, cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they meet."""
    there = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    refused = cli("compare", "zero", "--model", write_config(tmp_path), *COMMON)
    assert refused.status == 1
    assert "give --out FOLDER" in refused.err


@pytest.mark.slow
def test_precisions_are_trained_and_drawn(on_ranks: OnRanks, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = compare(on_ranks, 1, tmp_path, "precision", "--precisions", "fp32,bf16", "--html", page)
    assert done.status == 0, done.err + done.out
    rows = [line.split() for line in done.out.splitlines() if line.startswith((" fp32 ", " bf16 "))]
    assert [row[0] for row in rows] == ["fp32", "bf16"]
    assert abs(float(rows[1][4])) < 0.01
    assert "bf16" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("step", "status"), [(0, 1), (9, 1), (10, 0)])
def test_a_loss_that_differs_early_is_named(step: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Later than the tenth step rounding may have moved the weights apart; it is shown, not judged."""
    losses = [1.0] * 12
    found = [as_forecast(outcome.trial, losses) for outcome in outcomes()]
    losses[step] += 1e-4
    found[3] = as_forecast(found[3].trial, losses)
    if status:
        with pytest.raises(typer.Exit) as ended:
            show(What.ZERO, found, None)
        assert ended.value.exit_code == status
    else:
        show(What.ZERO, found, None)
    out = capsys.readouterr().out
    assert ("differs: zero2: loss: 1.0e-04 from zero0 in the first 10 steps, 1e-05 allowed" in out) == bool(status)
    assert next(line for line in out.splitlines() if line.startswith(" zero2") and "e-04" in line)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zero", "--precision", "fp32,bf16"), "`zero` is compared in one precision"),
        (("precision", "--precisions", "fp32,fp7"), "no precision `fp7`; known: fp32"),
        (("precision", "--precisions", ","), "known: fp32"),
        (("zero", "--batch", "3"), "3 sequences cannot be dealt to 2 ranks"),
        (("zero", "--steps", "2"), "step 3 is the one that is measured"),
        (("zero", "--model", "no-such-model"), "no model `no-such-model`"),
        (("tensor", "--steps", "3", "--text", "x"), "--steps, --text with `compare tensor`, which trains nothing"),
        (("precision", "--precision", "bf16-20"), "for forecasts only"),
    ],
)
def test_mistakes_are_one_line(cli: Callable[..., Result], arguments: tuple[str, ...], words: str) -> None:
    done = cli("compare", *arguments)
    assert done.status == 1
    assert done.err.count("\n") == 1
    assert words in done.err
