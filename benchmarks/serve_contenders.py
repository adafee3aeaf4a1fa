"""What `benchmarks/serve.py` runs, one engine in each process: requests in, the time of every token out.

    python benchmarks/serve_contenders.py NAME FOLDER DTYPE THREADS

Reads one JSON line per round, {"prompts": [[id, ...], ...], "max_tokens": n}, and answers with the seconds after the
round's begin at which each request's tokens came. Imports nothing of meshwright but for `meshwright`, since other
engines live in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Round = Callable[[list, int], list]
"""(prompts, tokens of each answer) → for each request the seconds of its tokens."""
CACHE_GIB = 1
CB_PAGE, CB_BLOCKS = 64, 256
"""Of transformers' cache: tokens of a page, and how many; room for 64 requests."""


def meshwright(folder: str, dtype: str, threads: int) -> Round:
    import torch

    from meshwright.run.served import open_model
    from meshwright.serve.options import ServeOptions
    from meshwright.serve.request import SamplingParams

    torch.set_num_threads(threads)
    engine = open_model(Path(folder)).engine(options=ServeOptions(prefix_cache=False))
    inner_s = [0.0]
    plain_run = engine.runner.run

    def run(batch):
        began_s = time.perf_counter()
        logits = plain_run(batch)
        inner_s[0] += time.perf_counter() - began_s
        return logits

    engine.runner.run = run

    def one_round(prompts: list, max_tokens: int) -> list:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        began_s, inner_s[0] = time.perf_counter(), 0.0
        times = {engine.submit(prompt, params)[0]: [] for prompt in prompts}
        while not engine.is_idle:
            for event in engine.step():
                times[event.sequence].append(time.perf_counter() - began_s)
        one_round.outside = 1 - inner_s[0] / (time.perf_counter() - began_s)
        return list(times.values())

    return one_round


def transformers(folder: str, dtype: str, threads: int) -> Round:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    class Clock(StoppingCriteria):
        def __init__(self) -> None:
            self.began_s, self.times = time.perf_counter(), []

        def __call__(self, input_ids, scores, **rest):
            self.times.append(time.perf_counter() - self.began_s)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def one_round(prompts: list, max_tokens: int) -> list:
        ids, clock = torch.tensor(prompts), Clock()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        return [clock.times for _ in prompts]

    return one_round


def continuous(folder: str, dtype: str, threads: int) -> Round:
    """transformers, with batches that requests join and leave."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    sizes = ContinuousBatchingConfig(
        page_size=CB_PAGE, num_blocks=CB_BLOCKS, max_batch_tokens=256, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(GenerationConfig(do_sample=False, eos_token_id=-1), sizes)
    manager.start()
    next_id = [0]

    def one_round(prompts: list, max_tokens: int) -> list:
        began_s, times, seen = time.perf_counter(), {}, {}
        for prompt in prompts:
            next_id[0] += 1
            key = str(next_id[0])
            times[key], seen[key] = [], 0
            manager.add_request(prompt, key, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1)
        while any(count < max_tokens for count in seen.values()):
            output = manager.get_result(timeout=60)
            if output is None or output.error is not None:
                raise RuntimeError(f"no answer: {output and output.error}")
            key, count = output.request_id, len(output.generated_tokens)
            times[key] += [time.perf_counter() - began_s] * (count - seen[key])
            seen[key] = max(count, seen[key])
        return list(times.values())

    return one_round


def openvino(folder: str, dtype: str, threads: int) -> Round:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    converted = Path(f"{folder}-openvino")
    if not converted.exists():
        _convert(folder, converted)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = CACHE_GIB, 256, True
    hint = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    settings = {"INFERENCE_PRECISION_HINT": hint}
    if threads != len(os.sched_getaffinity(0)):  # a number of threads beside bf16 ends in a crash (2026.4, AMX)
        settings["INFERENCE_NUM_THREADS"] = threads
    pipe = genai.ContinuousBatchingPipeline(str(converted), scheduler, "CPU", settings)
    next_id = [0]

    def one_round(prompts: list, max_tokens: int) -> list:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        began_s, handles, times = time.perf_counter(), [], []
        for prompt in prompts:
            next_id[0] += 1
            handles.append(pipe.add_request(next_id[0], ov.Tensor(np.array([prompt], dtype=np.int64)), config))
            times.append([])
        while pipe.has_non_finished_requests():
            pipe.step()
            now_s = time.perf_counter() - began_s
            for handle, own in zip(handles, times):
                while handle.can_read():
                    found = handle.read()
                    own += [now_s] * sum(len(output.generated_ids) for output in found.values())
        return times

    return one_round


def _convert(folder: str, converted: Path) -> None:
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    model = OVModelForCausalLM.from_pretrained(folder, export=True, load_in_8bit=False, compile=False)
    model.save_pretrained(converted)
    import openvino as ov

    pair = convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
    for part, name in zip(pair, ("tokenizer", "detokenizer")):
        ov.save_model(part, converted / f"openvino_{name}.xml")


def vllm(folder: str, dtype: str, threads: int) -> Round:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            enable_prefix_caching=False,
        )
    )

    def one_round(prompts: list, max_tokens: int) -> list:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        began_s, times, seen = time.perf_counter(), {}, {}
        for at, prompt in enumerate(prompts):
            times[str(at)], seen[str(at)] = [], 0
            engine.add_request(str(at), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                count, key = len(output.outputs[0].token_ids), output.request_id
                times[key] += [time.perf_counter() - began_s] * (count - seen[key])
                seen[key] = count
        return list(times.values())

    return one_round


def llama(folder: str, dtype: str, threads: int) -> Round:
    """`llama-server` of the PATH, over HTTP, with a slot for each of 64 requests; `LLAMA_CPP` names its source folder,
    whose converter makes the model once."""
    import asyncio
    import atexit
    import shutil
    import socket
    import subprocess

    converted = Path(f"{folder}.gguf")
    if not converted.exists():
        _to_gguf(folder, converted, dtype)
    program = shutil.which("llama-server")
    assert program, "llama-server is not on the PATH"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"-m": converted, "--port": port, "-t": threads, "-np": 64, "-c": 64 * 256, "-ub": 256, "-b": 256}
    command = [program, *(str(part) for pair in options.items() for part in pair), "--no-warmup"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(server.kill)

    async def ask(prompt: list, max_tokens: int, began_s: float) -> list:
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps({**body, "cache_prompt": False}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /completion HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        times = []
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])
                now_s = time.perf_counter() - began_s  # bytes that are no whole character wait for the next piece
                times += [now_s] * (piece["tokens_predicted"] - len(times))
        writer.close()
        return times

    def one_round(prompts: list, max_tokens: int) -> list:
        async def all_of_them() -> list:
            began_s = time.perf_counter()
            return await asyncio.gather(*(ask(prompt, max_tokens, began_s) for prompt in prompts))

        return asyncio.run(all_of_them())

    one_round.process = server.pid
    _until_healthy(server, port)
    return one_round


def _until_healthy(server, port: int) -> None:
    from urllib.request import urlopen

    while server.poll() is None:
        try:
            urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("llama-server has ended")


def _to_gguf(folder: str, converted: Path, dtype: str) -> None:
    """By the library's own converter; a tokenizer that it does not know is one of bytes here."""
    import runpy

    source = os.environ["LLAMA_CPP"]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion import base
    from conversion import llama as family

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    family.LlamaModel.set_vocab = base.TextModel.set_vocab
    kind = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", str(converted), "--outtype", kind]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


def peak_mib(process: int | str) -> float:
    """Most memory that a process has held."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def main() -> None:
    name, folder, dtype, threads = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # engines print what they like
    began_s = time.perf_counter()
    run = globals()[name](folder, dtype, int(threads))
    print(json.dumps({"ready_s": time.perf_counter() - began_s}), file=answers, flush=True)
    for line in sys.stdin:
        times = run(**json.loads(line))
        outside, process = getattr(run, "outside", None), getattr(run, "process", "self")
        print(json.dumps({"times": times, "peak_mib": peak_mib(process), "outside": outside}), file=answers, flush=True)


if __name__ == "__main__":
    main()
