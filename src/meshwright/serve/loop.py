"""The engine in a thread of its own, between requests that come and clients that wait.

    event loop of the server ──commands──▶ engine thread: step, step, ... ──events, one hand-over per step──▶ tickets

A lost rank, or any other failure of a step, ends the thread: every open request is told at once, and later ones are
refused.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.units import counted
from meshwright.serve.engine import Engine, Event
from meshwright.serve.request import SamplingParams, Sequence

BEAT_S = 0.5
"""How often ranks that follow get a sign of life while there is nothing to do."""


class EngineFailure(MeshwrightError):
    """The engine has ended by a failure; no request can be answered any more."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request of a client: its sequences' events come through `events`."""

    num_open: int
    """Sequences that have not ended."""
    events: asyncio.Queue[Event | EngineFailure] = field(default_factory=asyncio.Queue)
    sequences: list[Sequence] = field(default_factory=list)
    is_cancelled: bool = False

    def index(self, sequence: Sequence) -> int:
        """Which of the request's answers an event is of."""
        return self.sequences.index(sequence)


class EngineLoop:
    """Runs an engine until it is stopped or fails.

    Args:
        engine: of this process; of several ranks, rank 0's.
        watch: called in the engine's thread after each step, with its events and how many tokens it computed; and
            for sequences that nobody wants any more.
        on_failure: called on the event loop when the engine has failed.
    """

    def __init__(
        self,
        engine: Engine,
        watch: Callable[[Ordered[Event], int], None] = lambda events, num_tokens: None,
        on_failure: Callable[[EngineFailure], None] = lambda failure: None,
    ) -> None:
        self.engine = engine
        self.failure: EngineFailure | None = None
        self._watch = watch
        self._on_failure = on_failure
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._tickets: dict[Sequence, Ticket] = {}
        self._open: set[Ticket] = set()
        """Of clients that wait; the event loop's."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin, from the event loop that the events are for."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End after the step that runs; the ranks that follow end too."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def submit(
        self,
        prompt: Ordered[int],
        params: SamplingParams,
        priority: int = 0,
        timeout_s: float | None = None,
        matchers: Callable[[], object] | None = None,
    ) -> Ticket:
        """Hand a request over. As :meth:`Engine.submit`.

        Raises:
            InputError: a request that could never be answered.
            EngineFailure: the engine has failed.
        """
        if self.failure is not None:
            raise self.failure
        self.engine.check(prompt, params)
        ticket = Ticket(params.n)
        self._open.add(ticket)

        def command() -> None:
            if ticket.is_cancelled:
                return
            made = self.engine.enqueue(prompt, params, priority=priority, timeout_s=timeout_s, matchers=matchers)
            ticket.sequences = made
            self._tickets.update(dict.fromkeys(made, ticket))

        self._commands.put(command)
        return ticket

    def check_room(self, count: int) -> None:
        """Raises InputError where so many more sequences would make the queue too long."""
        most, num_open = self.engine.options.max_waiting, sum(ticket.num_open for ticket in self._open)
        waiting = max(0, num_open - len(self.engine.scheduler.running))
        if waiting + count > most:
            raise InputError(
                f"{counted(waiting, 'sequence waits', 'sequences wait')} already, and {most} may: there is no room for "
                f"{count} more; try again later"
            )

    def cancel(self, ticket: Ticket) -> None:
        """The client is gone, or has all that it wants."""
        if ticket.is_cancelled:
            return
        ticket.is_cancelled = True
        self._open.discard(ticket)

        def command() -> None:
            for sequence in ticket.sequences:
                if sequence.finish is None:
                    self.engine.cancel(sequence)
                    self._watch([Event(sequence, finish="abort")], 0)
                self._tickets.pop(sequence, None)

        self._commands.put(command)

    # --- the engine's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                if not self.engine.is_idle:
                    events = self.engine.step()
                    self._watch(events, self.engine.last_step_tokens)
                    self._hand_over(events)
            self.engine.stop()
        except Exception as error:
            what = str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"
            self._fail(EngineFailure(f"the engine has failed: {' '.join(what.split())}"))

    def _obey(self) -> bool:
        """Carry out what was asked for; wait where there is nothing else to do. False: it is to end."""
        wait = self.engine.is_idle
        while True:
            try:
                command = self._commands.get(timeout=BEAT_S) if wait else self._commands.get_nowait()
            except Empty:
                if wait:
                    self.engine.beat()
                return True
            if command is None:
                return False
            command()
            wait = False

    def _hand_over(self, events: Ordered[Event]) -> None:
        pairs = [(self._tickets[e.sequence], e) for e in events if e.sequence in self._tickets]
        for event in events:
            if event.finish is not None:
                self._tickets.pop(event.sequence, None)
        if pairs and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, pairs)

    def _deliver(self, pairs: Ordered[tuple[Ticket, Event]]) -> None:
        for ticket, event in pairs:
            ticket.num_open -= event.finish is not None
            if not ticket.num_open:
                self._open.discard(ticket)
            ticket.events.put_nowait(event)

    def _fail(self, failure: EngineFailure) -> None:
        self.failure = failure

        def tell() -> None:
            for ticket in self._open:
                ticket.events.put_nowait(failure)
            self._on_failure(failure)

        if self._loop is not None:
            self._loop.call_soon_threadsafe(tell)
