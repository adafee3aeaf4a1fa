"""What `meshwright train` says before it starts its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright
import meshwright.cli.train
from meshwright.cli.main import main
from meshwright.cli.train import train
from meshwright.core.errors import InputError
from meshwright.run.folder import RunFolder
from meshwright.run.options import TrainOptions

WORDS = "no checkpoint in it yet; training starts again with its first step"


@pytest.mark.parametrize(("resume", "is_said"), [(True, True), (False, False)])
def test_a_run_resumed_before_its_first_checkpoint_says_so(
    resume: bool, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meshwright.cli.train, "enter_ranks", lambda *_args, **_kwargs: None)
    job = meshwright.Job(seq_length=32, global_batch_size=4)
    plan = meshwright.plan(meshwright.load_model("demo-s"), meshwright.load_cluster("local:1"), job).plan
    run, options = RunFolder(tmp_path / "run"), TrainOptions()
    run.write(plan, options)
    train(plan, options, run, resume=resume)
    assert (WORDS in capsys.readouterr().out) is is_said


def test_a_folder_without_a_run_is_not_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meshwright.cli.train, "enter_ranks", lambda *_args, **_kwargs: None)
    job = meshwright.Job(seq_length=32, global_batch_size=4)
    plan = meshwright.plan(meshwright.load_model("demo-s"), meshwright.load_cluster("local:1"), job).plan
    train(plan, TrainOptions(), RunFolder(tmp_path), resume=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1024", "--loss-scale 1024: write FIELD=VALUE, for example --loss-scale initial=1024,interval=200; fields: "),
        ("initial=8,initial=9", "--loss-scale initial=9: `initial` is already 8"),
        ("intervall=8", "--loss-scale intervall=8: not a field of the loss scale; did you mean `interval`"),
    ],
)
def test_a_loss_scale_that_says_nothing_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        main(["train", "plan.toml", "--out", str(tmp_path / "run"), "--stdlib", "--loss-scale", text])
