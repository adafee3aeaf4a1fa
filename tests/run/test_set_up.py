"""What can be planned but not be run is refused before a rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.errors import InputError, MeshwrightWarning, UnsupportedError
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.run.folder import RunFolder
from meshwright.run.options import TrainOptions
from meshwright.run.set_up import check_runnable, export_warning, set_up
from meshwright.train.loss_scale import LossScaleOptions
from tests.shapes import make_model


def plan(strategy: Strategy, **shape: int) -> Plan:
    job = Job(seq_length=32, global_batch_size=1)
    return Plan(model=make_model(**shape), cluster=load_cluster("local:1"), job=job, strategy=strategy)


def test_what_is_only_forecast_is_refused() -> None:
    check_runnable(plan(Strategy()))
    check_runnable(plan(Strategy(), sliding_window=32))
    with pytest.raises(UnsupportedError, match=r"32 tokens are more than the sliding window of 31 .* at most 31"):
        check_runnable(plan(Strategy(), sliding_window=31))
    with pytest.raises(UnsupportedError, match=r"`bf16-20` is for forecasts only; train with one of fp32, .*bf16-16"):
        check_runnable(plan(Strategy(precision="bf16-20")))


def test_a_loss_scale_is_for_fp16_alone(tmp_path: Path) -> None:
    settings = {"initial": "1024", "interval": "7"}
    options = TrainOptions.parse({"text": "no such file", "loss_scale": settings}, "options")
    with pytest.raises(InputError, match="loss_scale with precision=bf16, which needs none"):
        set_up(plan(Strategy(precision="bf16")), options, RunFolder(tmp_path / "run"), resume=False)
    with pytest.raises(InputError, match="no such file"):
        set_up(plan(Strategy(precision="fp16")), options, RunFolder(tmp_path / "run"), resume=False)
    found = TrainOptions.from_toml(options.to_toml()).optimizer("adamw").loss_scale
    assert (found.initial, found.interval, found.growth) == (1024.0, 7, LossScaleOptions().growth)
    assert TrainOptions().optimizer("adamw").loss_scale == LossScaleOptions()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"intial": "1"}, "loss_scale.*intial"),
        ({"growth": "0.5"}, "growth 0.5 must be above 1"),
        ({"initial": "many"}, "loss_scale.*number"),
    ],
)
def test_a_loss_scale_that_cannot_work_is_one_line(settings: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        TrainOptions.parse({"loss_scale": settings}, "options")
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_exported_is_named_before_it_is_trained() -> None:
    spec = load_model("demo-s")
    assert export_warning(spec) is None
    biased = export_warning(spec.model_copy(update={"qk_norm": True, "family": "llama"}))
    assert biased is not None
    assert biased.endswith("cannot say qk_norm = True (it would be read as False); it can be trained, but not exported")


def test_sequences_beyond_the_positions_of_a_model_are_named() -> None:
    """Once where they are planned, once where they are trained; learned positions are refused."""
    spec = load_model("demo-s")
    assert spec.length_warning(spec.max_positions) is None
    said = spec.length_warning(spec.max_positions + 1)
    assert said is not None
    assert said.startswith(f"sequences of {spec.max_positions + 1:,} tokens, but `demo-s` is made for ")
    windowed = spec.model_copy(update={"sliding_window": 32})
    assert windowed.length_warning(32) is None
    said = windowed.length_warning(33)
    assert said is not None
    assert "without the sliding window of 32" in said
    learned = load_model("gpt2")
    with pytest.raises(InputError, match="1,025 tokens, but `gpt2` has 1024 learned positions"):
        learned.check_length(1025)
    assert learned.length_warning(1025) is None


def test_they_are_trained_with_a_warning(tmp_path: Path) -> None:
    """Before the text is looked at, which is not there."""
    long = plan(Strategy()).model_copy(update={"job": Job(seq_length=4096, global_batch_size=1)})
    with pytest.warns(MeshwrightWarning, match="sequences of 4,096 tokens"), pytest.raises(InputError):
        set_up(long, TrainOptions(text=str(tmp_path / "missing.txt")), RunFolder(tmp_path / "run"), resume=False)


def test_windows_of_the_catalogue_are_known() -> None:
    with pytest.raises(UnsupportedError, match="4097 tokens"):
        load_model("mistral-7b").check_length(4097)
