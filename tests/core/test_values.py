"""The base of every value: TOML both ways, unknown keys, copies."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.sources import cluster_names, device_names, load_cluster, load_model, model_names
from meshwright.core.strategy import Strategy
from meshwright.core.values import parse_json, parse_toml, read_text, write_text


def test_changed_copy_has_its_own_parameter_table() -> None:
    spec = load_model("demo-s")
    before = spec.num_parameters
    half = spec.model_copy(update={"num_layers": spec.num_layers // 2})
    assert max(p.layer for p in half.parameters() if p.layer is not None) == spec.num_layers // 2 - 1
    assert half.num_parameters < before == spec.num_parameters


@pytest.mark.parametrize("name", model_names())
def test_model_toml_round_trip(name: str) -> None:
    spec = load_model(name)
    assert ModelSpec.from_toml(spec.to_toml()) == spec


@pytest.mark.parametrize("name", [*(f"2x8x{device}" for device in device_names()), *cluster_names(), "local:3"])
def test_cluster_toml_round_trip(name: str) -> None:
    cluster = load_cluster(name)
    assert ClusterSpec.from_toml(cluster.to_toml()) == cluster


def test_strategy_toml_round_trip() -> None:
    for strategy in (Strategy(), Strategy(dp=2, pp=3, layers_per_stage=(3, 2, 2), zero=1, recompute="full")):
        assert Strategy.from_toml(strategy.to_toml()) == strategy


def test_misspelt_and_wrong_keys_are_named() -> None:
    with pytest.raises(InputError, match=r"job\.toml: `sequence_length`"):
        Job.from_toml("seq_length = 8\nglobal_batch_size = 2\nsequence_length = 8", "job.toml")
    with pytest.raises(InputError, match=r"job\.toml: `global_batch_size`.*got 0"):
        Job.from_toml("seq_length = 8\nglobal_batch_size = 0", "job.toml")
    with pytest.raises(InputError, match=r"job\.toml: not valid TOML"):
        Job.from_toml("seq_length = ", "job.toml")


def test_json_says_what_is_wrong() -> None:
    assert parse_json('{"a": 1}', "x") == {"a": 1}
    for text, message in (("", "the file is empty"), ("{", "at line 1"), ("[1]", "object was expected, found list")):
        with pytest.raises(InputError, match=rf"x\.json: .*{message}"):
            parse_json(text, "x.json")


def test_equal_by_fields_alone() -> None:
    ours, theirs = (ModelSpec.from_toml(load_model("demo-s").to_toml()) for _ in range(2))
    assert ours.parameters()
    assert ours == theirs
    assert hash(ours) == hash(theirs)
    assert ours != theirs.model_copy(update={"norm_eps": 1e-3})
    assert ours != Strategy()


def test_readers_refuse_what_breaks_them() -> None:
    for read, name in ((parse_json, "JSON"), (parse_toml, "TOML")):
        opening = "a = " if name == "TOML" else ""
        with pytest.raises(InputError, match=f"not valid {name}: nested too deep"):
            read(opening + "[" * 100_000, "x")
    for text, read in (('{"a": ' + "9" * 5000 + "}", parse_json), ("a = " + "9" * 5000, parse_toml)):
        with pytest.raises(InputError, match="a number has thousands of digits"):
            read(text, "x")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert parse_json(read_text(tmp_path / "x.json"), "x") == {"a": 1}


def test_values_built_in_python_are_refused_as_those_of_a_file() -> None:
    with pytest.raises(InputError, match=r"^Job: `seq_length`: Input should be greater than 0 \(got 0\)$"):
        Job(seq_length=0, global_batch_size=1)
    with pytest.raises(InputError, match=r"^Strategy: `dq`: no such field; fields: dp, tp, pp, "):
        Strategy(dq=2)
    with pytest.raises(
        InputError, match=r"^x: `offload.optimiser`: no such field; did you mean `optimizer`\? fields: o"
    ):
        Strategy.parse({"offload": {"optimiser": "cpu"}}, "x")
    with pytest.raises(InputError, match=r"^Job: `global_batch_size`: .*less than or equal to 1000000000"):
        Job(seq_length=1, global_batch_size=10**12)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama-3-8b", {"num_kv_heads": 5}, "num_heads 32 is not a multiple of num_kv_heads 5"),
        ("llama-3-8b", {"head_dim": 127}, "head_dim 127 is odd"),
        ("llama-3-8b", {"norm_eps": float("nan")}, "norm_eps"),
        ("llama-3-8b", {"norm_eps": -1.0}, "norm_eps"),
        ("llama-3-8b", {"rope_theta": 0.0}, "rope_theta"),
        ("llama-3-8b", {"sliding_window": 0}, "sliding_window"),
        ("llama-3-8b", {"family": "mamba"}, "family"),
        ("mixtral-8x7b", {"experts_per_token": 9}, "experts_per_token 9 is more than num_experts 8"),
        ("mixtral-8x7b", {"num_experts": 10**6}, "32 layers of 1000000 experts"),
    ],
)
def test_models_that_cannot_be(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        ModelSpec(**{**load_model(name).model_dump(), **change})
    assert "Value error" not in str(raised.value)
    assert len(str(raised.value)) < 220


def test_a_device_without_speed() -> None:
    table = load_cluster("8xh100").model_dump()
    table["device"]["peak_flops_per_s"]["bf16"] = 0.0
    with pytest.raises(InputError, match=r"device\.peak_flops_per_s\.bf16.*greater than 0"):
        ClusterSpec.parse(table, "mine.toml")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half of it \udc80")
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["x.toml"]


def test_links_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_a_pickled_value_is_its_fields_alone():
    strategy = Strategy(pp=2)
    assert strategy.pipeline_schedule.name == "1f1b"  # cached, and not to be pickled
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert "pipeline_schedule" not in pickle.loads(pickle.dumps(strategy)).__dict__
