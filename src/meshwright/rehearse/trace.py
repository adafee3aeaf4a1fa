"""A rehearsed step as a file for ui.perfetto.dev: per role its actions, collectives, messages and activations.

Nothing was computed, so times are forecasts: actions stand where the clock has them, calls follow one another from the
start of the action that makes them, each as long as the cost model says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meshwright.core.axes import PP
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.cost.network import route
from meshwright.planner.price import Pricer, is_long
from meshwright.rehearse.journal import Call, Entry
from meshwright.rehearse.roles import Role
from meshwright.schedule.timeline import Event

ACTIONS, COLLECTIVES, MESSAGES = range(3)
_TRACKS = {ACTIONS: "actions", COLLECTIVES: "collectives", MESSAGES: "messages"}

Span = tuple[Entry, float, float]
"""An entry, when it starts and when it ends: seconds from the start of the step."""


def trace(plan: Plan, rehearsed: Iterable[tuple[Role, Sequence[Entry]]]) -> dict[str, Any]:
    """The Chrome trace format, which Perfetto reads: one process per role."""
    pricer = Pricer(plan.model, plan.cluster, plan.job)
    events: list[dict[str, Any]] = []
    for role, entries in rehearsed:
        events += _names(role)
        for entry, start_s, end_s in _spans(plan, pricer, role, entries):
            events += _shown(plan, role, entry, start_s, end_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(role: Role) -> Iterator[dict[str, Any]]:
    like_it = f" and {role.num_ranks - 1:,} like it" if role.num_ranks > 1 else ""
    at = " ".join(f"{axis}={index}" for axis, index in role.coordinates.items())
    yield _meta(role.rank, "process_name", f"rank {role.rank}{like_it} ({at})")
    for track, name in _TRACKS.items():
        yield {**_meta(role.rank, "thread_name", name), "tid": track}


def _meta(rank: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "args": {"name": name}}


def _spans(plan: Plan, pricer: Pricer, role: Role, entries: Sequence[Entry]) -> Iterator[Span]:
    """Each entry in time; those that are no action take what their calls take."""
    actions = [entry.action for entry in entries if entry.action is not None]
    clocked = iter(_events(plan, pricer, role, actions))
    now_s = 0.0
    for entry in entries:
        if entry.action is not None:
            event = next(clocked)
            yield entry, event.start_s, event.end_s
            now_s = max(now_s, event.end_s)
            continue
        end_s = now_s + sum(_call_s(plan, call) for call in entry.calls)
        yield entry, now_s, end_s
        now_s = end_s


def _events(plan: Plan, pricer: Pricer, role: Role, actions: Sequence[Action]) -> Sequence[Event]:
    """As the clock has them; one after the other where a timetable is too long, or has no end."""
    if not plan.strategy.pipeline_schedule.is_asynchronous and not is_long(plan.strategy):
        row = pricer.timeline(plan.strategy).events[role.coordinates[PP]]
        if [event.action for event in row] == list(actions):
            return row
    costs, events, now_s = pricer.step_costs(plan.strategy), [], 0.0
    for action in actions:
        end_s = now_s + costs.duration_s(action.kind, action.stage)
        events.append(Event(now_s, end_s, action))
        now_s = end_s
    return events


def _call_s(plan: Plan, call: Call) -> float:
    return route(call.axis, plan.model, plan.strategy, plan.cluster).seconds(call.primitive, call.payload_bytes)


def _shown(plan: Plan, role: Role, entry: Entry, start_s: float, end_s: float) -> Iterator[dict[str, Any]]:
    if entry.action is not None:
        yield _slice(role, ACTIONS, str(entry.action), start_s, end_s, {"in words": entry.action.words})
    now_s = start_s
    for call in entry.calls:
        call_end_s = now_s + _call_s(plan, call)
        track = MESSAGES if call.primitive == "send" else COLLECTIVES
        what = {"phase": call.phase, "payload_bytes": call.payload_bytes, "ranks": call.size}
        yield _slice(role, track, f"{call.primitive} {call.axis}", now_s, call_end_s, what)
        now_s = call_end_s
    kept = {"bytes": entry.kept_bytes}
    yield {"ph": "C", "name": "activations", "pid": role.rank, "ts": end_s * 1e6, "args": kept}


def _slice(role: Role, track: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "name": name, "pid": role.rank, "tid": track, **times, "args": args}
