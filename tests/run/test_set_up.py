"""What can be planned but not be run is refused before a rank starts."""

from __future__ import annotations

import pytest

from meshwright.core.errors import UnsupportedError
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.run.set_up import check_runnable, export_warning
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


def test_a_model_that_cannot_be_exported_is_named_before_it_is_trained() -> None:
    spec = load_model("demo-s")
    assert export_warning(spec) is None
    biased = export_warning(spec.model_copy(update={"qk_norm": True, "family": "llama"}))
    assert biased is not None
    assert biased.endswith("cannot say qk_norm = True (it would be read as False); it can be trained, but not exported")


def test_windows_of_the_catalogue_are_known() -> None:
    with pytest.raises(UnsupportedError, match="4097 tokens"):
        load_model("mistral-7b").check_length(4097)
