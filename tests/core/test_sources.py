"""Models and clusters from what a user types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.hf_config import to_hf_config
from meshwright.core.sources import (
    Machine,
    cluster_warning,
    core_warning,
    device_names,
    load_cluster,
    load_model,
    local_cluster,
    model_names,
    this_machine,
)

from .published import PUBLISHED

# --- models ------------------------------------------------------------------------------------------------


def test_every_preset_loads_and_carries_its_name() -> None:
    assert len(model_names()) >= 24
    for name in model_names():
        assert load_model(name).name == name
    assert load_model("GPT2") == load_model("gpt2")


@pytest.mark.parametrize(("name", "layers", "width"), [("demo-s", 4, 256), ("demo-m", 8, 512), ("demo-l", 12, 768)])
def test_demo_models(name: str, layers: int, width: int) -> None:
    spec = load_model(name)
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.head_dim) == ("llama", layers, width, 64)
    assert spec.ffn_size % 64 == 0
    assert abs(spec.ffn_size - 8 / 3 * width) <= 32
    assert not spec.tied_embeddings


def test_model_from_file_folder_and_toml(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED["qwen3-8b"][0]))
    spec = load_model(str(folder))
    assert spec.name == "my-model"
    assert (
        spec
        == load_model(str(folder / "config.json"))
        == load_model("qwen3-8b").model_copy(update={"name": "my-model"})
    )
    (folder / "config.json").rename(folder / "small.json")
    assert load_model(str(folder / "small.json")) == spec.model_copy(update={"name": "small"})
    (folder / "model.toml").write_text(spec.to_toml())
    assert load_model(str(folder / "model.toml")) == spec


def test_preset_wins_over_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(to_hf_config(load_model("gpt2-xl"))))
    assert load_model("gpt2").num_layers == 12
    assert load_model("./gpt2").num_layers == 48


GARBAGE = {
    "empty": ("", "the file is empty"),
    "truncated": ('{"model_type": "llama", "vocab_size": 32', "not valid JSON.*truncated"),
    "a list": ("[1, 2]", "a JSON object was expected, found list"),
    "nothing in it": ("{}", "`model_type` is missing"),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_damaged_file(case: str, tmp_path: Path) -> None:
    text, message = GARBAGE[case]
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as raised:
        load_model(str(path))
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_file_that_is_not_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match="not a text file"):
        load_model(str(tmp_path / "config.json"))
    with pytest.raises(InputError, match=r"missing\.json: no such file"):
        load_model(str(tmp_path / "missing.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty/config\.json: no such file"):
        load_model(str(tmp_path / "empty"))


def test_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedError, match="mamba") as raised:
        load_model(str(path))
    assert str(raised.value).startswith(str(path))


def test_unknown_preset_suggests() -> None:
    with pytest.raises(InputError, match="did you mean `llama-2-7b`"):
        load_model("llama-2-7")
    with pytest.raises(InputError, match="known: gpt2, gpt2-medium"):
        load_model("zzz")
    with pytest.raises(InputError, match="no model ``"):
        load_model("")


# --- clusters ----------------------------------------------------------------------------------------------


def test_shapes() -> None:
    two = load_cluster("2x8xh100")
    assert (two.num_nodes, two.devices_per_node, two.num_devices, two.backend) == (2, 8, 16, "nccl")
    one = load_cluster("8xH100")
    assert (one.num_nodes, one.devices_per_node) == (1, 8)
    assert load_cluster("4xrtx4090").device.name == "RTX-4090-24GB"
    assert load_cluster("8xa100").device == load_cluster("8xa100-80gb").device


@pytest.mark.parametrize(
    ("device", "peak", "memory_gib", "bandwidth", "nic"),
    [
        ("v100-16gb", {"fp16": 125e12}, 16, 900e9, 6.25e9),
        ("v100-32gb", {"fp16": 125e12}, 32, 900e9, 6.25e9),
        ("a100-40gb", {"bf16": 312e12}, 40, 1555e9, 25e9),
        ("a100-80gb", {"bf16": 312e12}, 80, 2039e9, 25e9),
        ("h100", {"bf16": 989e12}, 80, 3350e9, 50e9),
        ("h200", {"bf16": 989e12}, 141, 4800e9, 50e9),
        ("b200", {"bf16": 2250e12}, 180, 8000e9, 50e9),
        ("l40s", {"bf16": 362e12}, 45, 864e9, 1.5625e9),
        ("rtx4090", {"bf16": 165.2e12}, 24, 1008e9, 1.5625e9),
        ("mi300x", {"bf16": 1307e12}, 192, 5300e9, 50e9),
    ],
)
def test_device_figures(device: str, peak: dict[str, float], memory_gib: int, bandwidth: float, nic: float) -> None:
    """Dense peaks (a sparse figure is twice as large), memory within a GiB, links per direction."""
    cluster = load_cluster(f"2x8x{device}")
    assert peak.items() <= cluster.device.peak_flops_per_s.items()
    assert abs(cluster.device.memory_bytes / 2**30 - memory_gib) < 0.1
    assert cluster.device.memory_bandwidth_bytes_per_s == bandwidth
    assert cluster.inter_link.bandwidth_bytes_per_s == nic
    assert cluster.device.source


def test_intra_link_is_what_is_reached_not_the_peak() -> None:
    assert load_cluster("8xh100").intra_link.bandwidth_bytes_per_s == pytest.approx(0.75 * 450e9)
    assert load_cluster("8xl40s").intra_link.bandwidth_bytes_per_s == pytest.approx(1.2e9)


def test_host_of_a_node_is_its_devices_shares(tmp_path: Path) -> None:
    """By the data sheets; a cluster file's own figure wins; where nothing is known, nothing is stated."""
    whole, half = load_cluster("8xh100"), load_cluster("2x4xa100")
    assert (whole.host_memory_bytes, whole.host_bandwidth_bytes_per_s) == (2 * 10**12, 64e9)
    assert (half.host_memory_bytes, half.host_bandwidth_bytes_per_s) == (10**12, 32e9)
    file = tmp_path / "mine.toml"
    file.write_text('num_nodes = 1\ndevices_per_node = 8\ndevice = "h100"\nhost_memory_bytes = 7\n')
    assert load_cluster(str(file)).host_memory_bytes == 7
    for name in ("8xv100", "8xgb200", "local:2"):
        assert load_cluster(name).host_memory_bytes is None


def test_v100_has_no_bf16() -> None:
    assert "bf16" not in load_cluster("8xv100").device.peak_flops_per_s


def test_every_device_is_a_cluster() -> None:
    for name in device_names():
        assert load_cluster(f"2x4x{name}").num_devices == 8


def test_local_divides_the_machine() -> None:
    machine = Machine(num_cores=2, memory_bytes=24 * 2**30)
    alone, full, crowded = (local_cluster(n, machine) for n in (1, 2, 8))
    assert [c.device.memory_bytes for c in (alone, full, crowded)] == [24 * 2**30, 12 * 2**30, 3 * 2**30]
    assert alone.device.peak_flops_per_s == full.device.peak_flops_per_s
    assert crowded.device.peak_flops_per_s["fp32"] == pytest.approx(full.device.peak_flops_per_s["fp32"] / 4)
    assert crowded.num_devices * crowded.device.peak_flops_per_s["fp32"] == pytest.approx(
        full.num_devices * full.device.peak_flops_per_s["fp32"]
    )
    assert (full.num_nodes, full.backend, full.name) == (1, "gloo", "local:2")


def test_local_of_this_machine() -> None:
    machine = this_machine()
    assert load_cluster("local:2") == local_cluster(2, machine)
    assert load_cluster("local").num_devices == machine.num_cores


def test_core_warning() -> None:
    warning = core_warning(8, cores=2)
    assert warning is not None
    assert warning.startswith("8 ranks share 2 cores")
    assert core_warning(2, cores=2) is None
    assert cluster_warning(local_cluster(10**6, Machine(num_cores=2, memory_bytes=2**34)))
    assert cluster_warning(load_cluster("128x8xh100")) is None


def test_cluster_file_short_and_whole(tmp_path: Path) -> None:
    short = tmp_path / "lab.toml"
    short.write_text(
        'num_nodes = 3\ndevices_per_node = 4\ndevice = "a100"\ncompute_efficiency = 0.4\n'
        '[inter_link]\nname = "25 GbE"\nbandwidth_bytes_per_s = 3e9\nlatency_s = 2e-5\n'
    )
    lab = load_cluster(str(short))
    assert (lab.name, lab.num_devices, lab.compute_efficiency) == ("lab", 12, 0.4)
    assert lab.inter_link.bandwidth_bytes_per_s == 3e9
    assert lab.intra_link == load_cluster("8xa100").intra_link
    whole = tmp_path / "whole.toml"
    whole.write_text(lab.to_toml())
    assert load_cluster(str(whole)) == lab


BAD_CLUSTERS = {
    "0xh100": "0 devices",
    "0x8xh100": "0 devices",
    "8xh10": "did you mean `h100`",
    "8x8xtpu": "no device `tpu`",
    "local:0": "0 devices",
    "local:two": "whole number",
    "local:-1": "whole number",
    "local:²": "whole number",
    "h100": "write 8x8xh100",
    "selen": "did you mean `selene`",
    "": "write 8x8xh100",
    "nowhere.toml": "no such file",
}


@pytest.mark.parametrize("text", BAD_CLUSTERS)
def test_bad_cluster_is_one_clear_line(text: str) -> None:
    with pytest.raises(InputError, match=BAD_CLUSTERS[text]) as raised:
        load_cluster(text)
    assert "\n" not in str(raised.value)


BAD_FILES = {
    "garbage": ("{{{", "not valid TOML"),
    "zero nodes": ('num_nodes = 0\ndevices_per_node = 4\ndevice = "h100"', "`num_nodes` is 0"),
    "no size": ('num_nodes = 2\ndevice = "h100"', "`devices_per_node`"),
    "unknown device": ('num_nodes = 2\ndevices_per_node = 4\ndevice = "h99"', "no device `h99`"),
    "misspelt": ('nodes = 2\nnum_nodes = 2\ndevices_per_node = 4\ndevice = "h100"', "`nodes`"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_cluster_file(case: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[case]
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as raised:
        load_cluster(str(path))
    assert str(path) in str(raised.value)
