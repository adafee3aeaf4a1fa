"""The steps of a served model as they are forecast, beside the engine's own, and a load beside its steady state.

    python benchmarks/serve_forecast.py

`local:2` is calibrated first (or taken from `--cluster mine.toml`): both ranks at once, as they will run. Then, of a
Llama of 125M parameters with random weights, in fp32 and bf16, as two replicas of one rank at the same time and over
two ranks of tensor parallelism: the median seconds of a step that decodes 1, 4 and 16 sequences at a context of 128
tokens or more, and of one that computes 256 tokens of a prompt. At last requests of 64 + 32 tokens at half the rate
that each replica is forecast to sustain: mean time to the first token, and between tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from meshwright.comm import mesh as meshes
from meshwright.comm.mesh import Mesh
from meshwright.core.cluster import ClusterSpec
from meshwright.core.serving import Layout, Requests
from meshwright.core.sources import load_cluster, load_model
from meshwright.cost.serving import StepCosts, Work
from meshwright.cost.steady import Capacity, capacity, load_at
from meshwright.models.build import build
from meshwright.serve.engine import Engine
from meshwright.serve.options import ServeOptions
from meshwright.serve.request import SamplingParams

MODEL = "demo-l"
CONTEXT, STEPS, BATCHES, CHUNK = 128, 24, (1, 4, 16), 256
REQUESTS = Requests(prompt_tokens=64, output_tokens=32, rate_per_s=1)
NUM_REQUESTS = 25


def layout_of(precision: str, tp: int) -> Layout:
    return Layout(replicas=2 // tp, tp=tp, precision=precision, num_blocks=512, step_tokens=CHUNK, max_running=64)


def engine_of(layout: Layout) -> Engine:
    spec = load_model(MODEL)
    dtype = torch.bfloat16 if layout.precision == "bf16" else torch.float32
    model = build(spec, "cpu", dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    options = ServeOptions(num_blocks=512, step_tokens=CHUNK, max_running=64, prefix_cache=False)
    return Engine(model, layout.replica, options, mesh=Mesh.create(layout.replica.sizes))


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def step_s(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def measure(rank: int, file: str, precision: str, tp: int, rate_per_s: float) -> dict[str, float]:
    """One rank: the median seconds of each kind of step, and what requests at a rate waited."""
    torch.set_num_threads(1)
    if tp > 1:
        meshes.start_local(file, rank, tp)
    else:
        meshes.start_local(f"{file}{rank}", 0, 1)
    engine = engine_of(layout_of(precision, tp))
    if engine.mesh.rank:
        engine.follow()
        return {}
    found: dict[str, float] = {}
    for batch in BATCHES:
        params = SamplingParams(max_tokens=STEPS + 8, temperature=0, ignore_eos=True)
        made = [s for at in range(batch) for s in engine.submit(prompt_of(CONTEXT, at), params)]
        while not all(sequence.output for sequence in made):
            engine.step()
        found[f"decode {batch}"] = statistics.median(step_s(engine) for _ in range(STEPS))
        while not engine.is_idle:
            engine.step()
    params, times = SamplingParams(max_tokens=1), []
    for at in range(6):
        engine.submit(prompt_of(CHUNK, at), params)
        times.append(step_s(engine))
    found["prompt"] = statistics.median(times[1:])
    found |= under_load(engine, rate_per_s, rank)
    engine.stop()
    return found


def under_load(engine: Engine, rate_per_s: float, seed: int) -> dict[str, float]:
    """Requests that come at random moments: mean seconds to the first token, and between tokens."""
    rng, params = random.Random(seed), SamplingParams(max_tokens=REQUESTS.output_tokens, ignore_eos=True)
    due, at = [], 0.0
    for _ in range(NUM_REQUESTS):
        at += rng.expovariate(rate_per_s)
        due.append(at)
    start, came, first, between = time.perf_counter(), {}, {}, []
    while due or not engine.is_idle:
        now = time.perf_counter() - start
        while due and due[0] <= now:
            for sequence in engine.submit(prompt_of(REQUESTS.prompt_tokens, len(due)), params):
                came[sequence] = due.pop(0)
        if engine.is_idle:
            time.sleep(max(0.0, due[0] - now) if due else 0.0)
            continue
        events = engine.step()
        now = time.perf_counter() - start
        for event in events:
            first.setdefault(event.sequence, now)
            if event.finish is not None:
                between.append((now - first[event.sequence]) / (REQUESTS.output_tokens - 1))
    waits = [first[sequence] - came[sequence] for sequence in came]
    return {"first token": statistics.mean(waits), "between tokens": statistics.mean(between)}


def forecast(cluster: ClusterSpec, layout: Layout) -> tuple[dict[str, float], float]:
    """The same numbers as they are forecast, and the rate of each replica."""
    costs = StepCosts(load_model(MODEL), layout, cluster)
    context = CONTEXT + STEPS / 2
    found = {f"decode {n}": costs.step_s(Work(n, context, num_rows=n)) for n in BATCHES}
    found["prompt"] = costs.step_s(Work(0, 0, CHUNK, (CHUNK + 1) / 2, 1))
    most = capacity(costs, REQUESTS, 512 * 16 // REQUESTS.length)
    assert isinstance(most, Capacity)
    rate = most.load.rate_per_s / 2
    now = load_at(costs, REQUESTS, rate, most.load)
    return found | {"first token": now.ttft_s, "between tokens": now.tpot_s}, rate


def on_ranks(precision: str, tp: int, rate_per_s: float) -> dict[str, float]:
    """Means over the replicas."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        file = os.path.join(folder, "meeting")
        jobs = [pool.submit(measure, rank, file, precision, tp, rate_per_s) for rank in range(2)]
        found = [answer for job in jobs if (answer := job.result())]
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="A cluster file of two ranks; default: local:2, calibrated now.")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(options.cluster or f"{folder}/local.toml")
        if options.cluster is None:
            command = [sys.executable, "-m", "meshwright.cli.main", "calibrate", "local:2", "-o", str(file)]
            subprocess.run(command, check=True)
        cluster = load_cluster(str(file))
    print(f"{'':26} {'forecast':>10} {'measured':>10} {'measured/forecast':>18}")
    for precision in ("fp32", "bf16"):
        for tp in (1, 2):
            expected, rate = forecast(cluster, layout_of(precision, tp))
            for name, seconds in on_ranks(precision, tp, rate).items():
                label = f"{precision} T{tp} {name}"
                ratio = seconds / expected[name]
                print(f"{label:26} {expected[name] * 1e3:8.2f}ms {seconds * 1e3:8.2f}ms {ratio:18.2f}", flush=True)


if __name__ == "__main__":
    main()
