"""The training loop of one rank, written on the public API: parallelize, step, evaluate, save, load.

set_up (before the ranks) ─▶ parallelize ─▶ (resume) ─▶ step · evaluate · save ─▶ what was measured
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import latest
from meshwright.comm.collectives import barrier
from meshwright.core.axes import DP, WORLD
from meshwright.core.batch import MicroBatch
from meshwright.core.errors import InputError
from meshwright.core.measures import Traffic
from meshwright.core.plan import Plan
from meshwright.core.program import COMPUTE_KINDS, Action
from meshwright.core.record import RankRecord, TracedAction
from meshwright.models.build import build
from meshwright.rehearse.timeline import traced
from meshwright.run.command import RECORD
from meshwright.run.doing import Doing, doing_path
from meshwright.run.engine import StepStats, make_mesh, parallelize
from meshwright.run.folder import RunFolder
from meshwright.run.options import TrainOptions
from meshwright.run.set_up import go_on
from meshwright.schedule.build import first_steady
from meshwright.train.data import EvaluationSet, PackedDataset
from meshwright.train.metrics import MetricsWriter, StepMetrics
from meshwright.train.prepare import load_prepared
from meshwright.train.progress import Progress

MEASURED_STEP = 2
"""Counted from the first step of the process: by then everything lazy has been made."""


@dataclass(slots=True)
class _Measurements:
    """What this rank finds out about its steps."""

    step_times_s: list[float] = field(default_factory=list)
    waits_s: list[dict[str, float]] = field(default_factory=list)
    """Phase → seconds waited, of the same steps."""
    traffic: Traffic = field(default_factory=Traffic)
    activations_bytes: int = 0
    pipeline_s: float = 0.0
    busy_s: float = 0.0
    trace: tuple[TracedAction, ...] = ()


class Training:
    """One rank of a training run, in a folder that :func:`meshwright.run.set_up.set_up` has made."""

    def __init__(self, plan: Plan, options: TrainOptions, run: RunFolder) -> None:
        self.options = options
        self.run_folder = run
        self.mesh = make_mesh(plan)  # from here on rank 0 has made the folder
        self.plan = plan = run.on_copy(plan)
        self.is_main = self.mesh.rank == 0
        data = load_prepared(run.data)
        job = plan.job
        end = data.end_of_text if options.separate_documents else None
        tokens, batch = data.train_tokens(), job.global_batch_size
        self.dataset = PackedDataset(tokens, job.seq_length, batch, options.seed, end_of_text=end)
        self.evaluation = EvaluationSet(data.eval_tokens(), job.seq_length, options.eval_samples, end_of_text=end)
        self.engine = parallelize(
            build(plan.model),
            plan,
            mesh=self.mesh,
            options=options.optimizer(job.optimizer, clips=not self._is_endless),
            seed=options.seed,
        )
        self._action: Action | None = None
        """What this rank is doing of its program, where no launcher of ours is told."""
        self.engine.parallel.runner.watch = (
            Doing(doing_path(Path(os.environ[RECORD]))).note if RECORD in os.environ else self._note
        )
        self.measured = _Measurements()

    def _note(self, action: Action | None) -> None:
        self._action = action

    def run(self, *, resume: bool) -> None:
        """Train to the last step; from the newest checkpoint with `resume`. What fails names the action it was in."""
        try:
            self._run(resume)
        except Exception as error:
            if self._action is not None:
                error.add_note(f"in the {self._action.words}")
            raise

    def _run(self, resume: bool) -> None:
        first, total = self._start(resume), self.options.steps
        watched = self._watched(first)
        with ExitStack() as stack:
            watchers = []
            if self.is_main:
                watchers.append(stack.enter_context(MetricsWriter(self.run_folder.path, first)).write)
                watchers.append(stack.enter_context(Progress(total, first)).update)
            for step in range(first, total):
                row = self._step(step, watched)
                for watch in watchers:
                    watch(row)
                if self._is_due(step, self.options.save_every):
                    self.save(step + 1)
        if watched:
            self.record().save(self.run_folder.measured)
        barrier(self.mesh[WORLD])

    @property
    def _is_endless(self) -> bool:
        return self.plan.strategy.pipeline_schedule.is_asynchronous

    def _watched(self, first: int) -> range:
        """Steps whose activations are counted; the last of them is measured. That is one step, but under an
        asynchronous schedule also those before it, which fill the pipeline; none where it is not full before the end.
        """
        total = self.options.steps
        if not self._is_endless:
            measured = min(first + MEASURED_STEP, total - 1)
            return range(measured, measured + 1)
        needed, began = first_steady(self.plan.strategy.pipeline) + 1, first
        for step in range(first, total):
            if step + 1 - began == needed:
                return range(began, step + 1)
            if self._is_drained_after(step):
                began = step + 1
        return range(0)

    def _is_drained_after(self, step: int) -> bool:
        return any(self._is_due(step, every) for every in (self.options.save_every, self.options.eval_every))

    def _is_due(self, step: int, every: int) -> bool:
        """After every so many steps, and after the last."""
        return (step + 1) % every == 0 or step + 1 == self.options.steps

    def save(self, step: int) -> None:
        """A checkpoint before `step`."""
        self._finish_under_way()
        extra = {"data": self.dataset.state_dict(step)}
        self.engine.save(self.run_folder.checkpoints, step, extra, keep=self.options.keep)

    def _start(self, resume: bool) -> int:
        """Fill the model; the first step."""
        first = 0
        if resume and latest(self.run_folder.checkpoints) is not None:
            extra = self.engine.load(self.run_folder.checkpoints)
            self.dataset.load_state_dict(extra["data"])
            first = int(extra["data"]["step"])
        elif self.options.pretrained:
            self.engine.load_pretrained(self.options.pretrained)
        if resume and self.is_main:
            go_on(self.plan, self.options, self.run_folder)
        return first

    def _finish_under_way(self) -> None:
        """What asynchronous steps have left under way, before weights are looked at."""
        if self._is_endless:
            self.engine.finish()

    def _step(self, step: int, watched: range) -> StepMetrics:
        options, strategy = self.options, self.plan.strategy
        dp = self.mesh[DP]
        micro_batches = self.dataset.micro_batches(
            step, dp.index, dp.size, strategy.num_micro_batches, strategy.micro_batch_size
        )
        rate = options.learning_rate_at(step)
        began_s = time.perf_counter()
        is_watched = step in watched
        if is_watched and options.activation_census:
            stats = self._measured_step(micro_batches, rate, is_first=step == watched[0], is_last=step == watched[-1])
        else:
            stats = self.engine.step(micro_batches, rate)
        if step + 1 == options.steps:
            self.engine.finish()
        loss, norm = float(stats.loss), float(stats.grad_norm)
        overflow = self._overflow(step, stats)
        took_s = time.perf_counter() - began_s
        if not is_watched:
            self.measured.step_times_s.append(took_s)
            self.measured.waits_s.append(self.engine.last_waits_s)
        tokens = self.plan.job.tokens_per_step
        eval_loss = self._evaluate() if self._is_due(step, options.eval_every) else None
        routing = self._routing(stats) if self.is_main else {}
        return StepMetrics(step, loss, norm, rate, tokens, tokens / took_s, took_s, eval_loss, *overflow, **routing)

    def _routing(self, stats: StepStats) -> dict[str, Any]:
        """What a mixture's routers did, for the metrics."""
        report = self.engine.last_routing
        if report is None or stats.router_loss is None:
            return {}
        further: dict[str, Any] = {}
        if self.plan.strategy.ep > 1:
            further["expert_exchange_s"] = self.engine.last_exchange_s
        if self.plan.model.gate.has_capacity:
            further["expert_taken"] = _by_layer(report.layers, report.taken)
        return {
            "router_loss": float(stats.router_loss),
            "expert_imbalance": float(report.imbalance.max()),
            "dropped_choices": float(report.dropped.sum() / report.chosen.sum().clamp(min=1)),
            "expert_loads": _by_layer(report.layers, report.chosen),
            **further,
        }

    def _overflow(self, step: int, stats: StepStats) -> tuple[bool, float] | tuple[None, None]:
        """(skipped, loss scale) of fp16 training, which skips steps; nothing else may.

        Raises InputError for a step that no smaller scale can mend.
        """
        scale = self.engine.optimizer.loss_scale
        skipped, used = bool(stats.skipped), float(stats.loss_scale)
        if self._is_endless and not isfinite(float(stats.loss) + float(stats.grad_norm)):
            raise InputError(
                f"step {step}: loss {float(stats.loss):g} and gradient norm {float(stats.grad_norm):g} are not both "
                "finite, and stages that update by themselves have changed weights by it: lower --learning-rate, warm "
                "up longer, or look at the data, then go on from the last checkpoint with --resume"
            )
        if skipped and (not scale.is_dynamic or used <= scale.options.minimum):
            raise InputError(
                f"step {step}: loss {float(stats.loss):g} and gradient norm {float(stats.grad_norm):g} are not both "
                f"finite; nothing was changed or saved by this step: lower --learning-rate, warm up longer, or look at "
                "the data, then go on from the last checkpoint with --resume"
            )
        return (skipped, used) if scale.is_dynamic else (None, None)

    def _measured_step(
        self, micro_batches: Sequence[MicroBatch], rate: float, *, is_first: bool, is_last: bool
    ) -> StepStats:
        """One step under the census and, if it is the last of them, the trace; slower, so its time is not counted."""
        engine, runner = self.engine, self.engine.parallel.runner
        if is_first:
            self._census = engine.parallel.census()
        if is_last:
            runner.trace = []
            barrier(self.mesh[WORLD])
        zero_s = time.perf_counter()
        with self._census as census:
            result = engine.step(micro_batches, rate) if self._is_endless else engine.forward_backward(micro_batches)
        trace, runner.trace = runner.trace, None
        stats = result if isinstance(result, StepStats) else engine.update(result, rate)
        if trace is None:
            return stats
        self.measured.activations_bytes = census.peak_bytes
        self.measured.traffic = engine.last_traffic
        compute = [(start, end) for action, start, end in trace if action.kind in COMPUTE_KINDS]
        self.measured.busy_s = sum(end - start for start, end in compute)
        self.measured.pipeline_s = compute[-1][1] - trace[0][1]
        self.measured.trace = traced(trace, zero_s)
        return stats

    def _evaluate(self) -> float:
        self._finish_under_way()
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
        waits_s = measured.waits_s[1:] or measured.waits_s
        return RankRecord(
            self.mesh.rank,
            self.mesh.coordinates,
            self.engine.memory(measured.activations_bytes),
            measured.traffic,
            statistics.median(times),
            measured.pipeline_s,
            measured.busy_s,
            {phase: statistics.median(w.get(phase, 0.0) for w in waits_s) for phase in dict.fromkeys(chain(*waits_s))},
            measured.trace,
        )


def _by_layer(layers: Sequence[int], counts: torch.Tensor) -> dict[str, list[int]]:
    """Counts [layers, E] as numbers, by layer."""
    return dict(zip(map(str, layers), counts.long().tolist(), strict=True))
