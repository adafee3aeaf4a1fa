"""One paragraph: why the winner wins, what limits it, why the obvious alternatives lose or do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.core.axes import coordinates_of
from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.core.units import counted, format_bytes, format_time
from meshwright.cost.flops import mfu
from meshwright.cost.latency import mean_terms
from meshwright.cost.terms import TimeTerm
from meshwright.cost.traffic import traffic
from meshwright.planner.enumerate import Refusal
from meshwright.planner.interval import interval_s, is_calibrated
from meshwright.planner.price import Forecast, Pricer
from meshwright.planner.reorder import faster_order


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way that a reader would think of, relative to the winner."""

    name: str
    is_like: Callable[[Strategy, Strategy], bool]
    """(candidate, winner) → whether the candidate goes that way."""


ALTERNATIVES = (
    Alternative("data parallel alone", lambda c, w: c.tp == c.pp == 1 and not w.tp == w.pp == 1),
    Alternative("without tensor parallel", lambda c, w: c.tp == 1 < w.tp),
    Alternative("with tensor parallel", lambda c, w: w.tp == 1 < c.tp),
    Alternative("without pipeline", lambda c, w: c.pp == 1 < w.pp),
    Alternative("with pipeline", lambda c, w: w.pp == 1 < c.pp),
    Alternative("without ZeRO", lambda c, w: c.zero == 0 < w.zero),
    Alternative("with ZeRO-1", lambda c, w: w.zero != 1 == c.zero),
    Alternative("with ZeRO-2", lambda c, w: w.zero != 2 == c.zero),
    Alternative("with ZeRO-3", lambda c, w: w.zero != 3 == c.zero),
    Alternative("without recomputation", lambda c, w: c.recompute == "none" and w.recompute == "full"),
    Alternative("with recomputation", lambda c, w: c.recompute == "full" and w.recompute == "none"),
)
"""Each is compared by its best strategy."""


def explain(
    winner: Forecast,
    priced: Sequence[Forecast],
    refused: Sequence[Refusal],
    pricer: Pricer,
    advice: Sequence[tuple[str, str]],
) -> str:
    """The paragraph.

    Args:
        winner: the chosen forecast.
        priced: every legal strategy's forecast, those that do not fit included.
        refused: what enumeration did not offer.
        advice: (id, words) of the rules of thumb that hold.
    """
    sentences = (
        _verdict(winner, priced, pricer.model, pricer.cluster, pricer.job),
        _range(winner, pricer.cluster),
        _limits(winner, pricer),
        _memory(winner),
        _zero_beside_pipeline(winner.strategy, pricer.model, pricer.job),
        *_alternatives(winner, priced, refused, pricer),
        _order(winner, pricer),
        _rules(advice),
    )
    return " ".join(sentence for sentence in sentences if sentence)


def _verdict(winner: Forecast, priced: Sequence[Forecast], model: ModelSpec, cluster: ClusterSpec, job: Job) -> str:
    seconds = winner.step_time.total_s
    peak = cluster.device.peak_flops_per_s[winner.strategy.recipe.parameter]
    share = mfu(model, job, seconds, cluster.num_devices, peak)
    num_fitting = sum(f.fits for f in priced)
    return (
        f"{winner.strategy.describe()} is the fastest of {counted(num_fitting, 'strategy', 'strategies')} that fit "
        f"({len(priced)} legal): "
        f"{format_time(seconds)} per step, {job.tokens_per_step / seconds:,.0f} tokens/s, "
        f"{share:.0%} of the devices' peak.{_stages(winner.strategy)}"
        f"{_delay(winner.strategy)}"
    )


def _range(winner: Forecast, cluster: ClusterSpec) -> str:
    """How far the seconds may be off, where nobody has measured the device."""
    if is_calibrated(cluster) or cluster.backend == "gloo":
        return ""
    least_s, most_s = interval_s(winner.step_time.total_s, cluster)
    name, span = cluster.device.name, f"between {format_time(least_s)} and {format_time(most_s)}"
    return f"`{name}` was never calibrated: expect {span}."


def _stages(strategy: Strategy) -> str:
    counts = strategy.layers_per_stage
    return f" Its stages hold {', '.join(map(str, counts))} layers, so that the head is balanced." if counts else ""


def _delay(strategy: Strategy) -> str:
    """What is not as in every other plan."""
    name = strategy.schedule
    if not strategy.pipeline_schedule.is_asynchronous:
        return ""
    return f" Its updates are delayed (`{name}`): it does not train as the plans that flush do."


def _limits(winner: Forecast, pricer: Pricer) -> str:
    """Where the seconds go; the largest term beside the products themselves is what limits."""
    total = winner.step_time.total_s
    shares = [(term.name, term.seconds / total) for term in pricer.terms(winner)]
    listed = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
    losses = [(share, name) for name, share in shares if name not in ("layers", "head", "products")]
    share, name = max(losses)
    limit = f"; the largest loss is {name}" if share >= 0.005 else ""
    return f"The step is {listed}{limit}.{_unpriced(winner.strategy, pricer.cluster)}"


def _unpriced(strategy: Strategy, cluster: ClusterSpec) -> str:
    """Which transfers cost nothing in these seconds, because the cluster does not state how fast they are."""
    tiers = [tier for tier in dict.fromkeys(strategy.offload.all_tiers) if tier != "none"]
    named = {"cpu": "the host (host_bandwidth_bytes_per_s)", "disk": "the disk (disk_read_bytes_per_s and _write_)"}
    unknown = [named[tier] for tier in tiers if cluster.tier_bytes_per_s(tier) is None]
    return (
        f" What passes to and from {' and '.join(unknown)} is not timed: the cluster states no speed."
        if unknown
        else ""
    )


def _memory(winner: Forecast) -> str:
    tiers = {"host_bytes": "in the host's memory", "disk_bytes": "on disk"}
    sizes = winner.memory.to_dict()
    moved = " and ".join(f"{format_bytes(sizes[name])} {where}" for name, where in tiers.items() if sizes[name])
    held = {name.removesuffix("_bytes"): size for name, size in sizes.items() if size and name not in tiers}
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(held.items(), key=lambda i: -i[1]))
    return (
        f"Rank {winner.rank} holds most: {format_bytes(winner.memory.total_bytes)} of "
        f"{format_bytes(winner.room.usable_memory_bytes)} usable ({listed}){f', and {moved}' if moved else ''}."
    )


def _zero_beside_pipeline(strategy: Strategy, model: ModelSpec, job: Job) -> str:
    """What sharded gradients cost where a pipeline needs many micro-batches: each reduces them again.

    Source: DeepSpeed's pipeline tutorial, which allows ZeRO-1 alone beside a pipeline; Rajbhandari et al. 2020, §7.
    """
    if not strategy.reduce_each or strategy.dp == 1 or strategy.num_micro_batches == 1:
        return ""
    once = strategy.model_copy(update={"zero": 1, "keep_gathered": False, "reduce_each": False, "prefetch": 1})
    often, sent_once = (format_bytes(_gradient_bytes(model, job, split)) for split in (strategy, once))
    return (
        f"Beside a pipeline reduce_each is rarely a good idea: it reduces gradients after each of the "
        f"{strategy.num_micro_batches} micro-batches, {often} per rank and step, where zero=1 sends {sent_once}."
    )


def _gradient_bytes(model: ModelSpec, job: Job, strategy: Strategy) -> int:
    """What the first rank sends to reduce gradients in a step."""
    rows = traffic(model, job, strategy, coordinates_of(0, strategy.sizes)).rows
    return sum(row.wire_bytes for (_, _, phase), row in rows.items() if phase == "gradients")


def _alternatives(
    winner: Forecast, priced: Sequence[Forecast], refused: Sequence[Refusal], pricer: Pricer
) -> Iterator[str]:
    for alternative in ALTERNATIVES:
        like = [f for f in priced if alternative.is_like(f.strategy, winner.strategy)]
        barred = [r for r in refused if alternative.is_like(r.strategy, winner.strategy)]
        if like:
            yield f"{_capital(alternative.name)}, {_against(winner, like, pricer)}."
        elif barred:
            yield f"{_capital(alternative.name)} is refused: {barred[0].reason}."


def _against(winner: Forecast, like: Sequence[Forecast], pricer: Pricer) -> str:
    fitting = [f for f in like if f.fits]
    if not fitting:
        closest = min(like, key=lambda f: f.memory.total_bytes)
        return f"nothing fits: the closest, {closest.strategy.describe()}, {closest.limit}"
    best = min(fitting, key=lambda f: (f.step_time.total_s, f.memory.total_bytes))
    slower = best.step_time.total_s / winner.step_time.total_s - 1
    name = best.strategy.describe()
    if slower < 0.0005:
        extra = best.memory.total_bytes - winner.memory.total_bytes
        how = "more" if extra > 0 else "less"
        return f"{name} is as fast and holds {format_bytes(abs(extra))} {how}" if extra else f"{name} is its equal"
    cause = _largest_increase(_mean_terms(winner, pricer), _mean_terms(best, pricer))
    return f"{name} is {slower:.1%} slower, mostly for {cause.name} (+{format_time(cause.seconds)})"


def _mean_terms(forecast: Forecast, pricer: Pricer) -> tuple[TimeTerm, ...]:
    return mean_terms(pricer.step_costs(forecast.strategy), forecast.strategy, forecast.step_time)


def _largest_increase(before: Sequence[TimeTerm], after: Sequence[TimeTerm]) -> TimeTerm:
    base = {term.name: term.seconds for term in before}
    return max((TimeTerm(t.name, t.seconds - base.get(t.name, 0.0)) for t in after), key=lambda term: term.seconds)


def _order(winner: Forecast, pricer: Pricer) -> str:
    """Which schedule that was not searched would be faster."""
    found = faster_order(winner, pricer)
    if found is None:
        return ""
    strategy, how = found.forecast.strategy, "more" if found.more_bytes > 0 else "less"
    chunks = f", num_chunks={strategy.num_chunks}" if strategy.num_chunks > 1 else ""
    held = f"holds {format_bytes(abs(found.more_bytes))} {how}" if found.more_bytes else "holds as much"
    return f"Fixing schedule={strategy.schedule}{chunks} makes it {found.gain:.1%} faster and {held}."


def _rules(advice: Sequence[tuple[str, str]]) -> str:
    return f"Rules of thumb that hold: {'; '.join(f'{id} {words}' for id, words in advice)}." if advice else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
