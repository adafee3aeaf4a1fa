"""A server in its steady state: how long requests wait and run when they arrive at a constant rate.

All requests have equally many tokens, P of prompt and O of answer, and arrive independently of each other (Poisson), λ
per second at each replica. The engine runs step after step; a step computes one token of each of B sequences that
decode and at most c = step_tokens − B tokens of prompts. Given B, everything else follows, f(B, x) being the seconds of
a step with x tokens of prompts:

    Little's law       B = λ·(O − 1)·t, with t the mean length of a step
    B < (O − 1)/n      a prompt takes n = ⌈P/c⌉ steps of length t₁ = f(B, P/n), the others take t₀ = f(B, 0):
                       1/t = λ·n + (1 − λ·n·t₁)/t₀, so that λ = (B/t₀) / (O − 1 + B·n·(t₁/t₀ − 1))
    else               every step computes prompts, x = B·P/(O − 1) tokens of them, and t = f(B, x)
    first token        what is left of the step that runs, the wait of an M/D/1 queue for prompts, ρ·S / (2·(1 − ρ))
                       with S = P·f(B, c)/c and ρ = λ·S, and n steps of t₁
    between tokens     t

Means, not percentiles. Nothing is shared between prompts and nobody ends early: both make a real server faster.
Sources: Little 1961; Pollaczek 1930 and Khinchine 1932 (M/D/1); Agrawal et al. 2024 (prompts in chunks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from meshwright.core.serving import Requests
from meshwright.cost.serving import StepCosts, Work

MAX_PROMPT_SHARE = 0.9
"""ρ, above which nothing is planned: the queue of prompts, in the mean ρ/(2·(1 − ρ)) of them, grows without end."""
ALONE = 1e-6
"""B of a server that answers one request at a time, and rarely."""
PRECISION = 5e-4
"""Relative, of B."""

PROMPTS = f"prompts take {MAX_PROMPT_SHARE:.0%} of what steps can compute"
SEQUENCES = "as many sequences run as may (max_running)"
CACHE = "the key/value cache is full"
TTFT = "the time to the first token reaches its limit"
TPOT = "the time between tokens reaches its limit"


@dataclass(frozen=True, slots=True)
class Load:
    """One replica at a rate."""

    rate_per_s: float
    """Requests."""
    decoding: Work
    """A step without prompts."""
    mixed: Work
    """A step with a chunk of a prompt."""
    mixed_share: float
    """Of all steps, that have one."""
    num_running: float
    """Sequences that decode or compute their prompt."""
    prompt_share: float
    """ρ: of what steps can compute of prompts, that comes."""
    ttft_s: float
    """Mean time to the first token."""
    tpot_s: float
    """Mean time between tokens of one answer."""


def load(costs: StepCosts, requests: Requests, batch: float) -> Load | None:
    """What one replica does while so many sequences decode; None where prompts come faster than steps take them.

    Args:
        costs: prices its steps.
        requests: their lengths; rate and limits do not count.
        batch: B. Where answers have one token nobody decodes: then the share of the time in which steps run.
    """
    decoded, prompt = requests.output_tokens - 1, requests.prompt_tokens
    running = batch if decoded else 0.0
    chunk = float(costs.layout.step_tokens - int(running))
    num_chunks = ceil(prompt / chunk) if chunk >= 1 else 0
    if not num_chunks:
        return None
    tokens = prompt / num_chunks
    if decoded and batch * num_chunks >= decoded:
        tokens = batch * prompt / decoded
        if tokens > chunk:
            return None
    decoding, mixed = _work(requests, running, 0.0), _work(requests, running, tokens)
    decoding_s, mixed_s = costs.step_s(decoding), costs.step_s(mixed)
    if not decoded:
        rate, mean_s = batch / (num_chunks * mixed_s), mixed_s
    elif batch * num_chunks < decoded:
        rate = batch / decoding_s / (decoded + batch * num_chunks * (mixed_s / decoding_s - 1))
        mean_s = batch / (rate * decoded)
    else:
        rate, mean_s = batch / (decoded * mixed_s), mixed_s
    num_steps = max(1.0, prompt / tokens)
    service_s = prompt * costs.step_s(_work(requests, running, chunk)) / chunk
    prefill_s = num_steps * mixed_s
    busy = min(1.0, running + rate * prefill_s)
    share = rate * service_s
    queue_s = share * service_s / (2 * (1 - share)) if share < 1 else float("inf")
    return Load(
        rate_per_s=rate,
        decoding=decoding,
        mixed=mixed,
        mixed_share=min(1.0, rate * num_steps * mean_s),
        num_running=running + rate * prefill_s,
        prompt_share=share,
        ttft_s=busy * mean_s / 2 + queue_s + prefill_s,
        tpot_s=mean_s,
    )


def longest_step_s(costs: StepCosts, requests: Requests, found: Load) -> float:
    """The longest time between tokens: a step with a whole chunk of prompts, or a whole prompt."""
    running = found.decoding.num_decoding
    chunk = costs.layout.step_tokens - running
    return costs.step_s(_work(requests, running, min(chunk, max(requests.prompt_tokens, found.mixed.num_prompt))))


def _work(requests: Requests, batch: float, tokens: float) -> Work:
    """A step with so many tokens of prompts, each of which is in the mean half computed. A step that decodes has at
    least one sequence, also where there are fewer in the mean."""
    decoding = batch if tokens or not batch else max(1.0, batch)
    ends = tokens / requests.prompt_tokens
    context = requests.prompt_tokens + requests.output_tokens / 2
    return Work(decoding, context, tokens, (requests.prompt_tokens + 1) / 2 if tokens else 0.0, decoding + ends)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that one replica answers within the limits."""

    load: Load
    limit: str
    """What ends it there."""


def capacity(costs: StepCosts, requests: Requests, max_batch: int, precision: float = PRECISION) -> Capacity | str:
    """What is in the way where not even one request at a time is answered within the limits.

    Args:
        costs: prices the replica's steps.
        requests: their lengths and limits; their rate does not count.
        max_batch: sequences that the cache holds whole.
        precision: relative, of B.
    """
    most = float(min(costs.layout.max_running, max_batch)) if requests.output_tokens > 1 else 1.0

    def fault(found: Load | None) -> str | None:
        return _fault(found, requests, costs.layout.max_running, max_batch)

    low, high = ALONE, most
    if (limit := fault(load(costs, requests, low))) is not None:
        return limit
    if (limit := fault(load(costs, requests, high))) is None:
        low, limit = high, _full(costs.layout.max_running, max_batch)
    while high - low > precision * high:
        middle = (low + high) / 2
        if (found := fault(load(costs, requests, middle))) is None:
            low = middle
        else:
            high, limit = middle, found
    best = load(costs, requests, low)
    assert best is not None
    return Capacity(best, limit)


def _fault(found: Load | None, requests: Requests, max_running: int, max_batch: int) -> str | None:
    """Which limit a load breaks."""
    if found is None or found.prompt_share > MAX_PROMPT_SHARE:
        return PROMPTS
    if found.num_running > min(max_running, max_batch):
        return _full(max_running, max_batch)
    if requests.max_tpot_s is not None and requests.output_tokens > 1 and found.tpot_s > requests.max_tpot_s:
        return TPOT
    if requests.max_ttft_s is not None and found.ttft_s > requests.max_ttft_s:
        return TTFT
    return None


def _full(max_running: int, max_batch: int) -> str:
    return CACHE if max_batch <= max_running else SEQUENCES


def load_at(costs: StepCosts, requests: Requests, rate_per_s: float, most: Load) -> Load:
    """The load of a replica at a rate below that of `most`, its capacity."""
    decodes = requests.output_tokens > 1
    upper = most.decoding.num_decoding if decodes else 1.0
    return _bisect(lambda batch: load(costs, requests, batch), rate_per_s, max(upper, ALONE))


def _bisect(at: Callable[[float], Load | None], rate_per_s: float, upper: float) -> Load:
    low, high = ALONE * 1e-3, upper
    best = at(low)
    assert best is not None
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        found = at(middle)
        if found is not None and found.rate_per_s <= rate_per_s:
            low, best = middle, found
        else:
            high = middle
    return best
