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


def test_a_gated_model_turns_its_positions_whatever_a_row_prints(tables):
    assert express(only(tables, model={"gated_mlp": True})).model.positions == "rope"
    assert express(only(tables)).model.positions == "learned"


def test_where_layers_have_tp_of_their_own_the_vocabulary_is_padded_without_it(tables):
    source = {"title": "Galvatron profiled memory", "path": "galvatron/models/gpt/configs/bf16_hidden1024.json"}
    found = express(only(tables, source=source, strategy={"tp": 8, "dp": 1, "pp": 1, "zero_stage": 3}))
    assert found.model.vocab_size == 50304


def test_a_shape_that_was_read_off_a_files_name_is_put_right(tables):
    path = "galvatron/models/llama_hf/configs/memory_profiling_bf16_llama-7b.json"
    assert only(tables, source={"title": "t", "path": path}).model["vocab"] == 152064
    assert only(tables, source={"title": "t", "path": path.replace("7b", "13b")}).model["vocab"] == 50257


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout_check": "mismatch"}, "multiply out"),
        ({"model": {"experts": 8}}, "how experts are divided"),
        ({"model": {"experts": 8}, "strategy": {"ep": 2}}, "top_k not stated"),
        ({"model": {"attention": "MLA"}}, "kv_lora_rank not stated"),
        ({"model": {"dtype": "nvfp4"}}, "4-bit"),
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


def test_latents_and_sequence_parallelism_beside_experts(tables):
    mixture = {"gated_mlp": True, "experts": 8, "top_k": 2, "attention": "MLA", "kv_lora_rank": 512, "q_lora_rank": 256}
    asked = express(only(tables, model=mixture, strategy={"ep": 2, "sequence_parallel": True}))
    assert (asked.model.latent.kv_lora_rank, asked.model.head_dim) == (512, 192)
    assert {(s.sequence, s.et) for s in asked.candidates} == {("megatron", 2)}
    whole = express(only(tables, model=mixture, strategy={"ep": 4, "etp": 1, "sequence_parallel": True}))
    assert {(s.ep, s.et) for s in whole.candidates} == {(4, 1)}
    left_open = express(only(tables, strategy={"sequence_parallel": None})).candidates
    assert {s.sequence for s in left_open} == {"none", "megatron"}


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
    folder = tables(row("a", use="check"), row("b", use="check", strategy={"dp": 3}))
    assert main(["scoreboard", str(folder), "--rows"]) == 0
    shown = capsys.readouterr().out
    assert "1/2" in shown
    assert "not expressed: batch not a multiple of dp ×1" in shown
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


def test_products_in_8_bits_are_faster_and_everything_else_is_not(tables):
    wide = {"gpu": "H100-SXM5-80GB"}
    folder = tables(row("a", hardware=wide), row("b", hardware=wide, model={"dtype": "FP8-CS"}))
    (score,) = scoreboard(read_tables(folder), "fit")
    usual, narrow = (r.forecast_s for r in score.replayed)
    assert 0.5 * usual < narrow < usual
    assert score.replayed[1].strategy.precision == "bf16-fp8"
    (refused,) = scoreboard(read_tables(tables(row("c", model={"dtype": "fp8"}))), "fit")
    assert refused.num_expressed == 0, "an A100 has no such products"
    assert "no peak FLOP/s for fp8" in refused.not_expressed[0][0]


def test_a_row_of_a_mixture_has_its_experts_over_ranks(tables):
    experts = {"experts": 8, "top_k": 2, "moe_ffn_hidden": 512, "shared_experts": 1, "dense_layers": 1}
    asked = express(only(tables, model={**experts, "gated_mlp": True}, strategy={"ep": 2, "recompute": "none"}))
    assert (asked.model.num_experts, asked.model.expert_size, asked.model.shared_ffn_size) == (8, 512, 512)
    assert asked.model.num_sparse_layers == 7
    assert {s.ep for s in asked.candidates} == {2}


def test_devices_of_a_domain_are_one_node(tables):
    rack = {"gpu": "GB200-186GB", "gpus": 128, "gpus_per_node": 4, "inter_node": "4x 400 Gb/s per 4-GPU tray"}
    cluster = express(only(tables, hardware=rack, strategy={"dp": 32, "global_batch": 64})).cluster
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 64)
    assert cluster.inter_link.bandwidth_bytes_per_s == 50e9


def test_the_memory_of_the_rank_that_was_measured(tables):
    held = {"peak_mem_gib": 1, "iter_s": 0.2}
    folder = tables(*(row(f"r{r}", measured=held, strategy={"notes": f"rank {r}"}) for r in (0, 7)))
    (score,) = scoreboard(read_tables(folder), "fit")
    first, last = (r.forecast_bytes for r in score.replayed)
    assert first != last


def test_every_other_layer_is_run_again(tables):
    (strategy,) = express(only(tables, strategy={"recompute": "selective layer"})).candidates
    assert (strategy.recompute, strategy.recompute_layers) == ("full", 2)
