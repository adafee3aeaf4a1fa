"""What the server counts, under the names that dashboards for vLLM know. Free of torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from functools import partial
from itertools import accumulate
from threading import Lock
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from meshwright.serve.request import Sequence
from meshwright.serve.scheduler import Counts, Scheduler

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


class _Histogram(Collector):
    """Counts by size. Equal values of one step are counted together, which the library's own cannot.

    Args:
        bounds: largest value of each bucket but the last, which has no bound.
    """

    def __init__(self, name: str, about: str, bounds: Ordered[float], model_name: str) -> None:
        self._name, self._about, self._bounds, self._model = name, about, bounds, model_name
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """A value that came so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += times * value

    def collect(self) -> Iterator[Metric]:
        """One family."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(list(self._counts))), strict=True))
        family = HistogramMetricFamily(self._name, self._about, labels=("model_name",))
        family.add_metric((self._model,), buckets=buckets, sum_value=self._sum)
        yield family


class Metrics:
    """Counters and times of one server.

    Args:
        schedulers: whose counts are shown; several are told apart by a label `replica`.
        model_name: label of all of them.
        block_bytes: of a block of the cache on this rank.
        clock: seconds, as the scheduler's.
    """

    def __init__(
        self,
        schedulers: Ordered[Scheduler],
        model_name: str,
        block_bytes: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Counts(schedulers, model_name, block_bytes))
        self._clock = clock
        self._lock = Lock()  # engines of several replicas count
        self._times = {
            name: _Histogram(f"vllm:{name}", about, _SECONDS, model_name) for name, about in _HISTOGRAMS.items()
        }
        self._step_tokens = _Histogram("vllm:iteration_tokens_total", "Tokens of a step.", _TOKENS, model_name)
        for histogram in (*self._times.values(), self._step_tokens):
            self._registry.register(histogram)
        self._first: dict[Sequence, float] = {}
        self._last: dict[Sequence, float] = {}

    def step(self, num_tokens: int) -> None:
        """A step computed so many tokens."""
        with self._lock:
            self._step_tokens.observe(num_tokens)

    def tokens(self, sequences: Iterable[Sequence]) -> None:
        """These sequences got a token each just now."""
        now, last = self._clock(), self._last
        gaps: dict[float, int] = {}
        with self._lock:
            for sequence in sequences:
                before = last.get(sequence)
                if before is None:
                    self._begin(sequence, now)
                else:
                    gaps[before] = gaps.get(before, 0) + 1
                last[sequence] = now
            for before, times in gaps.items():
                self._times["inter_token_latency_seconds"].observe(now - before, times)

    def _begin(self, sequence: Sequence, now: float) -> None:
        arrived_s, started = sequence.arrived_s, sequence.started_s or sequence.arrived_s
        self._first[sequence] = now
        self._times["time_to_first_token_seconds"].observe(now - arrived_s)
        self._times["request_queue_time_seconds"].observe(started - arrived_s)
        self._times["request_prefill_time_seconds"].observe(now - started)

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended; it is forgotten."""
        with self._lock:
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
    """The schedulers' own numbers, read when they are asked for."""

    def __init__(self, schedulers: Ordered[Scheduler], model_name: str, block_bytes: int) -> None:
        self._schedulers = schedulers
        self._block_bytes = block_bytes
        several = len(schedulers) > 1
        self._names = ("model_name", "replica") if several else ("model_name",)
        self._labels = [(model_name, str(at)) if several else (model_name,) for at in range(len(schedulers))]

    def collect(self) -> Iterator[Metric]:
        """The families."""
        for name, about, value in _GAUGES:
            yield self._family(GaugeMetricFamily, name, about, value)
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Sizes of the cache.", labels=(*self._names, "block_size", "num_gpu_blocks")
        )
        for labels, scheduler in zip(self._labels, self._schedulers, strict=True):
            blocks = scheduler.blocks
            config.add_metric((*labels, str(blocks.block_size), str(blocks.num_blocks)), 1.0)
        yield config
        for name, about, count in _COUNTERS:
            yield self._family(CounterMetricFamily, name, about, partial(_counted, count))
        yield self._family(
            CounterMetricFamily, "swapped_bytes", "Bytes of blocks that were swapped, on a rank.",
            lambda s: (s.counts.swapped_out + s.counts.swapped_back) * self._block_bytes,
        )  # fmt: skip
        ends = CounterMetricFamily("vllm:request_success", "Answers by end.", labels=(*self._names, "finished_reason"))
        for labels, scheduler in zip(self._labels, self._schedulers, strict=True):
            for why, number in dict(scheduler.counts.finished).items():
                ends.add_metric((*labels, why), number)
        yield ends

    def _family(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, about: str,
        value: Callable[[Scheduler], float],
    ) -> Metric:  # fmt: skip
        family = kind(f"vllm:{name}", about, labels=self._names)
        for labels, scheduler in zip(self._labels, self._schedulers, strict=True):
            family.add_metric(labels, float(value(scheduler)))
        return family


def _counted(count: Callable[[Counts], float], scheduler: Scheduler) -> float:
    return count(scheduler.counts)


_GAUGES: tuple[tuple[str, str, Callable[[Scheduler], float]], ...] = (
    ("num_requests_running", "Sequences that take part in steps.", lambda s: len(s.running)),
    ("num_requests_waiting", "Sequences that wait.", lambda s: len(s.waiting)),
    ("kv_cache_usage_perc", "Share of the cache's blocks that are held; 1 is all.",
     lambda s: s.blocks.num_held / s.blocks.num_blocks),
    ("num_requests_swapped", "Sequences that wait with keys and values on the host.",
     lambda s: sum(bool(sequence.host_blocks) for sequence in list(s.waiting))),
    ("cpu_cache_usage_perc", "Share of the host's blocks that are held; 1 is all.",
     lambda s: s.host.num_held / s.host.num_blocks if s.host else 0.0),
)  # fmt: skip
_COUNTERS: tuple[tuple[str, str, Callable[[Counts], float]], ...] = (
    ("num_preemptions", "Sequences sent back to the queue.", lambda c: c.preemptions),
    ("swapped_out_blocks", "Blocks copied to the host.", lambda c: c.swapped_out),
    ("swapped_in_blocks", "Blocks copied back from the host.", lambda c: c.swapped_back),
    ("prefix_cache_queries", "Tokens of prompts looked for in the prefix cache.", lambda c: c.prefix_queries),
    ("prefix_cache_hits", "Tokens of prompts found there.", lambda c: c.prefix_hits),
    ("prompt_tokens", "Tokens of prompts.", lambda c: c.prompt_tokens),
    ("generation_tokens", "Tokens of answers.", lambda c: c.generation_tokens),
)
