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
from meshwright.cost.activations import imbalance_of
from meshwright.cost.flops import mfu
from meshwright.cost.terms import TimeTerm
from meshwright.cost.traffic import traffic
from meshwright.planner.interval import interval_s, is_calibrated
from meshwright.planner.price import Forecast, Pricer
from meshwright.planner.reorder import faster_order, in_order_of
from meshwright.planner.search import Search


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
    Alternative("without recomputation", lambda c, w: c.recompute == "none" != w.recompute),
    Alternative("with recomputation", lambda c, w: c.recompute == "full" and w.recompute == "none"),
    Alternative("with selective recomputation", lambda c, w: c.recompute == "selective" != w.recompute),
    Alternative("without sequence parallelism", lambda c, w: c.sequence == "none" != w.sequence and c.tp > 1),
    Alternative("with sequence parallelism", lambda c, w: w.sequence == "none" != c.sequence),
    Alternative("without context parallelism", lambda c, w: c.cp == 1 < w.cp),
    Alternative("with context parallelism", lambda c, w: w.cp == 1 < c.cp),
    Alternative("on a grid of ranks", lambda c, w: c.tensor.kind != "1d" == w.tensor.kind),
    Alternative("with 1f1b", lambda c, w: w.pp > 1 < c.pp and c.schedule == "1f1b" != w.schedule),
)
"""Each is compared by its best strategy."""


def explain(winner: Forecast, search: Search, advice: Sequence[tuple[str, str]], *, is_reordered: bool = False) -> str:
    """The paragraph.

    Args:
        winner: the chosen forecast.
        search: where it was found, and its alternatives are.
        advice: (id, words) of the rules of thumb that hold.
        is_reordered: the winner has been tried under all schedules.
    """
    pricer = search.pricer
    others = tuple(_alternatives(winner, search))
    sentences = (
        _verdict(winner, len(search.priced), pricer),
        _range(winner, pricer.cluster),
        _limits(winner, pricer),
        _memory(winner),
        _imbalance(winner, pricer),
        _zero_beside_pipeline(winner.strategy, pricer.model, pricer.job),
        *others,
        "" if is_reordered else _order(winner, pricer),
        _rules(advice),
    )
    return " ".join(sentence for sentence in sentences if sentence)


def _verdict(winner: Forecast, num_priced: int, pricer: Pricer) -> str:
    seconds, job, cluster = winner.step_time.total_s, pricer.job, pricer.cluster
    peak = cluster.device.peak_flops_per_s[winner.strategy.recipe.parameter]
    share = mfu(pricer.model, job, seconds, cluster.num_devices, peak)
    return (
        f"{winner.strategy.describe()} is the fastest that fits ({counted(num_priced, 'strategy', 'strategies')} "
        "priced, the rest ruled out by lower bounds): "
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
    """Where the seconds go, on the mean rank; the largest term beside the products themselves is what limits."""
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


def _imbalance(winner: Forecast, pricer: Pricer) -> str:
    """What uneven loads of the ranks of experts cost."""
    strategy, imbalance = winner.strategy, pricer.job.imbalance
    if imbalance == 1 or not pricer.model.num_experts:
        return ""
    if strategy.ep == 1:
        return "Every rank has all experts, so that the imbalance of their loads costs nothing."
    imbalance = imbalance_of(pricer.job, strategy, pricer.model)
    job = pricer.job.model_copy(update={"imbalance": 1.0})
    even = Pricer(pricer.model, pricer.cluster, job, pricer.stack).forecast(strategy)
    more_bytes = winner.memory.total_bytes - even.memory.total_bytes
    return (
        f"Of {strategy.ep} ranks that share experts the fullest is taken to get {imbalance:g} times the mean number "
        f"of rows: with even loads a step takes {format_time(even.step_time.total_s)}, and {format_bytes(more_bytes)} "
        "less."
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


def _alternatives(winner: Forecast, search: Search) -> Iterator[str]:
    for alternative in ALTERNATIVES:

        def is_like(strategy: Strategy, is_like: Callable[[Strategy, Strategy], bool] = alternative.is_like) -> bool:
            return is_like(strategy, winner.strategy)

        best = next(search.fastest(is_like), None)
        if best is not None:
            other = in_order_of(winner.strategy, best, search.pricer, search.musts)
            best = other if is_like(other.strategy) else best
            yield f"{_capital(alternative.name)}, {_against(winner, best, search.pricer)}."
            continue
        closest = next(search.smallest(is_like), None)
        barred = [refusal for refusal in search.refused if is_like(refusal.strategy)]
        if closest is not None:
            name = closest.strategy.describe()
            yield f"{_capital(alternative.name)}, nothing fits: the closest, {name}, {closest.limit}."
        elif barred:
            yield f"{_capital(alternative.name)} is refused: {barred[0].reason}."


def _against(winner: Forecast, best: Forecast, pricer: Pricer) -> str:
    slower = best.step_time.total_s / winner.step_time.total_s - 1
    name = best.strategy.describe()
    if slower < 0.0005:
        extra = best.memory.total_bytes - winner.memory.total_bytes
        how = "more" if extra > 0 else "less"
        return f"{name} is as fast and holds {format_bytes(abs(extra))} {how}" if extra else f"{name} is its equal"
    cause = _largest_increase(pricer.terms(winner), pricer.terms(best))
    return f"{name} is {slower:.1%} slower, mostly for {cause.name} (+{format_time(cause.seconds)})"


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
