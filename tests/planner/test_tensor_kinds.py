"""Ways to divide a layer side by side: closed forms, where one overtakes another, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.cli.main import main
from meshwright.core.sources import load_cluster, load_model
from meshwright.planner.tensor_kinds import Way, best_depth, crossovers, remedies, ways

LLAMA = load_model("llama-3-8b")


def by_name(ranks: int, batch: int, seq: int) -> dict[str, Way]:
    return {way.name: way for way in ways(LLAMA, load_cluster(f"local:{ranks}"), batch, seq, "bf16")}


def test_one_dimension_sends_what_megatron_says() -> None:
    """8(t−1)/t·β·T·h for a layer, forward and backward; activations of 1/t but for four hidden states."""
    found = by_name(8, 8, 128)
    tokens, sent = 8 * 128, found["1d"].sent
    assert sent is not None
    assert sent.wire_bytes == 8 * 7 * 2 * tokens * LLAMA.hidden_size // 8
    assert found["1d"].messages == 4
    assert found["1d"].weights_bytes > found["3d"].weights_bytes - 1  # norms are whole on every rank of the first


def test_grids_hold_their_share() -> None:
    """A cube also what it gathers: inputs of products q times, o's besides what the core keeps, and weights q times."""
    found = by_name(8, 8, 128)
    layer = sum(p.numel for p in LLAMA.parameters() if p.layer == 0 and len(p.shape) == 2) * 2
    norms = 2 * LLAMA.hidden_size * 2
    assert found["2.5d (2 deep)"].weights_bytes == layer // 4 + norms // 2
    assert found["3d"].weights_bytes == layer // 8 + norms // 2
    tokens, width = 8 * 128, 2 * LLAMA.hidden_size + LLAMA.ffn_size + 2 * LLAMA.heads_size
    more = 2 * tokens * width // 8 + layer // 4
    assert found["3d"].activations_bytes == found["2.5d (2 deep)"].activations_bytes + more


def test_what_cannot_be_is_named() -> None:
    assert by_name(8, 8, 128)["2d"].refusal == "tp=8 ranks with tensor.kind=2d are not a square; nearest: tp=9"
    assert "micro_batch_size=2" in (by_name(8, 2, 128)["3d"].refusal or "")


def test_the_nearest_that_a_refused_way_can_have_is_legal() -> None:
    cluster = load_cluster("local:60")
    near = remedies(ways(LLAMA, cluster, 15, 4096, "bf16"), LLAMA, cluster, 15, 4096, "bf16")
    assert near["1d"] == "legal with 32 ranks and 15 sequences"
    assert near["2d"] == near["3d"] == "legal with 64 ranks and 16 sequences"
    for ranks, batch, name in ((32, 15, "1d"), (64, 16, "2d"), (64, 16, "3d")):
        assert by_name(ranks, batch, 4096)[name].refusal is None


@pytest.mark.parametrize(("ranks", "depth"), [(8, 2), (18, 2), (64, 4), (27, 3), (7, 2)])
def test_depths_leave_squares(ranks: int, depth: int) -> None:
    assert best_depth(ranks) == depth


def test_a_crossover_is_where_the_bytes_are_equal() -> None:
    cluster, batch, seq = load_cluster("local:8"), 8, 128
    found = ways(LLAMA, cluster, batch, seq, "bf16")
    line = next(text for text in crossovers(found, LLAMA, cluster, batch, seq, "bf16") if text.startswith("3d"))
    match = re.fullmatch(r"3d sends less than 1d from ([\d,]+) tokens of a micro-batch on", line)
    assert match, line
    tokens = int(match[1].replace(",", ""))
    for side, is_less in ((-1, False), (1, True)):
        there = by_name(8, 8, (tokens + side * 64) // 8)
        assert there["3d"].sent is not None
        assert there["1d"].sent is not None
        assert (there["3d"].sent.wire_bytes < there["1d"].sent.wire_bytes) is is_less


def test_the_command_prints_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, drawn, dots = (tmp_path / f"ways.{kind}" for kind in ("html", "svg", "png"))
    arguments = ["compare", "tensor", "--model", "llama-3-8b", "--ranks", "8", "--batch", "8"]
    assert main([*arguments, "--html", str(page), "--svg", str(drawn), "--png", str(dots)]) == 0
    shown = capsys.readouterr().out
    assert "2.5d (2 deep)" in shown
    assert (
        "not 2d: tp=8 ranks with tensor.kind=2d are not a square; nearest: tp=9; legal with 4 ranks and 8 seq" in shown
    )
    texts = [text.text for text in ElementTree.parse(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"3d", "not possible", "activations"} <= set(texts)
    assert dots.read_bytes().startswith(b"\x89PNG")
    assert "<html" in page.read_text(encoding="utf-8")
