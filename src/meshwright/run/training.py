"""The training loop, written on the public API: parallelize, step, evaluate, save, load.

prepare data ─▶ parallelize ─▶ (resume) ─▶ step · evaluate · save ─▶ records and pictures
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from meshwright.checkpoint.folder import newest
from meshwright.comm.collectives import barrier
from meshwright.core.axes import DP, WORLD
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.measures import Traffic
from meshwright.core.plan import Plan
from meshwright.core.program import COMPUTE_KINDS
from meshwright.core.record import RankRecord
from meshwright.models.build import build
from meshwright.run.engine import Engine, make_mesh, parallelize
from meshwright.run.folder import RunFolder
from meshwright.run.options import TrainOptions
from meshwright.train.data import EvaluationSet, PackedDataset
from meshwright.train.lr import learning_rate
from meshwright.train.metrics import MetricsWriter, StepMetrics
from meshwright.train.prepare import PreparedData, load_prepared, prepare
from meshwright.train.progress import Progress

MEASURED_STEP = 2
"""Counted from the first step of the process: by then everything lazy has been made."""


def check_runnable(plan: Plan) -> None:
    """Raises UnsupportedError where a plan can be made but not yet carried out; before anything is started."""
    build(plan.model)
    window = plan.model.sliding_window
    if window is not None and plan.job.seq_length > window:
        raise UnsupportedError(
            f"sequences of {plan.job.seq_length} tokens are longer than the sliding window of {window} of "
            f"`{plan.model.name}`, and windowed attention is not implemented; plan for --seq {window} at most"
        )
    if not plan.strategy.recipe.runnable:
        raise UnsupportedError(f"precision `{plan.strategy.precision}` is for forecasts only; plan for `bf16`")


def prepare_data(plan: Plan, options: TrainOptions, run: RunFolder) -> PreparedData:
    """Tokenise the run's text, once. Raises InputError where it is too short or the vocabulary too large."""
    vocab_size = None if options.tokenizer else plan.model.vocab_size
    prepared = prepare(
        options.source(),
        run.data,
        vocab_size=vocab_size,
        tokenizer=options.tokenizer,
        seq_length=plan.job.seq_length,
        global_batch_size=plan.job.global_batch_size,
    )
    if prepared.vocab_size > plan.model.vocab_size:
        raise InputError(
            f"the tokenizer has {prepared.vocab_size:,} entries, model `{plan.model.name}` only "
            f"{plan.model.vocab_size:,}; use the model's own tokenizer"
        )
    return prepared


@dataclass(slots=True)
class _Measurements:
    """What this rank finds out about its steps."""

    step_times_s: list[float] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    activations_bytes: int = 0
    pipeline_s: float = 0.0
    busy_s: float = 0.0


class Training:
    """One rank of a training run."""

    def __init__(self, plan: Plan, options: TrainOptions, run: RunFolder) -> None:
        self.plan = plan
        self.options = options
        self.run_folder = run
        self.mesh = make_mesh(plan)
        self.is_main = self.mesh.rank == 0
        data = load_prepared(run.data)
        job = plan.job
        self.dataset = PackedDataset(data.train_tokens(), job.seq_length, job.global_batch_size, options.seed)
        self.evaluation = EvaluationSet(data.eval_tokens(), job.seq_length, options.eval_samples)
        self.engine: Engine = parallelize(
            build(plan.model), plan, mesh=self.mesh, options=options.optimizer(job.optimizer), seed=options.seed
        )
        self.measured = _Measurements()

    def run(self, *, resume: bool) -> None:
        """Train to the last step; from the newest checkpoint with `resume`."""
        first = self._start(resume)
        total = self.options.steps
        with (
            MetricsWriter(self.run_folder.path, first) if self.is_main else _Silent() as metrics,
            Progress(total, first) if self.is_main else _Silent() as progress,
        ):
            for step in range(first, total):
                row = self._step(step, is_measured=step - first == min(MEASURED_STEP, total - 1 - first))
                metrics.write(row)
                progress.update(row)
                if (step + 1) % self.options.save_every == 0 or step + 1 == total:
                    self.save(step + 1)
        self._finish()

    def save(self, step: int) -> None:
        """A checkpoint before `step`."""
        self.engine.save(
            self.run_folder.checkpoints, step, {"data": self.dataset.state_dict(step)}, keep=self.options.keep
        )

    def _start(self, resume: bool) -> int:
        if resume and newest(self.run_folder.checkpoints) is not None:
            extra = self.engine.load(self.run_folder.checkpoints)
            self.dataset.load_state_dict(extra["data"])
            return int(extra["data"]["step"])
        if self.options.pretrained:
            self.engine.load_pretrained(self.options.pretrained)
        return 0

    def _step(self, step: int, *, is_measured: bool) -> StepMetrics:
        options, strategy = self.options, self.plan.strategy
        dp = self.mesh[DP]
        micro_batches = self.dataset.micro_batches(
            step, dp.index, dp.size, strategy.num_micro_batches, strategy.micro_batch_size
        )
        rate = learning_rate(
            step, peak=options.learning_rate, warmup_steps=options.warmup_steps, total_steps=options.steps
        )
        began_s = time.perf_counter()
        run = self._measured_step if is_measured and options.activation_census else self.engine.step
        stats = run(micro_batches, rate)
        loss, norm = float(stats.loss), float(stats.grad_norm)
        took_s = time.perf_counter() - began_s
        if not is_measured:
            self.measured.step_times_s.append(took_s)
        tokens = self.plan.job.tokens_per_step
        eval_loss = self._evaluate() if (step + 1) % options.eval_every == 0 or step + 1 == options.steps else None
        return StepMetrics(step, loss, norm, rate, tokens, tokens / took_s, took_s, eval_loss)

    def _measured_step(self, micro_batches: Any, rate: float) -> Any:
        """One step under the census and the trace; slower, so its time is not counted."""
        engine, runner = self.engine, self.engine.parallel.runner
        runner.trace = []
        with engine.parallel.census() as census:
            loss = engine.forward_backward(micro_batches)
        trace, runner.trace = runner.trace, None
        stats = engine.update(loss, rate)
        self.measured.activations_bytes = census.peak_bytes
        self.measured.traffic = engine.last_traffic
        compute = [end - start for action, start, end in trace if action.kind in COMPUTE_KINDS]
        self.measured.busy_s = sum(compute)
        edges = [(start, end) for action, start, end in trace if action.kind in COMPUTE_KINDS]
        self.measured.pipeline_s = edges[-1][1] - trace[0][1]
        return stats

    def _evaluate(self) -> float:
        strategy, dp = self.plan.strategy, self.mesh[DP]
        rounds = range(self.evaluation.num_rounds(self.plan.job.global_batch_size))
        return self.engine.evaluate(
            self.evaluation.micro_batches(
                index, dp.index, dp.size, strategy.num_micro_batches, strategy.micro_batch_size
            )
            for index in rounds
        )

    def record(self) -> RankRecord:
        """What this rank measured."""
        measured = self.measured
        times = measured.step_times_s[1:] or measured.step_times_s or [0.0]
        return RankRecord(
            self.mesh.rank,
            self.mesh.coordinates,
            self.engine.memory(measured.activations_bytes),
            measured.traffic,
            statistics.median(times),
            measured.pipeline_s,
            measured.busy_s,
        )

    def _finish(self) -> None:
        self.record().save(self.run_folder.measured)
        barrier(self.mesh[WORLD])


class _Silent:
    """Stands in for metrics and progress on the ranks that show nothing."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def write(self, row: StepMetrics) -> None:
        """Nothing."""

    def update(self, row: StepMetrics) -> None:
        """Nothing."""
