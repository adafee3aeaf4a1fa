"""Closed forms of the schedules on equal stages, transfers free: for ranking strategies without a clock.

p stages, m micro-batches, seconds F and B per stage and micro-batch.

| schedule | makespan | bubble, share of makespan | peak live on rank r |
| --- | --- | --- | --- |
| naive | m·p·(F+B) | (p−1)/p | 1 |
| gpipe | (m+p−1)·(F+B) | (p−1)/(m+p−1) | m |
| 1f1b | (m+p−1)·(F+B) | (p−1)/(m+p−1) | min(p−r, m) |

Sources: Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2021 (SC21), section 2.2, whose "bubble" is the share
of ideal time, (p−1)/m.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class _Form:
    num_slots: Callable[[int, int], int]
    """(p, m) → makespan in units of F+B."""
    peak: Callable[[int, int, int], int]
    """(p, m, rank) → live micro-batches."""


_FORMS = {
    "naive": _Form(lambda p, m: m * p, lambda p, m, rank: 1),
    "gpipe": _Form(lambda p, m: m + p - 1, lambda p, m, rank: m),
    "1f1b": _Form(lambda p, m: m + p - 1, lambda p, m, rank: min(p - rank, m)),
}

SCHEDULES = _FORMS.keys()
"""Schedules that have closed forms."""


def makespan_s(name: str, num_stages: int, num_micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Seconds of one step's table. `forward_s`, `backward_s`: one stage, one micro-batch."""
    return _form(name).num_slots(num_stages, num_micro_batches) * (forward_s + backward_s)


def bubble_fraction(name: str, num_stages: int, num_micro_batches: int) -> float:
    """Idle share of the makespan."""
    slots = _form(name).num_slots(num_stages, num_micro_batches)
    return (slots - num_micro_batches) / slots


def bubble_of_ideal(name: str, num_stages: int, num_micro_batches: int) -> float:
    """Idle time relative to the ideal time m·(F+B): (p−1)/m for gpipe and 1f1b."""
    return (_form(name).num_slots(num_stages, num_micro_batches) - num_micro_batches) / num_micro_batches


def peak_live(name: str, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations rank r holds at once, per rank."""
    form = _form(name)
    return tuple(form.peak(num_stages, num_micro_batches, rank) for rank in range(num_stages))


def _form(name: str) -> _Form:
    """Raises UnsupportedError for a schedule without closed forms; the clock times any."""
    if name not in _FORMS:
        raise UnsupportedError(f"schedule `{name}` has no closed form ({', '.join(_FORMS)} have); simulate it instead")
    return _FORMS[name]
