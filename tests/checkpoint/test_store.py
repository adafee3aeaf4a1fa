"""Save and load in one process, without a process group; and everything that may be wrong with a checkpoint."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp  # noqa: TID251 the witness
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: TID251

from meshwright.checkpoint import Piece, folder, latest, load, peek, save, storage
from meshwright.checkpoint.planners import PieceSavePlanner
from meshwright.core.errors import CheckpointError
from meshwright.core.placement import Box
from tests.checkpoint.layouts import LAYOUTS, RankState, reference, spec_of


def whole(key: str, tensor: torch.Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(key, shape, Box((0,) * len(shape), shape), tensor)


def tiny(value: float = 1.0) -> list[Piece]:
    return [
        whole(f"{kind}/x", torch.full((4, 6), float(sign * value)))
        for kind, sign in (("parameters", 1), ("moment1", -1))
    ]


def names(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir())


def all_pieces(layout: str, tensors=None, owned=True) -> tuple[list[RankState], list[Piece]]:
    """What all ranks of a layout would pass, in one list; without dp replicas where the same box appears twice."""
    states = [RankState(spec_of(), LAYOUTS[layout], rank) for rank in range(LAYOUTS[layout].world_size)]
    for state in states:
        if tensors is not None:
            state.fill(tensors)
    pieces = [piece for state in states for piece in state.pieces(owned=owned)]
    return states, list({(p.key, p.box): p for p in pieces}.values()) if owned else pieces


@pytest.mark.parametrize("saved", LAYOUTS)
def test_saved_under_one_layout_loaded_under_others(tmp_path, saved):
    tensors = reference(spec_of())
    save(tmp_path, 10, all_pieces(saved, tensors)[1], {"samples": 80})
    order = list(LAYOUTS)
    for ahead in (0, 1, 4):
        loaded = order[(order.index(saved) + ahead) % len(order)]
        states, pieces = all_pieces(loaded, owned=False)
        assert load(tmp_path, pieces) == {"samples": 80, "step": 10}
        assert [key for state in states for key in state.differing(tensors)] == [], f"{saved} → {loaded}"


def test_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path, 1, tiny(), {})
        load(tmp_path, tiny())


def test_scalars_and_empty_tensors(tmp_path):
    pieces = [whole("extra/scalar", torch.tensor(2.5)), whole("extra/empty", torch.zeros(0, 3))]
    save(tmp_path, 1, pieces, {})
    there = whole("extra/scalar", torch.tensor(0.0))
    load(tmp_path, [there])
    assert there.tensor.item() == 2.5


def test_parameters_that_require_grad_and_memory_with_strides(tmp_path):
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    strided = torch.arange(12.0).view(3, 4).T
    save(tmp_path, 1, [whole("parameters/p", parameter), whole("parameters/s", strided)], {})
    new, target = torch.nn.Parameter(torch.zeros(2, 3)), torch.zeros(3, 4)
    load(tmp_path, [whole("parameters/p", new), whole("parameters/s", target.T)])
    assert torch.equal(new, parameter)
    assert new.grad_fn is None
    assert torch.equal(target, torch.arange(12.0).view(3, 4))


def test_bits_survive(tmp_path):
    """Not a number, infinities, negative zero and denormals are numbers of a state like any other."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    save(tmp_path, 1, [whole("master/x", values)], {})
    found = torch.zeros(5)
    load(tmp_path, [whole("master/x", found)])
    assert torch.equal(found.view(torch.int32), values.view(torch.int32))


def test_large_pieces_are_stored_in_slabs(tmp_path):
    """They are cut, and nothing is copied on the way to the file."""
    memory = torch.arange(100.0)
    piece = whole("parameters/x", memory[10:34].view(4, 6))
    planner = PieceSavePlanner([piece], slab_bytes=48)
    planner.set_up_planner({})
    items = planner.create_local_plan().items
    assert [tuple(item.tensor_data.chunk.sizes) for item in items] == [(2, 6), (2, 6)]
    second = planner.resolve_data(items[1])
    assert second.data_ptr() == memory[22:].data_ptr()
    assert second.untyped_storage().nbytes() == 48


def test_other_tools_read_whole_tensors(tmp_path):
    tensors = reference(spec_of())
    save(tmp_path, 7, all_pieces("D2T2z", tensors)[1], {})
    path = tmp_path / "step-00000007"
    found = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, checkpoint_id=path, no_dist=True)
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    converted = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert converted.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor), key
        assert torch.equal(converted[key], tensor), key


def test_layer_numbers_are_global(tmp_path):
    """Layers of constants 0..3, saved as two stages, read as one."""
    layers = [whole(f"parameters/layers.{i}.w", torch.full((3,), float(i))) for i in range(4)]
    save(tmp_path, 1, layers, {})
    found = [whole(f"parameters/layers.{i}.w", torch.zeros(3)) for i in range(4)]
    load(tmp_path, found)
    assert [piece.tensor[0].item() for piece in found] == [0, 1, 2, 3]


# --- the folder ------------------------------------------------------------------------------------


def test_latest_peek_and_chosen_step(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    for step in (5, 20, 100):
        save(tmp_path, step, tiny(step), {"seed": step})
    assert latest(tmp_path) == 100
    assert peek(tmp_path) == {"seed": 100, "step": 100}
    assert peek(tmp_path, 5) == {"seed": 5, "step": 5}
    pieces = tiny(0)
    assert load(tmp_path, pieces, 20)["step"] == 20
    assert pieces[0].tensor[0, 0] == 20


def test_keep_prunes_older_steps_only(tmp_path):
    for step in (1, 2, 3, 9):
        save(tmp_path, step, tiny(), {})
    save(tmp_path, 4, tiny(), {}, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000009"]
    with pytest.raises(CheckpointError, match="keep is 0"):
        save(tmp_path, 5, tiny(), {}, keep=0)
    assert latest(tmp_path) == 9


def test_keep_counts_whole_checkpoints(tmp_path):
    """A damaged one is no substitute for the older one that still loads."""
    for step in (1, 2, 3):
        save(tmp_path, step, tiny(step), {})
    (tmp_path / "step-00000003" / "meshwright.json").unlink()
    save(tmp_path, 4, tiny(4), {}, keep=2)
    assert {"step-00000002", "step-00000004"} <= set(names(tmp_path))
    assert "step-00000001" not in names(tmp_path)


def test_the_same_step_saved_again_replaces(tmp_path):
    save(tmp_path, 3, tiny(1), {"run": 1})
    save(tmp_path, 3, tiny(2), {"run": 2})
    pieces = tiny(0)
    assert load(tmp_path, pieces)["run"] == 2
    assert pieces[0].tensor[0, 0] == 2
    assert names(tmp_path) == ["step-00000003"]


def _die(*args, **kwargs):
    os._exit(9)


def _save_and_die(where: Path, step: int, at: str) -> None:
    """Runs in a process of its own, which dies as a kill would have it: nothing is unwound."""
    rename = Path.rename
    if at == "metadata":
        storage.FileSystemWriter.finish = _die
    elif at == "commit":
        storage.commit = _die
    elif at == "manifest":
        folder._sync = _die
    elif at == "between":  # the old one is set aside, the new one not yet in place
        Path.rename = lambda self, to: _die() if self.suffix == ".partial" else rename(self, to)
    elif at == "settle":
        folder._settle = _die
    elif at == "removal":
        folder.shutil.rmtree = _die
    save(where, step, tiny(step), {}, keep=1)


def killed_save(where: Path, step: int, at: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=_save_and_die, args=(where, step, at))
    process.start()
    process.join(30)
    assert process.exitcode == 9


@pytest.mark.parametrize("at", ["metadata", "commit", "manifest"])
def test_killed_while_saving_keeps_the_previous(tmp_path, at):
    save(tmp_path, 1, tiny(1), {})
    killed_save(tmp_path, 2, at)
    assert names(tmp_path) == ["step-00000001", "step-00000002.partial"]
    pieces = tiny(0)
    assert load(tmp_path, pieces)["step"] == 1
    assert pieces[1].tensor[3, 5] == -1
    save(tmp_path, 3, tiny(3), {})
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize(("at", "value"), [("between", 1.0), ("settle", 2.0)])
def test_killed_while_replacing_a_step(tmp_path, at, value):
    save(tmp_path, 2, tiny(1), {})
    killed_save(tmp_path, 2, at)
    pieces = tiny(0)
    assert load(tmp_path, pieces)["step"] == 2
    assert pieces[0].tensor[0, 0] == value
    save(tmp_path, 3, tiny(3), {})
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    load(tmp_path, pieces, 2)
    assert pieces[0].tensor[0, 0] == value


def test_killed_while_pruning(tmp_path):
    save(tmp_path, 1, tiny(1), {})
    killed_save(tmp_path, 2, "removal")
    assert latest(tmp_path) == 2
    save(tmp_path, 3, tiny(3), {})
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


# --- damage and mismatch ---------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    """Steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path, step, tiny(step), {})
    return tmp_path


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_truncated_file_is_named(two, name):
    file = two / "step-00000002" / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=rf"step-00000002/{name}: damaged: \d+ bytes, \d+ were written"):
        load(two, tiny(), 2)
    assert latest(two) == 1


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meshwright.json"])
def test_missing_file_is_named(two, name):
    (two / "step-00000002" / name).unlink()
    with pytest.raises(CheckpointError, match=f"step-00000002/{name}: .*No such file"):
        load(two, tiny(), 2)
    assert latest(two) == 1


def test_newest_damaged_falls_back_aloud(two):
    (two / "step-00000002" / ".metadata").unlink()
    pieces = tiny(0)
    with pytest.warns(UserWarning, match=r"passed over a damaged checkpoint: .*step-00000002/.metadata"):
        assert load(two, pieces)["step"] == 1
    assert pieces[0].tensor[0, 0] == 1


def test_nothing_whole_is_an_error(two):
    for step in (1, 2):
        (two / f"step-0000000{step}" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000002/__0_0.distcp: damaged: 0 bytes"):
        load(two, tiny())


def test_a_changed_byte_is_seen(two):
    file = two / "step-00000002" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(torch.full((4,), 2.0).numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: parameters/x: damaged: the checksum of .* differs"):
        load(two, tiny(), 2)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_garbage_of_the_right_length_is_seen(two, name):
    file = two / "step-00000002" / name
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(CheckpointError, match=f"step-00000002/{name}.*: damaged"):
        load(two, tiny(), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "damaged: JSON"), ("[]", "damaged: TypeError"), ('{"format": 1}', "damaged"), ('{"format": 2}', "format 2")],
)
def test_manifest_that_cannot_be_used(two, text, message):
    (two / "step-00000002" / "meshwright.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"step-00000002/meshwright.json: {message}"):
        peek(two, 2)


def test_missing_step_lists_those_there(two):
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are: 1, 2"):
        load(two, tiny(), 7)
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        load(two / "nowhere", tiny())
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        peek(two / "nowhere")


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([whole("parameters/x", torch.zeros(4, 7))], r"another model: parameters/x has shape \(4, 6\) there, \(4, 7\)"),
        ([whole("parameters/x", torch.zeros(24))], r"another model: parameters/x has shape \(4, 6\) there, \(24,\)"),
        ([whole("parameters/y", torch.zeros(4, 6))], "holds no tensor parameters/y"),
        (
            [whole("parameters/x", torch.zeros(4, 6).double())],
            "parameters/x is torch.float32 there, torch.float64 here",
        ),
    ],
)
def test_another_model_is_named(two, pieces, message):
    with pytest.raises(CheckpointError, match=message):
        load(two, pieces)
    assert pieces[0].tensor.sum() == 0


def test_a_deeper_model_is_another_model(tmp_path):
    tensors = reference(spec_of(num_layers=3))
    save(tmp_path, 1, [whole(key, tensor) for key, tensor in tensors.items()], {})
    shallow = [whole(key, tensor.clone()) for key, tensor in tensors.items() if ".2." not in key]
    with pytest.raises(CheckpointError, match=r"another model: \d+ of its tensors belong nowhere here"):
        load(tmp_path, shallow)
    load(tmp_path, shallow, partial=True)
    load(tmp_path, [whole(key, tensor) for key, tensor in tensors.items() if key.startswith("parameters/")])


def test_saving_part_of_a_tensor_is_refused(tmp_path):
    save(tmp_path, 1, tiny(), {})
    half = Piece("parameters/x", (4, 6), Box((0, 0), (2, 6)), torch.zeros(2, 6))
    with pytest.raises(CheckpointError, match="parameters/x: ranks hold 12 of its 24 elements"):
        save(tmp_path, 2, [half], {})
    inner = Piece("parameters/x", (4, 6), Box((1, 0), (2, 6)), torch.zeros(2, 6))
    with pytest.raises(CheckpointError, match="overlapping chunks"):
        save(tmp_path, 2, [half, inner], {})
    assert names(tmp_path) == ["step-00000001"]


def test_extra_must_be_json(tmp_path):
    with pytest.raises(CheckpointError, match=r"extra of step 2 is not JSON: .*Tensor.*pass plain values"):
        save(tmp_path, 2, tiny(), {"bad": torch.zeros(1)})
    assert names(tmp_path) == []


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system refuses to write more into a file, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 5_000, 30_000, 41_000])
def test_what_the_system_does_not_write_leaves_nothing_and_is_said(tmp_path, num_bytes):
    """Wherever in a tensor's archive it stops."""
    save(tmp_path, 1, tiny(1), {})
    large = [whole("parameters/x", torch.ones(100, 100)), *tiny(2)[1:]]
    with (
        files_of_at_most(num_bytes),
        pytest.raises(CheckpointError, match=r"saving step 2 to .*: rank 0: OSError: .*File too large"),
    ):
        save(tmp_path, 2, large, {})
    assert names(tmp_path) == ["step-00000001"]


def test_an_interrupt_stays_an_interrupt(tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, tiny(2), {})
    assert latest(tmp_path) is None


def test_manifest_is_readable(two):
    data = json.loads((two / "step-00000002" / "meshwright.json").read_text())
    assert data["format"] == 1
    assert data["step"] == 2
    assert set(data["files"]) == {".metadata", "__0_0.distcp"}
