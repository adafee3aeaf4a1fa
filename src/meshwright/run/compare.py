"""Train one model in several ways, one after the other, on the same text, seed and batches.

    OUT/data/                                   the text, tokenised once
    OUT/zero2/ plan.toml run.toml               one way of training
    OUT/zero2/ metrics.jsonl measured/rank-N    what came of it

    zero_trials, precision_trials ─▶ set_up_trials (before the ranks) ─▶ run_trials (in every rank) ─▶
    run_in_one_process (DataParallel, when the ranks are done) ─▶ outcomes

No checkpoint is written.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Strategy
from meshwright.models import init
from meshwright.models.build import build
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.states import DTYPES
from meshwright.run.folder import RunFolder
from meshwright.run.options import TrainOptions
from meshwright.run.outcome import Outcome, Trial, device_coordinates
from meshwright.run.set_up import check_runnable
from meshwright.run.training import MEASURED_STEP, Training
from meshwright.train.data import PackedDataset
from meshwright.train.metrics import MetricsWriter, StepMetrics, read_metrics
from meshwright.train.optimizer import OptimizerOptions
from meshwright.train.prepare import load_prepared, prepare
from meshwright.train.progress import Progress

DATA_PARALLEL = "DataParallel"
HYBRID_NODES = 2
"""Nodes that the ranks of this machine stand for where shards stay inside a node."""
MIN_STEPS = MEASURED_STEP + 1
"""Steps until everything is measured."""


@dataclass(frozen=True, slots=True)
class Request:
    """What all trials of a comparison share."""

    model: ModelSpec
    ranks: int
    seq_length: int
    batch: int
    """Sequences of a step, over all ranks."""
    num_micro_batches: int = 1

    def plan(self, cluster: ClusterSpec | None = None, **choice: object) -> Plan:
        """A plan for the ranks as dp. Raises InputError where they cannot share the batch evenly."""
        micro, rest = divmod(self.batch, self.ranks * self.num_micro_batches)
        if rest or micro == 0:
            parts = f"{self.ranks} ranks × {self.num_micro_batches} micro-batches"
            raise InputError(
                f"{self.batch} sequences cannot be dealt to {parts}: --batch must be a positive multiple of "
                f"{self.ranks * self.num_micro_batches}"
            )
        split = {"dp": self.ranks, "micro_batch_size": micro, "num_micro_batches": self.num_micro_batches}
        return Plan(
            model=self.model,
            cluster=cluster or load_cluster(f"local:{self.ranks}"),
            job=Job(seq_length=self.seq_length, global_batch_size=self.batch),
            strategy=Strategy.parse({**split, **choice}, "strategy"),
        )


def zero_trials(request: Request, precision: str) -> list[Trial]:
    """DataParallel, then every ZeRO stage, stage 3 with blocks kept, and shards within a node where ranks allow it."""
    plain = request.plan(precision=precision)
    trials = [Trial(f"zero{stage}", request.plan(precision=precision, zero=stage)) for stage in (0, 1, 2, 3)]
    trials.append(Trial("zero3-kept", request.plan(precision=precision, zero=3, keep_gathered=True)))
    per_node, rest = divmod(request.ranks, HYBRID_NODES)
    if per_node > 1 and not rest:
        shape = {"num_nodes": HYBRID_NODES, "devices_per_node": per_node}
        nodes = plain.cluster.model_copy(update=shape)
        trials.append(Trial("zero3-node", request.plan(nodes, precision=precision, zero=3, shard_over="node")))
    if has_own_master(plain.strategy):
        trials.insert(0, Trial(DATA_PARALLEL, plain, one_process=True))
    return trials


def has_own_master(strategy: Strategy) -> bool:
    """Whether parameters are their own master copies, as `DataParallel` needs."""
    return strategy.recipe.master is None and strategy.precision in ("fp32", "fp64")


def precision_trials(request: Request, precisions: Iterable[str]) -> list[Trial]:
    """The same split in each precision."""
    return [Trial(precision, request.plan(precision=precision)) for precision in precisions]


class _TrialFolder(RunFolder):
    """All trials read the same text."""

    @property
    def data(self) -> Path:
        return self.path.parent / "data"


def set_up_trials(trials: Sequence[Trial], options: TrainOptions, out: Path) -> None:
    """Tokenise the text and write every trial's plan and options. One process calls it, before the ranks do anything.

    Raises:
        InputError: too few steps to measure, a folder that is taken, a text that is too short.
        UnsupportedError: a model or precision that can be planned, but not be run.
    """
    if options.steps < MIN_STEPS:
        raise InputError(
            f"--steps {options.steps}: step {MIN_STEPS} is the one that is measured; give at least as many"
        )
    for trial in trials:
        check_runnable(trial.plan)
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: holds something already; choose another folder with --out")
    plan = trials[0].plan
    prepare(
        options.source(),
        out / "data",
        vocab_size=plan.model.vocab_size,
        seq_length=plan.job.seq_length,
        global_batch_size=plan.job.global_batch_size,
    )
    for trial in trials:
        _TrialFolder(out / trial.name).write(trial.plan, options)


class _TrialTraining(Training):
    """A training run of which only measurements are kept."""

    def save(self, step: int) -> None:
        """No checkpoint."""


def run_trials(trials: Sequence[Trial], options: TrainOptions, out: Path, announce: Callable[[str], None]) -> None:
    """In every rank: train what ranks train. `announce` is told each trial's name when it starts, on rank 0.

    Nothing is read from `out` before all ranks have met, since one of them may still be writing it.
    """
    for trial in trials:
        if not trial.one_process:
            _run_trial(trial, options, out, announce)


def _run_trial(trial: Trial, options: TrainOptions, out: Path, announce: Callable[[str], None]) -> None:
    training = _TrialTraining(trial.plan, options, _TrialFolder(out / trial.name))
    if training.is_main:
        announce(trial.name)
    training.run(resume=False)


def run_in_one_process(trials: Sequence[Trial], out: Path, announce: Callable[[str], None]) -> None:
    """Train what one process trains. One process calls it, when the ranks are done."""
    for trial in trials:
        if trial.one_process:
            announce(trial.name)
            _OneProcess(_TrialFolder(out / trial.name)).run()


def outcomes(trials: Sequence[Trial], out: Path) -> list[Outcome]:
    """What came of all trials. Raises InputError where something is missing."""
    found = []
    for trial in trials:
        run = _TrialFolder(out / trial.name)
        records, metrics = RankRecord.load_all(run.measured), read_metrics(run.path)
        found.append(Outcome(trial, trial.forecasts(), tuple(records), tuple(metrics)))
    return found


class _OneProcess:
    """The training loop around `DataParallel`: the optimizer, schedule and clipping of the ranks, in plain PyTorch."""

    def __init__(self, run: RunFolder) -> None:
        self.run_folder, self.plan, self.options = run, run.plan(), run.options()
        job, strategy = self.plan.job, self.plan.strategy
        tokens = load_prepared(run.data).train_tokens()
        self.dataset = PackedDataset(tokens, job.seq_length, job.global_batch_size, self.options.seed)
        model = build(self.plan.model, "cpu", DTYPES[strategy.recipe.parameter])
        init.initialize(model, self.plan.model, self.options.seed)
        self.parallel = DataParallel(model, strategy.dp)
        settings = self.options.optimizer("adamw")
        self.optimizer, self.clip_norm = _adamw(model, settings), settings.clip_norm or inf
        self.step_times_s: list[float] = []

    def run(self) -> None:
        """All steps, then each device's record."""
        with ExitStack() as stack:
            writer = stack.enter_context(MetricsWriter(self.run_folder.path, tensorboard=False))
            progress = stack.enter_context(Progress(self.options.steps))
            for step in range(self.options.steps):
                row = self._step(step, is_measured=step == MEASURED_STEP)
                writer.write(row)
                progress.update(row)
        self._save_records()

    def _step(self, step: int, *, is_measured: bool) -> StepMetrics:
        options, job, micro = self.options, self.plan.job, self.plan.strategy.num_micro_batches
        batches = self.dataset.micro_batches(step, 0, 1, micro, job.global_batch_size // micro)
        rate = options.learning_rate_at(step)
        began_s = time.perf_counter()
        loss = float(self.parallel.forward_backward(batches, measure=is_measured))
        norm = float(torch.nn.utils.clip_grad_norm_(self.parallel.model.parameters(), self.clip_norm))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if is_measured:
            self.memories = self.parallel.memory(self.optimizer)
        self.optimizer.zero_grad()
        self.traffics = self.parallel.take_traffic()
        took_s = time.perf_counter() - began_s
        if not is_measured:
            self.step_times_s.append(took_s)
        tokens = job.tokens_per_step
        return StepMetrics(step, loss, norm, rate, tokens, tokens / took_s, took_s)

    def _save_records(self) -> None:
        step_time_s = statistics.median(self.step_times_s[1:] or self.step_times_s)
        for index, (memory, traffic) in enumerate(zip(self.memories, self.traffics, strict=True)):
            record = RankRecord(index, device_coordinates(index), memory, traffic, step_time_s)
            record.save(self.run_folder.measured)


def _adamw(model: torch.nn.Module, settings: OptimizerOptions) -> torch.optim.Optimizer:
    """The ranks' update: weight decay for matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
