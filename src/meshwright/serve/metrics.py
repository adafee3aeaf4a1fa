"""What the server counts, under the names that dashboards for vLLM know. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import Histogram
from prometheus_client.registry import Collector

from meshwright.serve.request import Sequence
from meshwright.serve.scheduler import Scheduler

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between tokens of an answer.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_time_per_output_token_seconds": "Mean of an answer between its first token and its last.",
}


class Metrics:
    """Counters and times of one server.

    Args:
        scheduler: whose counts are shown.
        model_name: label of all of them.
        block_bytes: of a block of the cache on this rank.
    """

    def __init__(self, scheduler: Scheduler, model_name: str, block_bytes: int = 0) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Counts(scheduler, model_name, block_bytes))
        self._clock = monotonic
        labels = {"labelnames": ("model_name",), "registry": self._registry}
        self._times = {
            name: Histogram(f"vllm:{name}", about, buckets=_SECONDS, **labels).labels(model_name)
            for name, about in _HISTOGRAMS.items()
        }
        self._step_tokens = Histogram(
            "vllm:iteration_tokens_total", "Tokens of a step.", buckets=_TOKENS, **labels
        ).labels(model_name)
        self._first: dict[Sequence, float] = {}
        self._last: dict[Sequence, float] = {}

    def step(self, num_tokens: int) -> None:
        """A step computed so many tokens."""
        self._step_tokens.observe(num_tokens)

    def token(self, sequence: Sequence) -> None:
        """A sequence got a token just now."""
        now, arrived_s, started = self._clock(), sequence.arrived_s, sequence.started_s or sequence.arrived_s
        times = self._times
        if sequence not in self._first:
            self._first[sequence] = now
            times["time_to_first_token_seconds"].observe(now - arrived_s)
            times["request_queue_time_seconds"].observe(started - arrived_s)
            times["request_prefill_time_seconds"].observe(now - started)
        else:
            times["inter_token_latency_seconds"].observe(now - self._last[sequence])
        self._last[sequence] = now

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended; it is forgotten."""
        first, last = self._first.pop(sequence, None), self._last.pop(sequence, None)
        if first is None or last is None or sequence.finish == "abort":
            return
        self._times["e2e_request_latency_seconds"].observe(last - sequence.arrived_s)
        self._times["request_decode_time_seconds"].observe(last - first)
        if len(sequence.output) > 1:
            per_token_s = (last - first) / (len(sequence.output) - 1)
            self._times["request_time_per_output_token_seconds"].observe(per_token_s)

    def text(self) -> bytes:
        """All of it, in Prometheus' text form."""
        return generate_latest(self._registry)


class _Counts(Collector):
    """The scheduler's own numbers, read when they are asked for."""

    def __init__(self, scheduler: Scheduler, model_name: str, block_bytes: int) -> None:
        self._scheduler = scheduler
        self._block_bytes = block_bytes
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """The families."""
        s, blocks, counts = self._scheduler, self._scheduler.blocks, self._scheduler.counts
        for name, about, value in (
            ("num_requests_running", "Sequences that take part in steps.", len(s.running)),
            ("num_requests_waiting", "Sequences that wait.", len(s.waiting)),
            ("kv_cache_usage_perc", "Share of the cache's blocks that are held; 1 is all.",
             blocks.num_held / blocks.num_blocks),
            ("num_requests_swapped", "Sequences that wait with keys and values on the host.",
             sum(bool(sequence.host_blocks) for sequence in list(s.waiting))),
            ("cpu_cache_usage_perc", "Share of the host's blocks that are held; 1 is all.",
             s.host.num_held / s.host.num_blocks if s.host else 0.0),
        ):  # fmt: skip
            yield self._gauge(name, about, (), ((), float(value)))
        config = {"block_size": str(blocks.block_size), "num_gpu_blocks": str(blocks.num_blocks)}
        yield self._gauge("cache_config_info", "Sizes of the cache.", tuple(config), (tuple(config.values()), 1.0))
        for name, about, count in (
            ("num_preemptions", "Sequences sent back to the queue.", counts.preemptions),
            ("swapped_out_blocks", "Blocks copied to the host.", counts.swapped_out),
            ("swapped_in_blocks", "Blocks copied back from the host.", counts.swapped_back),
            ("swapped_bytes", "Bytes of both on this rank.",
             (counts.swapped_out + counts.swapped_back) * self._block_bytes),
            ("prefix_cache_queries", "Tokens of prompts looked for in the prefix cache.", counts.prefix_queries),
            ("prefix_cache_hits", "Tokens of prompts found there.", counts.prefix_hits),
            ("prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            ("generation_tokens", "Tokens of answers.", counts.generation_tokens),
        ):  # fmt: skip
            family = CounterMetricFamily(f"vllm:{name}", about, labels=("model_name",))
            family.add_metric((self._model,), count)
            yield family
        ends = CounterMetricFamily("vllm:request_success", "Answers by end.", labels=("model_name", "finished_reason"))
        for why, count in dict(counts.finished).items():
            ends.add_metric((self._model, why), count)
        yield ends

    def _gauge(
        self, name: str, about: str, labels: tuple[str, ...], *values: tuple[Ordered[str], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", about, labels=("model_name", *labels))
        for own, value in values:
            family.add_metric((self._model, *own), value)
        return family
