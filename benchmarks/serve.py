"""Our engine beside others on this machine: one request, 16 and 64 at once, in turns.

    python benchmarks/serve.py [--models 125m 1.1b] [--dtypes bfloat16 float32] [--turns 2] [--threads 2]
                               [--contenders meshwright transformers] [--python openvino=PATH vllm=PATH]

Models are Llama-shaped, with random weights, written once as Hugging Face folders. Each contender is a process of its
own (`serve_contenders.py`), and loads the same folder; one that lives in another environment needs the path of its
Python, and one that cannot start is left out with a line. All get the same prompts, choose greedily, never end early,
and reuse no prefixes. They take turns; medians over turns, the worst gap over all.

    one            tokens per second of one request's decoding
    16, 64         output tokens per second of so many requests at once, from the first to the last token of all
    first          median seconds until a request's first token
    gap            the longest time between two tokens of a request that runs
    floor          tokens per second at which all weights would be read once for each token, at the speed measured here

`transformers` pads all requests into one batch (static), `continuous` is the same library's continuous batching; others
batch continuously too, with steps of 256 tokens where that can be set. `llama` is a `llama-server` of the PATH, over
HTTP, and `LLAMA_CPP` the folder of its source, whose converter it needs once. `outside` is the share of our steps that
is not the model: scheduling, choice of tokens, text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.core.model import ModelSpec
from meshwright.core.sources import load_model
from meshwright.models.build import build
from meshwright.models.hf import export
from meshwright.models.init import initialize

SHAPES = {
    "125m": {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "num_kv_heads": 12, "ffn_size": 2048},
    "1.1b": {"num_layers": 22, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "ffn_size": 5632},
}
PROMPT = 128
LOADS = {1: 64, 16: 32, 64: 32}
"""Requests at once → tokens of each answer."""
PEERS = ("meshwright", "transformers", "continuous", "openvino", "vllm", "llama")


def spec_of(name: str) -> ModelSpec:
    change = {"name": f"llama-{name}", "head_dim": 64, "vocab_size": 32000, "max_positions": 2048}
    return load_model("llama-2-7b").model_copy(update={**change, **SHAPES[name]})


def write_model(folder: Path, spec: ModelSpec, dtype: str) -> None:
    model = build(spec, "cpu", dtype=getattr(torch, dtype))
    initialize(model, spec, seed=0)
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])  # openvino converts none without
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    export(folder, spec, model.stored(), extra_files=files)


def read_bytes_per_s() -> float:
    """Of memory, by all threads: the best of several sums."""
    matrix = torch.ones(2**16, 4096)
    times = []
    for _ in range(6):
        began_s = time.perf_counter()
        matrix.sum()
        times.append(time.perf_counter() - began_s)
    return matrix.nbytes / min(times)


def floor_of(spec: ModelSpec, dtype: str, bytes_per_s: float) -> float:
    """Tokens per second of one request, where reading the weights is all there is; the embedding is only looked up."""
    read = sum(param.numel for param in spec.parameters() if param.name != "embedding.weight")
    return bytes_per_s / (read * getattr(torch, dtype).itemsize)


@dataclass
class Contender:
    """A process that runs one engine, and what it took."""

    name: str
    process: subprocess.Popen[str]
    ready_s: float = 0.0
    peak_mib: float = 0.0
    outside: dict[int, list[float]] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    firsts: dict[int, list[float]] = field(default_factory=dict)
    gaps: dict[int, float] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, python: str, folder: Path, dtype: str, threads: int) -> Contender:
        script = str(Path(__file__).with_name("serve_contenders.py"))
        command = [python, script, name, str(folder), dtype, str(threads)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        made = cls(name, process)
        made.ready_s = made._read()["ready_s"]
        return made

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended")
        return dict(json.loads(line))

    def run(self, prompts: list[list[int]], max_tokens: int, counts: bool = True) -> None:
        """One round."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        found = self._read()
        self.peak_mib = found["peak_mib"]
        times, load = found["times"], len(prompts)
        if any(len(own) != max_tokens for own in times):
            raise RuntimeError(f"{self.name}: answers of {sorted({len(own) for own in times})} tokens")
        if not counts:
            return
        first, last = min(own[0] for own in times), max(own[-1] for own in times)
        tokens = sum(map(len, times)) - 1
        self.rates.setdefault(load, []).append(tokens / (last - (first if load == 1 else 0)))
        self.firsts.setdefault(load, []).append(statistics.median(own[0] for own in times))
        gap = max(after - before for own in times for before, after in pairwise(own))
        self.gaps[load] = max(gap, self.gaps.get(load, 0.0))
        if found["outside"] is not None:
            self.outside.setdefault(load, []).append(found["outside"])

    def stop(self) -> None:
        """An engine whose threads outlive its input is ended: what it had to say has been read."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def row(self, loads: list[int]) -> str:
        cells = [self.name, f"{self.ready_s:.1f}", f"{self.peak_mib:,.0f}"]
        for load in loads:
            cells.append(f"{statistics.median(self.rates[load]):.1f}")
            if load > 1:
                cells += [f"{statistics.median(self.firsts[load]):.2f}", f"{self.gaps[load]:.2f}"]
        return "| " + " | ".join(cells) + " |"


def prompts_of(load: int, turn: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1000 * load + turn)
    return torch.randint(0, 32000, (load, PROMPT), generator=generator).tolist()


def compare(folder: Path, dtype: str, options: argparse.Namespace) -> list[Contender]:
    pythons = dict(pair.split("=", 1) for pair in options.python)
    contenders: list[Contender] = []
    for name in options.contenders:
        try:
            one = Contender.start(name, pythons.get(name, sys.executable), folder, dtype, options.threads)
            one.run(prompts_of(2, 0), 4, counts=False)
            contenders.append(one)
        except (RuntimeError, OSError) as error:
            print(f"{name} is left out: {error}", flush=True)
    for turn in range(options.turns):
        for load in options.loads:
            for one in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
                one.run(prompts_of(load, turn), LOADS[load])
    for one in contenders:
        one.stop()
    return contenders


def show(spec: ModelSpec, dtype: str, contenders: list[Contender], loads: list[int], bytes_per_s: float) -> None:
    floor = floor_of(spec, dtype, bytes_per_s)
    print(f"\n{spec.name}, {dtype}; memory {bytes_per_s / 1e9:.1f} GB/s, floor {floor:.1f} tokens/s\n")
    names = ["engine", "ready s", "peak MiB"]
    for load in loads:
        names += ["one"] if load == 1 else [f"{load}: tok/s", "first s", "gap s"]
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for one in contenders:
        print(one.row(loads))
    for one in contenders:
        for load, shares in one.outside.items():
            print(f"{one.name}: outside of the model with {load} at once: {100 * statistics.median(shares):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["125m"], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=("bfloat16", "float32"))
    parser.add_argument("--contenders", nargs="+", default=["meshwright", "transformers"], choices=PEERS)
    parser.add_argument("--python", nargs="+", default=[], metavar="NAME=PATH")
    parser.add_argument("--loads", nargs="+", type=int, default=list(LOADS), choices=LOADS)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where models are kept; a temporary folder if not given")
    parser.add_argument("--only-write", action="store_true", help="write the models, and what contenders make of them")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as made:
        for name in options.models:
            for dtype in options.dtypes:
                folder, spec = (options.folder or Path(made)) / f"{name}-{dtype}", spec_of(name)
                if not folder.exists():
                    write_model(folder, spec, dtype)
                if options.only_write:
                    options.turns = 0
                contenders = compare(folder, dtype, options)
                if options.turns:
                    show(spec, dtype, contenders, options.loads, read_bytes_per_s())


if __name__ == "__main__":
    main()
