"""Why a serving plan is as it is, in words: what it sustains, what limits it, what other layouts would do; and how long
a step that decodes takes for each degree of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.core.cluster import ClusterSpec
from meshwright.core.legal import divisors
from meshwright.core.model import ModelSpec
from meshwright.core.serving import Layout, Requests, broken_rules
from meshwright.core.units import counted, format_bytes, format_time
from meshwright.cost.serving import KEYS, LATENCY, LIMITS, WEIGHTS, StepCosts, Work, arithmetic_balance
from meshwright.cost.terms import TimeTerm, total_s
from meshwright.planner.advise import advise_serving
from meshwright.planner.interval import is_calibrated
from meshwright.planner.serving import ServingResult
from meshwright.planner.serving_search import ServingForecast

SLOWER = 1.005
"""Times as long: less is no difference."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A degree of tensor parallelism, whether its weights fit or not."""

    tp: int
    one: tuple[TimeTerm, ...]
    """A step that decodes one sequence, by cause."""
    many: tuple[TimeTerm, ...]
    """Likewise as many as `decode_curve` was asked for."""

    @property
    def one_s(self) -> float:
        return total_s(self.one)

    @property
    def many_s(self) -> float:
        return total_s(self.many)


def decode_curve(
    model: ModelSpec, cluster: ClusterSpec, requests: Requests, layout: Layout, num_sequences: int
) -> list[CurvePoint]:
    """Every legal tp up to the devices, with the layout's pp."""
    found = []
    context = requests.prompt_tokens + requests.output_tokens / 2
    for tp in divisors(model.num_heads):
        other = layout.model_copy(update={"tp": tp, "replicas": 1, "ep": 1})
        if tp * layout.pp > cluster.num_devices or broken_rules(other, model, cluster, requests):
            continue
        costs = StepCosts(model, other, cluster)
        one, many = (costs.terms(Work(n, context, num_rows=n)) for n in (1, num_sequences))
        found.append(CurvePoint(tp, one, many))
    return found


def turning_point(curve: Sequence[CurvePoint]) -> CurvePoint:
    """Beyond this degree a step that decodes one sequence gets slower, or none is legal."""
    return min(curve, key=lambda point: point.one_s)


def explain(model: ModelSpec, cluster: ClusterSpec, requests: Requests, result: ServingResult) -> str:
    """The paragraph."""
    winner = result.forecast
    curve = decode_curve(model, cluster, requests, winner.layout, sequences_of(winner))
    sentences = (
        _verdict(winner, result),
        _latency(winner),
        _memory(winner, cluster),
        _limit(winner, cluster),
        _turn(curve),
        *_alternatives(winner, result),
        _rules(model, cluster, requests),
        _assumptions(cluster),
    )
    return " ".join(sentence for sentence in sentences if sentence)


def sequences_of(forecast: ServingForecast) -> int:
    """That decode together at the asked rate."""
    return max(1, round(forecast.now.decoding.num_decoding))


def _verdict(winner: ServingForecast, result: ServingResult) -> str:
    layout, rate = winner.layout, winner.requests.rate_per_s
    many = f"answers most per device of the {len(result.ranked)} layouts that fit and sustain"
    found = many if len(result.ranked) > 1 else "is the only layout that fits and sustains"
    enough = winner.needed_replicas
    spare = (
        f" {counted(enough, 'replica')}, {counted(enough * layout.tp * layout.pp, 'device')}, would do."
        if enough < layout.replicas
        else ""
    )
    return (
        f"{layout.describe()} {found} {rate:g} requests/s: at "
        f"most {winner.most_per_s:.3g} requests/s, {winner.tokens_per_device_s:,.0f} tokens/s on each of "
        f"{counted(layout.num_devices, 'device')}, where {winner.most.limit}. The asked rate is "
        f"{winner.utilisation:.0%} of that.{spare}"
    )


def _latency(winner: ServingForecast) -> str:
    now = winner.now
    return (
        f"At it the first token comes after {format_time(now.ttft_s)} in the mean, each further one after "
        f"{format_time(now.tpot_s)}, beside a whole chunk of a prompt {format_time(winner.gap_s)}; "
        f"{now.num_running:.1f} sequences run on each replica."
    )


def _memory(winner: ServingForecast, cluster: ClusterSpec) -> str:
    memory, layout = winner.memory, winner.layout
    return (
        f"A rank holds {format_bytes(winner.rank_bytes)} of {format_bytes(cluster.usable_memory_bytes)} usable: "
        f"weights {format_bytes(memory.weights_bytes)}, cache {format_bytes(winner.cache_bytes)} "
        f"({format_bytes(memory.token_bytes)} a token, {winner.cache_tokens:,} tokens, {winner.max_batch:,} requests "
        f"whole), working {format_bytes(memory.working_bytes)} for steps of {layout.step_tokens:,} tokens."
    )


def _limit(winner: ServingForecast, cluster: ClusterSpec) -> str:
    terms = winner.costs.terms(winner.now.decoding)
    total = total_s(terms)
    if not winner.now.decoding.num_decoding:
        return ""
    listed = ", ".join(f"{t.name} {t.seconds / total:.0%}" for t in terms if t.seconds >= 0.005 * total)
    largest = max(terms, key=lambda term: term.seconds)
    bound = arithmetic_balance(cluster, winner.layout)
    return (
        f"A step that decodes takes {format_time(total)} ({listed}): {LIMITS[largest.name]} limits it; products would "
        f"be bound by compute from about {bound:,.0f} sequences."
    )


def _turn(curve: Sequence[CurvePoint]) -> str:
    """Beyond which degree decoding gets slower, and why."""
    if len(curve) < 2:
        return ""
    best = turning_point(curve)
    beyond = next((p for p in curve if p.tp > best.tp and p.one_s > SLOWER * best.one_s), None)
    if beyond is None:
        return (
            f"One request decodes fastest with tp={best.tp}, {format_time(best.one_s)} a token: no larger one is legal."
        )
    read, waits = (_seconds(best, WEIGHTS, KEYS) - _seconds(beyond, WEIGHTS, KEYS)), _seconds(beyond, LATENCY)
    return (
        f"Beyond tp={best.tp} decoding gets slower: one request takes {format_time(best.one_s)} a token there and "
        f"{format_time(beyond.one_s)} with tp={beyond.tp}, which reads {format_time(read)} less from memory but waits "
        f"{format_time(waits - _seconds(best, LATENCY))} longer for its reductions to go round."
    )


def _seconds(point: CurvePoint, *names: str) -> float:
    return sum(term.seconds for term in point.one if term.name in names)


def _alternatives(winner: ServingForecast, result: ServingResult) -> Iterator[str]:
    for other in result.ranked[1:3]:
        less = 1 - other.tokens_per_device_s / winner.tokens_per_device_s
        gain = other.now.tpot_s / winner.now.tpot_s
        how = f"{1 - gain:.0%} less" if gain < 1 else f"{gain - 1:.0%} more"
        yield f"{other.layout.describe()} answers {less:.0%} less per device, with {how} time between tokens."
    for rule, what in (("memory", "does not fit: it "), ("rate", "is too slow: it "), ("limits", "")):
        found = [refused for refused in result.refused if refused.rule == rule]
        if found:
            yield f"{found[0].layout.describe()} {what}{found[0].reason}."


def _rules(model: ModelSpec, cluster: ClusterSpec, requests: Requests) -> str:
    held = (f"{rule.id} {rule.advice}" for rule, holds in advise_serving(model, cluster, requests) if holds)
    return f"Rules of thumb that hold: {'; '.join(held)}."


def _assumptions(cluster: ClusterSpec) -> str:
    profile = cluster.device.profile
    is_counted = cluster.backend == "gloo" and profile is not None and profile.server.layer_s > 0
    host = "the server's own code counts as it was measured" if is_counted else "host time is not counted"
    rough = "" if is_calibrated(cluster) else f" `{cluster.device.name}` was never calibrated: its seconds are rough."
    return f"Means, of alike requests that come independently of each other and share no prefix; {host}.{rough}"
