"""Forecast and measured step time of strategies on this machine's ranks, each on the cluster file of a calibration.

    meshwright calibrate local:2 -o local2.toml; meshwright calibrate local:4 -o local4.toml
    python benchmarks/forecast.py measure local2.toml --out runs2.json
    python benchmarks/forecast.py measure local4.toml --out runs4.json
    python benchmarks/forecast.py report runs2.json=local2.toml runs4.json=local4.toml [--plot forecast.html]

Of each size all strategies take turns, step by step, in one process group, one thread per rank: those of a list, and
what the planner chooses on that cluster, in all and of each ZeRO stage, tensor and pipeline degree. A strategy's time
is the median over turns of its share of its turn, times the median turn: what disturbs a whole turn moves none of them.

`error` is |forecast / measured - 1|; `level` is the median of forecast / measured of a size, and `error beside it`
that of what is left: a machine that is slower or faster than when it was calibrated changes the level alone. `choice`:
measured time of the strategy that the forecast puts first, over the best measured one, by ranks and size, with the
quartiles of the same ratio turn by turn: where they lie on both sides of 1, noise decides between the two.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from meshwright.comm import mesh
from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import MeshwrightError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.rules import violations
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Strategy
from meshwright.planner.rank import plan as planned
from meshwright.rehearse.step_fit import TimedStep, step_errors
from meshwright.run.steps import llama, time_steps

SIZES = {"T": (4, 128, 1024, 64), "S": (4, 256, 4096, 128), "M": (8, 384, 4096, 128)}
"""Layers, hidden size, vocabulary, tokens."""
BATCH = 8
"""Sequences of a step, whatever the layout."""
STRATEGIES: dict[int, tuple[dict[str, Any], ...]] = {
    2: (
        {"dp": 2, "micro_batch_size": 4},
        {"dp": 2, "zero": 1, "micro_batch_size": 2},
        {"dp": 2, "zero": 2, "micro_batch_size": 4},
        {"dp": 2, "zero": 3, "micro_batch_size": 4},
        {"dp": 2, "micro_batch_size": 1, "recompute": "full"},
        {"tp": 2, "micro_batch_size": 4},
        {"tp": 2, "sequence": "megatron", "micro_batch_size": 4},
        {"context": {"kind": "ring", "degree": 2, "balance": "zigzag"}, "micro_batch_size": 4},
        {"context": {"kind": "ring-self-attention", "degree": 2}, "micro_batch_size": 4},
        {"context": {"kind": "ulysses", "degree": 2}, "micro_batch_size": 4},
        {"pp": 2, "micro_batch_size": 2},
        {"pp": 2, "micro_batch_size": 1, "schedule": "gpipe"},
    ),
    4: (
        {"dp": 4, "micro_batch_size": 2},
        {"dp": 4, "zero": 1, "micro_batch_size": 1},
        {"dp": 4, "zero": 3, "micro_batch_size": 2},
        {"tp": 4, "micro_batch_size": 4},
        {"tp": 4, "tensor": {"kind": "2d"}, "micro_batch_size": 4},
        {"tp": 4, "tensor": {"kind": "2d"}, "micro_batch_size": 8},
        {"context": {"kind": "ring", "degree": 4, "balance": "zigzag"}, "micro_batch_size": 4},
        {"context": {"kind": "ring", "degree": 4, "balance": "contiguous"}, "micro_batch_size": 4},
        {"dp": 2, "tp": 2, "micro_batch_size": 4},
        {"dp": 2, "tp": 2, "zero": 1, "micro_batch_size": 2},
        {"dp": 2, "pp": 2, "micro_batch_size": 1},
        {"tp": 2, "pp": 2, "micro_batch_size": 2},
        {"pp": 4, "micro_batch_size": 1},
        {"pp": 4, "micro_batch_size": 2, "recompute": "full"},
    ),
}
CHOSEN: tuple[dict[str, int], ...] = ({}, *({"zero": stage} for stage in range(4)), {"tp": 2}, {"pp": 2}, {"cp": 2})
"""What is fixed where the planner is asked for its best."""


def plans(size: str, cluster: ClusterSpec) -> list[Plan]:
    """All strategies of a size on the cluster's ranks, but for those that it does not allow; the planner's first."""
    layers, hidden, vocab, tokens = SIZES[size]
    model, job = llama(layers, hidden, vocab, tokens, size), Job(seq_length=tokens, global_batch_size=BATCH)
    found = list(_chosen(model, cluster, job))
    for choice in STRATEGIES[cluster.num_devices]:
        micro_batches = BATCH // (choice.get("dp", 1) * choice["micro_batch_size"])
        strategy = Strategy.model_validate({"schedule": "1f1b", **choice, "num_micro_batches": micro_batches})
        if not violations(strategy, model, cluster, job):
            found.append(strategy)
    return [Plan(model=model, cluster=cluster, job=job, strategy=strategy) for strategy in dict.fromkeys(found)]


def _chosen(model: ModelSpec, cluster: ClusterSpec, job: Job) -> Iterator[Strategy]:
    for fix in CHOSEN:
        try:
            yield planned(model, cluster, job, fix).plan.strategy
        except MeshwrightError:
            continue  # not legal on so many ranks


def measure_rank(rank: int, ranks: int, meeting_file: str, texts: list[str], turns: int) -> list[tuple[float, ...]]:
    """One rank: seconds of each strategy, by turn."""
    torch.set_num_threads(1)
    mesh.start_local(meeting_file, rank, ranks)
    steps = time_steps([Plan.from_toml(text) for text in texts], turns, lambda _: None)
    mesh.stop()
    return [step.turns_s for step in steps]


def measure(cluster: ClusterSpec, sizes: list[str], turns: int) -> dict[str, list[dict[str, Any]]]:
    """Size -> strategies and their seconds by turn."""
    found, ranks = {}, cluster.num_devices
    for size in sizes:
        steps = plans(size, cluster)
        with tempfile.TemporaryDirectory() as folder:
            texts, meeting = [step.to_toml() for step in steps], str(Path(folder) / "meeting")
            with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
                waiting = [pool.submit(measure_rank, rank, ranks, meeting, texts, turns) for rank in range(ranks)]
                seconds = next(iter([one.result() for one in waiting]))
        found[size] = [{"plan": text, "turns_s": each} for text, each in zip(texts, seconds, strict=True)]
        print(ranks, size, [round(1e3 * statistics.median(each), 1) for each in seconds], flush=True)
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of the ranks; no ties are expected."""
    orders = [np.argsort(np.argsort(values)).astype(float) for values in (a, b)]
    return float(np.corrcoef(*orders)[0, 1])


@dataclass(frozen=True)
class Group:
    """Strategies of one size that took turns."""

    name: str
    labels: list[str]
    turns_s: np.ndarray
    """[strategies, turns]"""
    forecast_s: np.ndarray

    @property
    def measured_s(self) -> np.ndarray:
        each = np.median(self.turns_s, axis=0)
        return np.median(self.turns_s / each, axis=1) * np.median(each)

    @property
    def ratios(self) -> np.ndarray:
        return self.forecast_s / self.measured_s

    def choice(self) -> str:
        """What the forecast puts first beside what was measured best."""
        measured, first = self.measured_s, int(np.argmin(self.forecast_s))
        best = int(np.argmin(measured))
        low, high = np.percentile(self.turns_s[first] / self.turns_s[best], (25, 75))
        same = "" if first != best else ", the same"
        return f"choice {measured[first] / measured[best]:.3f} of the best ({low:.2f}, {high:.2f}){same}"

    def line(self) -> str:
        level = float(np.median(self.ratios))
        beside = float(np.median(abs(self.ratios / level - 1)))
        order = spearman(self.forecast_s, self.measured_s)
        return f"{self.choice()}; order {order:.2f}; level {level:.2f}, error beside it {100 * beside:.1f} %"


def groups(pairs: list[str]) -> Iterator[Group]:
    """Of all runs, with their forecasts on a cluster file."""
    for pair in pairs:
        runs, file = pair.split("=")
        cluster = load_cluster(file)
        for size, rows in json.loads(Path(runs).read_text(encoding="utf-8")).items():
            turns_s = np.array([row["turns_s"] for row in rows])
            found = [Plan.from_toml(row["plan"]) for row in rows]
            # an error beside one second is a forecast less one
            forecast_s = np.array(step_errors(cluster, [TimedStep(plan, 1.0) for plan in found])) + 1
            labels = [plan.strategy.describe() for plan in found]
            yield Group(f"{cluster.num_devices} {size}", labels, turns_s, forecast_s)


def report(pairs: list[str], plot: Path | None) -> None:
    """Tables of all runs, and the scatter plot."""
    table, found = Table("ranks, size", "strategy", "measured, ms", "forecast, ms", "error, %"), list(groups(pairs))
    points: list[tuple[str, float, float]] = []
    for group in found:
        for label, measured, forecast in zip(group.labels, group.measured_s, group.forecast_s, strict=True):
            error = forecast / measured - 1
            table.add_row(group.name, label, f"{1e3 * measured:.1f}", f"{1e3 * forecast:.1f}", f"{100 * error:+.1f}")
            points.append((f"{group.name} {label}", measured, forecast))
    console = Console(width=120)
    console.print(table)
    errors = [abs(forecast / measured - 1) for _, measured, forecast in points]
    console.print(f"{len(points)} strategies: median error {100 * statistics.median(errors):.1f} %, "
                  f"mean {100 * statistics.mean(errors):.1f} %, worst {100 * max(errors):.1f} %; "
                  f"Spearman {spearman([p[1] for p in points], [p[2] for p in points]):.3f}")  # fmt: skip
    for group in found:
        console.print(f"  {group.name}: {group.line()}")
    if plot is not None:
        draw(points, plot)


def draw(points: list[tuple[str, float, float]], path: Path) -> None:
    """Forecast over measured, both logarithmic."""
    import plotly.graph_objects as go

    names, measured, forecast = zip(*points, strict=True)
    ends = [min(measured), max(measured)]
    figure = go.Figure(
        [
            go.Scatter(x=ends, y=ends, mode="lines", name="equal", line={"dash": "dot"}),
            go.Scatter(x=measured, y=forecast, mode="markers", text=names, name="strategies"),
        ]
    )
    figure.update_xaxes(type="log", title="measured, s")
    figure.update_yaxes(type="log", title="forecast, s")
    figure.write_html(path, include_plotlyjs="cdn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("cluster", metavar="CLUSTER.toml")
    measuring.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    measuring.add_argument("--turns", type=int, default=7)
    measuring.add_argument("--out", type=Path, required=True)
    reporting = commands.add_parser("report")
    reporting.add_argument("pairs", nargs="+", metavar="RUNS.json=CLUSTER.toml")
    reporting.add_argument("--plot", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.command == "measure":
        found = measure(load_cluster(options.cluster), options.sizes, options.turns)
        options.out.write_text(json.dumps(found), encoding="utf-8")
    else:
        report(options.pairs, options.plot)


if __name__ == "__main__":
    main()
