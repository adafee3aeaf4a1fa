"""The load generator: what it asks and when, and what it says of servers good and bad."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any

import numpy as np
import pytest

from meshwright.cli.bench_serve import OPTIONS
from meshwright.cli.main import main
from meshwright.cli.serving import options_named
from meshwright.core.errors import InputError
from meshwright.core.serving import Requests, ServingPlan, is_serving
from meshwright.core.sources import load_cluster
from meshwright.planner.serving import plan_serving, under_load
from meshwright.report.serving import load_lines
from meshwright.report.serving_plans import beside_forecast
from meshwright.run.served import open_model
from meshwright.serve.bench import Record, Target, run_load, summary_of
from meshwright.serve.workload import Lengths, Workload, planned
from tests.serve.conftest import Running


def load(url: str, key: str | None = None, **change: Any) -> tuple[list[Record], Workload]:
    """Run a load on a server."""
    options = {"num_requests": 8, "prompt_tokens": "60", "output_tokens": "6", "timeout_s": 30.0, **change}
    workload = Workload.parse({"concurrency": 4, **options} if "rate" not in options else options, "workload")

    async def run() -> list[Record]:
        target = Target(url, workload, key, None)
        try:
            await target.prepare()
            return await run_load(target, workload, planned(workload))
        finally:
            await target.close()

    return asyncio.run(run()), workload


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [("40", 40, 0), ("uniform:10,70", 40, 17.6), ("normal:40,5", 40, 5), ("exponential:40", 40, 40),
     ("lognormal:40,0.5", 45.3, 24.2)],
)  # fmt: skip
def test_lengths_have_their_distribution(text: str, mean: float, deviation: float):
    rng, lengths = np.random.default_rng(0), Lengths.parse(text)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert min(drawn) >= 1
    assert np.mean(drawn) == pytest.approx(mean, rel=0.05)
    assert np.std(drawn) == pytest.approx(deviation, rel=0.08, abs=0.01)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "1,2", "uniform:5", "uniform:9,5", "normal:nan,1", "lognormal:9,99", "inf", "zipf:2"]
)
def test_lengths_that_are_none(text: str):
    with pytest.raises(InputError, match=r"are no lengths|comes first|spreads beyond"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    "change", [{}, {"rate": 1.0, "concurrency": 2}, {"rate": 0.0}, {"concurrency": 1, "num_requests": None}]
)
def test_a_load_says_how_requests_come_and_when_it_ends(change: dict[str, Any]):
    with pytest.raises(InputError):
        Workload.parse({"num_requests": 1, **change}, "workload")


def test_arrivals_are_poisson_and_follow_the_seed():
    few, many = (Workload(rate=rate, num_requests=3000, output_tokens="normal:50,9", seed=4) for rate in (2.0, 20.0))
    gaps = [one.gap_s for one in planned(few)]
    assert np.mean(gaps) == pytest.approx(0.5, rel=0.05)
    assert np.std(gaps) == pytest.approx(0.5, rel=0.06)  # as of a Poisson process; equal gaps would have 0
    assert [one.output_tokens for one in planned(few)] == [one.output_tokens for one in planned(many)]
    other = few.model_copy(update={"seed": 5})
    assert [one.gap_s for one in islice(planned(other), 9)] != gaps[:9]


def test_a_closed_loop_on_our_server(served: Running):
    records, workload = load(f"{served.url}/v1", prefix_tokens=20, output_tokens="uniform:4,8")
    assert [r.error for r in records] == [None] * 8
    by_index = sorted(records, key=lambda record: record.index)
    assert [r.output_tokens for r in by_index] == [one.output_tokens for one in planned(workload)]
    assert all(50 <= (r.prompt_tokens or 0) <= 70 for r in records)
    for r in records:
        assert r.first_s is not None
        assert 0 <= r.sent_s - r.due_s < r.first_s - r.due_s <= r.ended_s - r.due_s
    summary = summary_of(served.url, "tiny", records)
    assert summary.output_tokens == sum(one.output_tokens for one in planned(workload))
    assert summary.output_tokens_per_s == pytest.approx(summary.output_tokens / summary.duration_s)
    assert summary.times_s["first token"]["p50"] <= summary.times_s["end to end"]["p50"]
    assert "8 requests answered" in load_lines(summary)[0]
    starts = sorted(records, key=lambda r: r.sent_s)
    assert starts[4].sent_s >= min(r.ended_s for r in records)  # never more than 4 at once


def test_an_open_loop_does_not_wait_for_answers(served: Running):
    records, workload = load(served.url, rate=1000.0, chat=True)
    assert [r.error for r in records] == [None] * 8
    assert [r.index for r in records] == list(range(8))
    due = np.cumsum([one.gap_s for one in planned(workload)])
    assert [r.due_s for r in records] == pytest.approx(list(due))
    assert min(r.ended_s for r in records) > due[-1]


def test_a_duration_begins_nothing_later(served: Running):
    records, _ = load(served.url, num_requests=None, duration_s=0.3, output_tokens="1")
    assert records
    assert max(r.due_s for r in records) < 0.3


def test_refusals_are_counted_by_kind(run_server: Callable[..., Running]):
    served = run_server(max_waiting=1, max_running=1)
    records, _ = load(served.url, rate=2000.0, num_requests=12, output_tokens="40")
    summary = summary_of(served.url, "tiny", records)
    assert list(summary.errors) == ["429 queue_full"]
    assert summary.num_ok + summary.errors["429 queue_full"] == 12
    assert any("× 429 queue_full" in line for line in load_lines(summary))
    assert any("429 queue_full, first: " in line and "try again later" in line for line in load_lines(summary))


def test_a_server_that_is_none_is_said_in_one_line(served: Running, run_server: Callable[..., Running]):
    with pytest.raises(InputError, match="cannot be reached"):
        load("127.0.0.1:1")
    with pytest.raises(InputError, match="port 99999 cannot be, the largest is 65535"):
        load("127.0.0.1:99999")
    with pytest.raises(InputError, match="no list of models"):
        load(f"{served.url}/nothing")
    with pytest.raises(InputError, match="cannot be reached"):
        load("http://[")
    with pytest.raises(InputError, match=r"no list of models.*401.*give its --api-key"):
        load(run_server(api_key="geheimnisträger").url, key="geheimnisträgerin")


STREAM = [b'data: {"choices": [{"text": "a"}]}\n\n', b"data: [DONE]\n\n"]


@contextmanager
def stranger(lines: list[bytes]) -> Iterator[str]:
    """Another server, that streams these lines and knows nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer([b'{"data": [{"id": "m"}]}'])

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.answer(lines if asked["stream"] else [b'{"choices": []}'])

        def answer(self, content: list[bytes]) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"".join(content))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (STREAM, None),
        (STREAM[:1], "stream: ends early"),
        ([b"data: {\n\n"], "stream: not JSON"),
        ([b"data: 3\n\n"], "stream: not JSON"),
        ([b'data: {"error": {"code": 503, "message": "no"}}\n\n'], "stream: 503"),
    ],
)
def test_other_servers(lines: list[bytes], error: str | None):
    with stranger(lines) as url:
        records, _ = load(url, num_requests=2, concurrency=1)
    assert [r.error for r in records] == [error] * 2
    summary = summary_of(url, "m", records)
    assert summary.output_tokens == (2 if error is None else 0)
    assert summary.tokens_are_pieces is (error is None)


def test_the_command(served: Running, capsys: pytest.CaptureFixture[str]):
    options = [served.url, "--requests", "4", "--prompt-tokens", "30", "--output-tokens", "5"]
    assert main(["bench-serve", *options]) == 0
    shown = capsys.readouterr().out
    for word in ("first token", "between tokens", "end to end", "p99", "4 requests answered", "20 tokens"):
        assert word in shown
    assert main(["bench-serve", *options, "--rate", "50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_ok"], found["errors"], found["output_tokens"]) == (4, {}, 20)
    assert found["workload"]["rate"] == 50
    assert len(found["records"]) == 4
    with pytest.raises(InputError, match="either a rate"):
        main(["bench-serve", *options, "--rate", "50", "--concurrency", "2"])
    with pytest.raises(InputError, match="not one of 2 requests was answered"):
        main(["bench-serve", served.url, "--requests", "2", "--prompt-tokens", "2000"])


def test_a_refusal_names_the_option_that_was_typed(tmp_path):
    def refused(**change: object) -> str:
        with pytest.raises(InputError) as error, options_named(OPTIONS):
            Workload.parse({"num_requests": 1, **change}, "workload")
        return str(error.value)

    assert refused(rate=-1).startswith("--rate: Input should be greater than 0")
    assert refused(rate=1, timeout_s=0).startswith("--timeout: ")
    assert refused(rate=1, concurrency=2).startswith("say how requests come")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="there is no such folder; name the folder of a Hugging Face model"):
        open_model(tmp_path / "none")
    with pytest.raises(InputError, match="an empty file, and no plan"):
        is_serving(tmp_path / "file")
    (tmp_path / "file").write_text("[job]\n")
    with pytest.raises(InputError, match="a plan of a training, not for serving"):
        ServingPlan.load(tmp_path / "file")


def test_a_plan_says_what_to_ask_and_its_forecast_stands_beside(served: Running, tmp_path, capsys):
    asked = Requests(prompt_tokens=60, output_tokens=6, rate_per_s=40)
    made = plan_serving(served.engine.spec, load_cluster("local:2"), asked, {}).plan
    made.save(tmp_path / "serve.toml")
    options = [served.url, "--plan", str(tmp_path / "serve.toml"), "--requests", "6"]
    assert main(["bench-serve", *options, "--output-tokens", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"]["rate"] == 40
    assert found["workload"]["prompt_tokens"] == "60"
    assert found["output_tokens"] == 6 * 4, "what was typed counts"
    prompt = round(found["prompt_tokens"] / 6)
    load = under_load(made, Requests(prompt_tokens=prompt, output_tokens=4, rate_per_s=40)).now
    assert found["forecast"]["first token"] == pytest.approx(load.ttft_s)
    assert found["forecast"]["output tokens/s"] == pytest.approx(160)
    assert main(["bench-serve", *options]) == 0
    shown = capsys.readouterr().out
    assert "Beside the plan, means" in shown
    assert "forecast" in shown
    beyond = under_load(made, asked.model_copy(update={"rate_per_s": 1e6}))
    rows = {row.name: row.forecast for row in beside_forecast(beyond, summary_of("", "", []))}
    assert rows["requests/s"] == pytest.approx(beyond.most_per_s), "never more than it sustains"
