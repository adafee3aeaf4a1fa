"""A run that goes on: exactly as if it had never stopped, and under any other layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.checkpoint import Piece, save
from meshwright.core.errors import InputError
from meshwright.core.placement import Box
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.rehearse.verify import differences
from meshwright.run.folder import RunFolder
from meshwright.run.generate import continue_text, divided
from meshwright.run.set_up import set_up
from meshwright.serve.request import SamplingParams
from meshwright.train.data import PackedDataset
from meshwright.train.metrics import read_metrics
from meshwright.train.prepare import load_prepared
from tests.end_to_end.tiny import BATCH, CONFIG, SEQ_LENGTH, make_plan, make_run, options, tiny_model, train_rank

Ranks = Callable[..., list[Any]]
TIMEOUT_S = 240.0
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)


def train(ranks: Ranks, plan: Plan, run: RunFolder, *, resume: bool = False, stop_after: int | None = None) -> None:
    """Train a run that has been set up, on the pool's ranks."""
    ranks(train_rank, plan.strategy.world_size, run.path, plan, resume, stop_after, timeout_s=TIMEOUT_S)


def losses(run: RunFolder) -> list[float]:
    rows = read_metrics(run.path)
    assert [row.step for row in rows] == list(range(len(rows)))
    return [row.loss for row in rows]


def test_a_resumed_run_repeats_the_uninterrupted_one(ranks: Ranks, tmp_path: Path) -> None:
    plan, wanted = make_plan(tiny_model(tmp_path), dp=2, zero=1), options(6, save_every=3)
    whole, halves = (make_run(plan, wanted, tmp_path / name) for name in ("whole", "halves"))
    train(ranks, plan, whole)
    train(ranks, plan, halves, stop_after=3)
    assert len(losses(halves)) == 3
    set_up(plan, wanted, halves, resume=True)
    train(ranks, plan, halves, resume=True)
    assert losses(halves) == losses(whole)
    assert [row.grad_norm for row in read_metrics(halves.path)] == [row.grad_norm for row in read_metrics(whole.path)]


def continued(rank: int, world: int, folder: Path, plan: str | None) -> str:
    """What a run makes of a prompt, on the ranks of a plan."""
    return continue_text(folder, "def main(", GREEDY, Plan.from_toml(plan) if plan else None)


def test_a_run_goes_on_under_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    """1D over every axis, a square, a cube: losses of one process; then its text, on one process and on a square."""
    model, wanted = tiny_model(tmp_path), options(6, save_every=2)
    alone = make_plan(model)
    whole = make_run(alone, wanted, tmp_path / "whole")
    train(ranks, alone, whole)
    layouts = [make_plan(model, 2, 2, 2, zero=1), make_plan(model, tp=4, kind="2d"), make_plan(model, tp=8, kind="3d")]
    run = make_run(layouts[0], wanted, tmp_path / "run")
    train(ranks, layouts[0], run, stop_after=2)
    set_up(layouts[1], wanted, run, resume=True)
    record_of_another_plan(run)
    train(ranks, layouts[1], run, resume=True, stop_after=4)
    assert not run.measured.exists()
    set_up(layouts[2], wanted, run, resume=True)
    train(ranks, layouts[2], run, resume=True)
    torch.testing.assert_close(torch.tensor(losses(run)), torch.tensor(losses(whole)), rtol=1e-5, atol=0)
    assert run.plan() == layouts[2]
    assert differences(run.plan(), RankRecord.load_all(run.measured)) == []
    alone, *on_ranks = continued(0, 1, run.path, None), *ranks(continued, 4, run.path, divided(layouts[1]).to_toml())
    assert len(alone) > len("def main(")
    assert on_ranks == [alone] * 4


def test_a_run_killed_before_its_first_checkpoint_starts_anew(ranks: Ranks, tmp_path: Path) -> None:
    plan, wanted = make_plan(tiny_model(tmp_path)), options(3)
    run = make_run(plan, wanted, tmp_path / "run")
    set_up(plan, wanted, run, resume=True)
    train(ranks, plan, run, resume=True)
    assert len(losses(run)) == 3


def test_a_run_needs_its_text_only_once(ranks: Ranks, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    plan = make_plan(tiny_model(tmp_path))
    wanted = options(2, save_every=1, text=str(text))
    run = make_run(plan, wanted, tmp_path / "run")
    train(ranks, plan, run, stop_after=1)
    text.unlink()
    set_up(plan, wanted, run, resume=True)
    train(ranks, plan, run, resume=True)
    assert len(losses(run)) == 2


def record_of_another_plan(run: RunFolder) -> None:
    """As if the run had been trained on more ranks before."""
    run.measured.mkdir()
    (run.measured / "rank-7.json").write_text("{}")


def save_state(run: RunFolder, seed: int) -> None:
    """A checkpoint that says where in the text it is, and nothing else."""
    data = PackedDataset(load_prepared(run.data).train_tokens(), SEQ_LENGTH, BATCH, seed)
    save(run.checkpoints, 1, [Piece("x", (1,), Box.whole((1,)), torch.zeros(1))], {"data": data.state_dict(1)})


def test_another_run_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    plan, wanted = make_plan(model), options(3)
    run = make_run(plan, wanted, tmp_path / "run")
    record_of_another_plan(run)
    save_state(run, seed=0)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    wider = model.model_copy(update={"ffn_size": 128, "name": "wider"})
    longer = plan.job.model_copy(update={"seq_length": 16})
    text = tmp_path / "text.txt"
    text.write_text("another text\n" * 500)
    with pytest.raises(InputError, match=r"another model .*now `wider`"):
        set_up(plan.model_copy(update={"model": wider}), wanted, run, resume=True)
    with pytest.raises(InputError, match="another sequence length: 32, now 16"):
        set_up(plan.model_copy(update={"job": longer}), wanted, run, resume=True)
    with pytest.raises(InputError, match="made from other text"):
        set_up(plan, wanted.model_copy(update={"text": str(text)}), run, resume=True)
    with pytest.raises(InputError, match="holds a run already"):
        set_up(plan, wanted, run, resume=False)
    with pytest.raises(InputError, match=r"`pretrained` must stay what it was \(none\); to start from other, use"):
        set_up(plan, wanted.model_copy(update={"pretrained": "other"}), run, resume=True)
    with pytest.raises(InputError, match="`seed` is 9, it was 0"):
        set_up(plan, wanted.model_copy(update={"seed": 9}), run, resume=True)
    set_up(plan, wanted.model_copy(update={"steps": 9}), run, resume=True)  # before its checkpoint is loaded
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_pretrained_model_starts_where_transformers_left_it(ranks: Ranks, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    plan = make_plan(tiny_model(tmp_path), tp=2, pp=2)
    folder = tmp_path / "pretrained"
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    theirs.save_pretrained(folder)
    tokens = make_run(plan, options(1), tmp_path / "only-for-its-tokenizer").data
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokens / name).read_bytes())
    run = make_run(plan, options(1, pretrained=str(folder)), tmp_path / "run")
    train(ranks, plan, run)
    data = PackedDataset(load_prepared(run.data).train_tokens(), SEQ_LENGTH, BATCH, seed=0)
    ((inputs, labels),) = data.micro_batches(0, 0, 1, 1, BATCH)
    with torch.no_grad():
        expected = F.cross_entropy(theirs(inputs).logits.flatten(0, 1), labels.flatten())
    assert losses(run)[0] == pytest.approx(float(expected), rel=1e-5)
