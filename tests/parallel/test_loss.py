"""The vocabulary-parallel cross entropy beside PyTorch's: smoothing, z-loss, ignored labels, large logits."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.comm.mesh import Mesh
from meshwright.core.batch import IGNORE
from meshwright.core.job import Job
from meshwright.core.placement import even_split
from meshwright.parallel.loss import Slice, cross_entropy_sum
from tests.parallel.layouts import llama, make_plan
from tests.parallel.test_matrix import Ranks, assert_parity

VOCAB = 29
"""Not divisible by 2, 3 or 4."""
JOB = Job(seq_length=8, global_batch_size=1)
JOBS = {
    "plain": JOB,
    "smoothing": JOB.model_copy(update={"label_smoothing": 0.1}),
    "megatron's smoothing": JOB.model_copy(update={"label_smoothing": 0.1, "label_smoothing_rule": "megatron"}),
    "z-loss": JOB.model_copy(update={"z_loss": 1e-2}),
    "both": JOB.model_copy(update={"label_smoothing": 0.2, "z_loss": 1e-2}),
}


def inputs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(logits [T, V], labels [T]) of each case."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (11,), generator=generator)
    some = labels.masked_fill(torch.arange(11) % 3 == 0, IGNORE)
    return {
        "all": (logits, labels),
        "some ignored": (logits, some),
        "large": (1e3 * logits, some),
        "all ignored": (logits, torch.full_like(labels, IGNORE)),
        "zero": (torch.zeros_like(logits), labels),
    }


def slice_of(mesh: Mesh, job: Job) -> Slice:
    axis = mesh["tp"]
    first, _ = even_split(VOCAB, axis.size, axis.index)
    return Slice(axis, first, VOCAB, job.smoothing(VOCAB), job.z_loss)


def on_rank(rank: int, world: int, is_local: bool = False) -> dict[tuple[str, str], Any]:
    """(job, case) → (loss, gradient of this rank's logits). `is_local`: the fault of smoothing over the own slice."""
    mesh, found = Mesh.create({"tp": world}), {}
    for name, job in JOBS.items():
        for case, (logits, labels) in inputs().items():
            of = slice_of(mesh, job)
            _, size = even_split(VOCAB, world, rank)
            own = logits[:, of.first : of.first + size].clone().requires_grad_()
            of = replace(of, vocab_size=size) if is_local else of
            loss = cross_entropy_sum(own * 1.0, labels, of)
            loss.backward()
            found[name, case] = loss.detach(), own.grad
    return found


def expected(job: Job, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By PyTorch, and by the definition of Megatron's ε: of log-probabilities, ε·V/(V − 1) of their mean."""
    logits = logits.clone().requires_grad_()
    smoothing = job.label_smoothing
    if job.label_smoothing_rule == "megatron":
        smoothing *= VOCAB / (VOCAB - 1)
        of_token = logits.log_softmax(-1)
        target = of_token.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        loss = (-(1 - smoothing) * target - smoothing * of_token.mean(-1))[labels != IGNORE].sum()
    else:
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    loss = loss + job.z_loss * logits.logsumexp(-1)[labels != IGNORE].square().sum()
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_slice_agrees_with_one_process(ranks: Ranks, world: int) -> None:
    by_rank = ranks(on_rank, world, timeout_s=60)
    for (name, case), of_case in {key: [found[key] for found in by_rank] for key in by_rank[0]}.items():
        loss, grad = expected(JOBS[name], *inputs()[case])
        for ours, _ in of_case:
            torch.testing.assert_close(ours, loss, rtol=1e-12, atol=1e-12, msg=f"{name}, {case}")
        torch.testing.assert_close(torch.cat([g for _, g in of_case], dim=-1), grad, rtol=1e-10, atol=1e-12)
        assert all(bool(g.isfinite().all()) for _, g in of_case)
        if case == "all ignored":
            assert float(loss) == 0
            assert not any(bool(g.any()) for _, g in of_case)
    assert float(by_rank[0]["plain", "zero"][0]) == pytest.approx(11 * log(VOCAB))  # no padded column counts


def test_smoothing_over_the_own_slice_is_noticed(ranks: Ranks) -> None:
    """A known fault of other implementations: the vocabulary of one rank taken for the whole."""
    by_rank = ranks(on_rank, 2, True, timeout_s=60)
    loss, _ = expected(JOBS["smoothing"], *inputs()["all"])
    assert abs(float(by_rank[0]["smoothing", "all"][0]) / float(loss) - 1) > 1e-3
    assert float(by_rank[0]["plain", "all"][0]) == pytest.approx(float(expected(JOB, *inputs()["all"])[0]))


def test_training_with_smoothing_and_z_loss_equals_one_process(ranks: Ranks) -> None:
    """Traffic and memory too; loss, gradients and weights of every step."""
    changes = {"label_smoothing": 0.1, "z_loss": 1e-2}
    plans = [
        make_plan(llama(num_layers=2), tp=2, micro_batch_size=2),
        make_plan(llama(num_layers=2), tp=2, sequence="megatron", pp=2, num_micro_batches=2),
    ]
    assert_parity(ranks, [p.model_copy(update={"job": p.job.model_copy(update=changes)}) for p in plans])


def known_loss(rank: int, world: int) -> tuple[float, float]:
    """Of logits [0, 1, 2, 3] and label 3: by slices, and if every rank took the gathered row for its slice."""
    axis, row = Mesh.create({"tp": world})["tp"], torch.arange(4, dtype=torch.float64).unsqueeze(0)
    of = Slice(axis, 2 * rank, 4)
    parts = (row[:, 2 * rank : 2 * rank + 2].clone(), row.clone())
    sliced, gathered = (float(cross_entropy_sum(part, torch.tensor([3]), of)) for part in parts)
    return sliced, gathered


def test_a_gathered_row_is_not_taken_for_a_slice(ranks: Ranks) -> None:
    for sliced, gathered in ranks(known_loss, 2):  # type: ignore[misc]
        assert sliced == pytest.approx(0.4402, abs=5e-5)
        assert abs(gathered - sliced) > 0.1


def test_evaluation_is_plain_cross_entropy() -> None:
    mesh = Mesh.create({"tp": 1})
    logits, labels = inputs()["some ignored"]
    of = slice_of(mesh, JOBS["both"]).plain()
    assert float(cross_entropy_sum(logits.clone(), labels, of)) == pytest.approx(
        float(expected(JOB, logits, labels)[0])
    )
