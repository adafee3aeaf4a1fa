"""What an engine is given is looked at first: a wrong token would give a plausible loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.core.batch import IGNORE, MicroBatch
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.models.build import build
from meshwright.run import engine as module
from meshwright.run.batches import check_micro_batches
from meshwright.run.engine import Engine, make_mesh, parallelize
from tests.parallel.layouts import gpt2, llama, make_plan
from tests.parallel.runs import counted_batches, make_engine, weights

LLAMA = llama(num_layers=1)
BATCHES = counted_batches(LLAMA, (8, 8))
"""Two micro-batches."""


@pytest.fixture
def engine() -> Engine:
    return make_engine(make_plan(LLAMA, num_micro_batches=2, micro_batch_size=BATCHES[0][0].shape[0]))


def changed(tokens: int | None = None, labels: int | None = None) -> list[MicroBatch]:
    """The batches, with one value of the second micro-batch set."""
    pair = [values.clone() for values in BATCHES[1]]
    for values, value in zip(pair, (tokens, labels), strict=True):
        if value is not None:
            values[0, 1] = value
    return [BATCHES[0], (pair[0], pair[1])]


@pytest.mark.parametrize(
    ("micro_batches", "words"),
    [
        (changed(tokens=LLAMA.vocab_size), f"micro-batch 1 has the token {LLAMA.vocab_size}; .* 0 to"),
        (changed(tokens=-1), "micro-batch 1 has the token -1"),
        (changed(labels=LLAMA.vocab_size), f"micro-batch 1 has the label {LLAMA.vocab_size}; .*, or -100"),
        (changed(labels=-2), "micro-batch 1 has the label -2"),
        ([], "no micro-batches"),
        ([(BATCHES[0][0].float(), BATCHES[0][1])], r"tokens of micro-batch 0 are torch.float32"),
        ([(BATCHES[0][0], BATCHES[0][1].int())], r"labels of micro-batch 0 are torch.int32"),
        ([(BATCHES[0][0], BATCHES[0][1][:, 1:])], "both must be"),
        ([(BATCHES[0][0][0], BATCHES[0][1][0])], "both must be"),
    ],
)
def test_what_cannot_be_trained_on(engine: Engine, micro_batches: list[MicroBatch], words: str) -> None:
    before = weights(engine)
    with pytest.raises(InputError, match=words):
        engine.forward_backward(micro_batches)
    with pytest.raises(InputError, match=words):
        engine.evaluate([BATCHES, micro_batches])
    assert torch.isfinite(engine.step(BATCHES, 0.0).loss)
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(before, weights(engine), strict=True))


def test_sequences_that_ranks_cannot_divide() -> None:
    with pytest.raises(
        InputError, match="sequences of 8 tokens, which 3 ranks cannot divide evenly; fill them up to 9"
    ):
        check_micro_batches(BATCHES, LLAMA, token_parts=3)


def test_ignored_labels_are_no_tokens(engine: Engine) -> None:
    engine.step(changed(labels=IGNORE), 0.0)


def test_sequences_longer_than_the_model_takes() -> None:
    long = (torch.zeros(1, 9, dtype=torch.int64),) * 2
    with pytest.raises(InputError, match=r"9 tokens, but .* 8 learned positions"):
        check_micro_batches([long], gpt2(max_positions=8))
    with pytest.raises(UnsupportedError, match="sliding window of 8"):
        check_micro_batches([long], llama(sliding_window=8))


@pytest.mark.parametrize(
    ("micro_batches", "words"),
    [
        (BATCHES[:1], "given 1 micro-batch of .*, the plan has 2"),
        ([*BATCHES, BATCHES[0]], "given 3 micro-batches"),
        ([(t[:, :-1], labels[:, :-1]) for t, labels in BATCHES], r"given 2 micro-batches of \[\d, 7\]"),
        ([(t.repeat(2, 1), labels.repeat(2, 1)) for t, labels in BATCHES], "the plan has 2 of"),
    ],
)
def test_a_step_is_the_plans_and_other_steps_are_written_out(
    engine: Engine, micro_batches: list[MicroBatch], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        engine.step(micro_batches, 0.0)
    loss = float(engine.update(engine.forward_backward(micro_batches), 0.0).loss)
    assert loss == pytest.approx(engine.evaluate([micro_batches]), rel=1e-6)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1])
def test_a_learning_rate_is_a_number(engine: Engine, rate: float) -> None:
    with pytest.raises(InputError, match="learning_rate"):
        engine.step(BATCHES, rate)


def test_a_step_below_zero_is_not_saved(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="step -1 cannot be saved"):
        engine.save(tmp_path / "checkpoints", -1)
    assert not (tmp_path / "checkpoints").exists()


def test_a_model_is_split_once_and_must_be_the_plans(engine: Engine) -> None:
    plan, mesh = engine.plan, engine.mesh
    model = build(plan.model)
    parallelize(model, plan, mesh=mesh)
    with pytest.raises(InputError, match="was split by parallelize already"):
        parallelize(model, plan, mesh=mesh)
    wider = build(llama(num_layers=1, ffn_size=LLAMA.ffn_size * 2))
    with pytest.raises(InputError, match=r"parameter `layers.0.mlp.gate.weight` is \["):
        parallelize(wider, plan, mesh=make_mesh(plan))
    with pytest.raises(InputError, match=r"parameter `head.weight` is not there"):
        parallelize(build(LLAMA.model_copy(update={"tied_embeddings": True})), plan, mesh=mesh)
    with pytest.raises(InputError, match=r"has no parameter `layers.1"):
        parallelize(build(llama(num_layers=2)), plan, mesh=mesh)


def test_where_values_are_not_read_a_wrong_one_makes_the_loss_nan_and_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_read(micro_batches: Any, spec: Any, token_parts: int) -> torch.Tensor:
        return torch.tensor(True)

    monkeypatch.setattr(module, "check_micro_batches", not_read)
    before = [b.parameters.clone() for b in engine.parallel.states.buckets]
    stats = engine.step(BATCHES, 0.1)
    assert torch.isnan(stats.loss)
    assert bool(stats.skipped)
    assert all(torch.equal(a, b.parameters) for a, b in zip(before, engine.parallel.states.buckets, strict=True))
