"""Every mistake of a user is one clear line and a status that isn't 0, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.core.plan import Plan
from meshwright.core.sources import load_model
from meshwright.run.folder import RunFolder
from tests.end_to_end.desk import Desk
from tests.end_to_end.shell import Result
from tests.end_to_end.tiny import TEXT_BYTES, make_plan, write_config

Cli = Callable[..., Result]


Refused = Callable[..., str]


def test_plans_that_cannot_be_read(desk: Desk, refused: Refused) -> None:
    plan = desk.plan()
    text, out = plan.read_text(), desk.folder / "run"
    broken = desk.write("broken.toml", text[: len(text) // 2 + 3])
    headless = desk.write("headless.toml", text[: text.index("[strategy]")])
    misspelt = desk.write("misspelt.toml", text.replace("\ntp = 1", "\ntp = 1\ntpp = 2"))
    assert "nothing.toml: no such file" in refused("train", desk.folder / "nothing.toml", "--stdlib", "--out", out)
    assert f"{broken}: not valid TOML" in refused("train", broken, "--stdlib", "--out", out)
    assert f"{headless}: `strategy`: Field required\n" in refused("show", headless)
    assert f"{misspelt}: `strategy.tpp`: no such field; did you mean `tp`? fields: dp, tp, " in refused(
        "parity", misspelt
    )
    assert "is a folder" in refused("show", desk.folder)


def test_a_degree_that_does_not_divide(desk: Desk, refused: Refused) -> None:
    plan = desk.plan(tp=2)
    text = plan.read_text().replace("\ntp = 2", "\ntp = 8").replace("devices_per_node = 2", "devices_per_node = 8")
    line = refused("train", desk.write("eight.toml", text), "--stdlib", "--out", desk.folder / "run")
    assert "tp=8 does not divide the heads 4 (rule `tp-heads`" in line
    assert "because a head is computed whole on one rank" in line
    assert "nearest legal: D" in line
    line = refused("plan", write_config(desk.folder), "local:3", "--seq", 32, "--batch", 8, "--fix", "tp=3")
    assert "tp=3 does not divide the heads 4 (rule `tp-heads`" in line


def test_texts_that_cannot_be_trained_on(desk: Desk, refused: Refused) -> None:
    plan, out = desk.plan(), desk.folder / "deep" / "run"
    (desk.folder / "empty").mkdir()
    rows = desk.write("rows.jsonl", '{"words": "no text"}\n')
    short = desk.write("short.txt", "too short\n")
    binary = desk.folder / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00\x80" * 100)

    def train(text: Path) -> str:
        return refused("train", plan, "--text", text, "--out", out)

    assert f"{desk.folder / 'gone.txt'}: no such file or folder" in train(desk.folder / "gone.txt")
    assert "no files of text" in train(desk.folder / "empty")
    assert f'{rows}: no field "text"; it has words' in train(rows)
    assert "the text is too short: " in train(short)
    assert "8 sequences of 32 for training need 257" in train(short)
    assert f"{binary}: not a text file" in train(binary)
    assert "/dev/null: neither a file nor a folder" in train(Path("/dev/null"))
    assert "is empty" in train(desk.write("nothing.txt", ""))
    assert "either --text PATH or --stdlib" in refused("train", plan, "--out", out)
    assert "either --text PATH or --stdlib" in refused("train", plan, "--out", out, "--stdlib", "--text", short)


def test_options_that_contradict(desk: Desk, refused: Refused) -> None:
    plan, out = desk.plan(), desk.folder / "run"
    assert "5 warm-up steps leave none of the 3" in refused(
        "train", plan, "--stdlib", "--steps", 3, "--warmup-steps", 5, "--out", out
    )
    assert "`steps`: Input should be greater than 0" in refused("train", plan, "--stdlib", "--steps", 0, "--out", out)
    assert "`seed`: Input should be greater than or equal to 0 (got -1)" in refused(
        "train", plan, "--stdlib", "--seed", -1, "--out", out
    )
    assert "`learning_rate`: Input should be a finite number" in refused(
        "train", plan, "--stdlib", "--learning-rate", "nan", "--out", out
    )
    assert "No such option: --nonsense" in refused("train", plan, "--stdlib", "--out", out, "--nonsense")


def test_weights_that_are_not_there(desk: Desk, refused: Refused) -> None:
    folder = desk.folder / "weights"
    folder.mkdir()
    line = refused("train", desk.plan(), "--stdlib", "--pretrained", folder, "--out", desk.folder / "run")
    assert f"{folder}: neither `model.safetensors`" in line


def test_models_that_cannot_be_run(desk: Desk, refused: Refused) -> None:
    strange = write_config(desk.folder, model_type="mamba")
    assert "mamba" in refused("plan", strange, "local:2")
    window = load_model(str(write_config(desk.folder, model_type="mistral", sliding_window=16)))
    path = desk.folder / "window.toml"
    make_plan(window).save(path)
    for command in (["parity", path], ["train", path, "--stdlib", "--out", desk.folder / "run"]):
        assert "32 tokens are more than the sliding window of 16" in refused(*command)


def test_plans_that_cannot_be_made(desk: Desk, refused: Refused) -> None:
    config = write_config(desk.folder)
    assert "has 0 devices" in refused("plan", config, "local:0")
    assert "has 0 devices" in refused("plan", config, "0x8xh100")
    assert "--fix nonsense: write FIELD=VALUE" in refused("plan", config, "local:2", "--fix", "nonsense")
    assert "dq" in refused("plan", config, "local:2", "--fix", "dq=2")
    assert "no model `gpt-17`" in refused("plan", "gpt-17", "local:2")
    desk.write("config.json", "{")
    assert "not valid JSON" in refused("plan", config, "local:2")


def test_paths_that_cannot_be_written(desk: Desk, refused: Refused) -> None:
    file, plan = desk.write("file", ""), desk.plan()
    assert "Not a directory" in refused(
        "train", plan, "--stdlib", "--max-text-bytes", TEXT_BYTES, "--out", file / "run"
    )
    assert "Not a directory" in refused("demo", "--out", file / "run")
    assert "Not a directory" in refused("plan", desk.folder / "config.json", "local:1", "--batch", 8, "--seq", 32,
                                        "-o", file / "plan.toml").replace("cannot be written: ", "")  # fmt: skip
    assert "Is a directory" in refused("what-if", plan, "--set", "zero=1", "--out", desk.folder)
    assert "Is a directory" in refused("compare", "zero", "--html", desk.folder)  # before anything is trained


def test_a_folder_that_another_process_trains_in(desk: Desk, refused: Refused) -> None:
    plan, run = desk.plan(), RunFolder(desk.folder / "run")
    with run.claim():
        assert f"{run.path}: process " in refused("train", plan, "--stdlib", "--out", run.path)


def test_another_number_of_ranks_than_the_plan_has(desk: Desk, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = desk.plan(dp=2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for argv in (["parity", plan], ["train", plan, "--stdlib", "--out", desk.folder / "run"]):
        done = cli(*argv)
        assert (done.status, done.out) == (1, "")
        assert "torchrun started a world of 3" in done.err
    assert not (desk.folder / "run").exists()


def test_folders_that_are_no_run(desk: Desk, refused: Refused) -> None:
    for folder in (desk.folder, desk.folder / "gone"):
        assert f"{folder}: not a run" in refused("verify", folder)
        assert f"{folder}: not a run" in refused("export", folder, "--to", desk.folder / "to")
    assert f"{desk.folder}: neither a Hugging Face" in refused("generate", desk.folder, "--prompt", "x")
    assert f"{desk.folder / 'gone'}: there is no such" in refused("generate", desk.folder / "gone", "--prompt", "x")
    assert "not a run" in refused("train", desk.plan(), "--out", desk.folder / "gone", "--resume")


def test_a_run_without_measurements(desk: Desk, refused: Refused) -> None:
    run = desk.folder / "run"
    run.mkdir()
    Plan.load(desk.plan()).save(run / "plan.toml")
    assert "no measurements" in refused("verify", run)
    (run / "measured").mkdir()
    (run / "measured" / "rank-0.json").write_text("{")
    assert "not a record of a run" in refused("verify", run)
    assert "checkpoint" in refused("export", run, "--to", desk.folder / "to")
