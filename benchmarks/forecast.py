"""Forecast and measured step time of strategies on this machine's ranks, each on the cluster file of a calibration.

    meshwright calibrate local:2 -o local2.toml; meshwright calibrate local:4 -o local4.toml
    python benchmarks/forecast.py measure --ranks 2 --out runs2.json
    python benchmarks/forecast.py measure --ranks 4 --out runs4.json
    python benchmarks/forecast.py report runs2.json=local2.toml runs4.json=local4.toml [--plot forecast.html]

Of each size all strategies take turns, step by step, in one process group, one thread per rank; a strategy's time is
the median.

`error` is |forecast / measured - 1|; `level` is the median of forecast / measured of a size, and `error beside it`
that of what is left: a machine that is slower or faster than when it was calibrated changes the level alone. `choice`:
measured time of the strategy that the forecast puts first, over the best measured one, by ranks and size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from meshwright.comm import mesh
from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.rules import violations
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Strategy
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
        {"context": {"kind": "ring", "degree": 4, "balance": "zigzag"}, "micro_batch_size": 4},
        {"dp": 2, "tp": 2, "micro_batch_size": 4},
        {"dp": 2, "tp": 2, "zero": 1, "micro_batch_size": 2},
        {"dp": 2, "pp": 2, "micro_batch_size": 1},
        {"tp": 2, "pp": 2, "micro_batch_size": 2},
        {"pp": 4, "micro_batch_size": 1},
        {"pp": 4, "micro_batch_size": 2, "recompute": "full"},
    ),
}


def plans(size: str, cluster: ClusterSpec) -> list[Plan]:
    """All strategies of a size on the cluster's ranks, but for those that it does not allow."""
    layers, hidden, vocab, tokens = SIZES[size]
    found = []
    for choice in STRATEGIES[cluster.num_devices]:
        micro_batches = BATCH // (choice.get("dp", 1) * choice["micro_batch_size"])
        strategy = Strategy.model_validate({"schedule": "1f1b", **choice, "num_micro_batches": micro_batches})
        job = Job(seq_length=tokens, global_batch_size=BATCH)
        model = llama(layers, hidden, vocab, tokens, size)
        if not violations(strategy, model, cluster, job):
            found.append(Plan(model=model, cluster=cluster, job=job, strategy=strategy))
    return found


def measure_rank(rank: int, ranks: int, meeting_file: str, size: str, turns: int) -> list[float]:
    """One rank: seconds of each strategy."""
    torch.set_num_threads(1)
    mesh.start_local(meeting_file, rank, ranks)
    steps = time_steps(plans(size, load_cluster(f"local:{ranks}")), turns, lambda _: None)
    mesh.stop()
    return [step.seconds for step in steps]


def measure(ranks: int, sizes: list[str], turns: int) -> dict[str, list[float]]:
    """Size -> seconds by strategy."""
    found = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder) / "meeting")
            with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
                waiting = [pool.submit(measure_rank, rank, ranks, meeting, size, turns) for rank in range(ranks)]
                found[size] = next(iter([one.result() for one in waiting]))
        print(ranks, size, found[size], flush=True)
    return found


def spearman(a: list[float], b: list[float]) -> float:
    """Correlation of the ranks; no ties are expected."""
    orders = [np.argsort(np.argsort(values)).astype(float) for values in (a, b)]
    return float(np.corrcoef(*orders)[0, 1])


def report(pairs: list[str], plot: Path | None) -> None:
    """Tables of all runs, and the scatter plot."""
    table = Table("ranks", "size", "strategy", "measured, ms", "forecast, ms", "error, %")
    points: list[tuple[str, float, float]] = []
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for pair in pairs:
        runs, file = pair.split("=")
        cluster = load_cluster(file)
        for size, seconds in json.loads(Path(runs).read_text(encoding="utf-8")).items():
            steps = [TimedStep(plan, s) for plan, s in zip(plans(size, cluster), seconds, strict=True)]
            for step, error in zip(steps, step_errors(cluster, steps), strict=True):
                forecast = step.seconds * (1 + error)
                label = step.plan.strategy.describe()
                cells = (f"{1e3 * step.seconds:.1f}", f"{1e3 * forecast:.1f}", f"{100 * error:+.1f}")
                table.add_row(str(cluster.num_devices), size, label, *cells)
                points.append((f"{size} {label}", step.seconds, forecast))
                groups[f"{cluster.num_devices} {size}"].append((forecast, step.seconds))
    console = Console(width=120)
    console.print(table)
    errors = [abs(forecast / measured - 1) for _, measured, forecast in points]
    console.print(f"{len(points)} strategies: median error {100 * statistics.median(errors):.1f} %, "
                  f"mean {100 * statistics.mean(errors):.1f} %, worst {100 * max(errors):.1f} %; "
                  f"Spearman {spearman([p[1] for p in points], [p[2] for p in points]):.3f}")  # fmt: skip
    for name, group in groups.items():
        best = min(measured for _, measured in group)
        level = statistics.median(forecast / measured for forecast, measured in group)
        beside = statistics.median(abs(forecast / measured / level - 1) for forecast, measured in group)
        order = spearman([f for f, _ in group], [m for _, m in group])
        slower = 100 * (min(group)[1] / best - 1)
        console.print(
            f"  {name}: choice {slower:.1f} % slower than the best, order {order:.2f}; "
            f"level {level:.2f}, error beside it {100 * beside:.1f} %"
        )
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
    measuring.add_argument("--ranks", type=int, choices=sorted(STRATEGIES), required=True)
    measuring.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    measuring.add_argument("--turns", type=int, default=7)
    measuring.add_argument("--out", type=Path, required=True)
    reporting = commands.add_parser("report")
    reporting.add_argument("pairs", nargs="+", metavar="RUNS.json=CLUSTER.toml")
    reporting.add_argument("--plot", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.command == "measure":
        found = measure(options.ranks, options.sizes, options.turns)
        options.out.write_text(json.dumps(found), encoding="utf-8")
    else:
        report(options.pairs, options.plot)


if __name__ == "__main__":
    main()
