"""Two ranks behind one server, as processes, which share a model or have one each: what clients see, and what is left,
when one of them dies, or all are told to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from meshwright.core.serving import Layout, Requests, ServingPlan
from meshwright.core.sources import load_cluster
from meshwright.models.hf import export
from meshwright.train.tokenizer import save_tokenizer, train_tokenizer
from tests.end_to_end.shell import MESHWRIGHT, ranks_of, started
from tests.models.tiny import SPECS, random_model


@pytest.fixture(params=[{"tp": 2}, {"replicas": 2}], ids=["tp", "replicas"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    spec = SPECS["llama"].model_copy(update={"vocab_size": 300, "max_positions": 4096})
    model = random_model(spec)
    export(tmp_path / "model", spec, model.stored())
    save_tokenizer(train_tokenizer(["some text"], 300), tmp_path / "model")
    layout = Layout(**request.param, precision="fp32", num_blocks=260, block_size=16)
    asked = Requests(prompt_tokens=8, output_tokens=8, rate_per_s=1)
    plan = ServingPlan(model=spec, cluster=load_cluster("local:2"), requests=asked, layout=layout)
    plan.save(tmp_path / "plan.toml")
    command = [*MESHWRIGHT, "serve", str(tmp_path / "model"), "--port", "0"]
    with started([*command, "--plan", str(tmp_path / "plan.toml")]) as process:
        yield process


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_a_dead_rank(server: subprocess.Popen[str]):
    assert server.stdout is not None
    greeting = server.stdout.readline()
    url = re.search(r"http://\S+:\d+", greeting)
    assert url, greeting
    assert "cache of 4,160 tokens" in greeting, "the plan's sizes"
    ranks = ranks_of(server.pid)
    body = {"prompt": "some text", "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0}
    if "replicas" in greeting:
        _both_answer(url[0])
    with httpx.stream("POST", f"{url[0]}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        rest = [line for line in lines if line]
    assert time.monotonic() - killed < 5
    assert "the engine has failed" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
    assert httpx.get(f"{url[0]}/health").status_code == 503
    _, errors = server.communicate(timeout=20)
    assert server.returncode == 1
    assert "rank 1 was killed by signal 9" in errors
    assert errors.count("\n") == 1, errors
    assert not ranks_of(server.pid)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_what_is_under_way_is_answered_after_sigterm(server: subprocess.Popen[str]):
    assert server.stdout is not None
    url = re.search(r"http://\S+:\d+", server.stdout.readline())
    assert url
    body = {"prompt": ["some text"] * 4, "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0,
            "stream_options": {"include_usage": True}}  # fmt: skip
    with httpx.stream("POST", f"{url[0]}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.send_signal(signal.SIGTERM)
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["usage"]["completion_tokens"] == 4 * 300
    _, errors = server.communicate(timeout=20)
    assert server.returncode == 128 + signal.SIGTERM
    assert errors == "meshwright: error: stopped by SIGTERM\n"
    assert not ranks_of(server.pid)


def _both_answer(url: str) -> None:
    """Alike prompts of one request get one text, from either replica; each counts what it has answered."""
    body = {"prompt": ["some text"] * 4, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    choices = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["choices"]
    assert len({choice["text"] for choice in choices}) == 1
    metrics = httpx.get(f"{url}/metrics").text
    counted = dict(re.findall(r'vllm:generation_tokens_total\{model_name="model",replica="(\d)"\} (\S+)', metrics))
    assert sum(map(float, counted.values())) == 4 * 40
    assert all(float(count) >= 40 for count in counted.values()), counted
