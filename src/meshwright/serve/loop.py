"""Engines in threads of their own, between requests that come and clients that wait.

    event loop of the server ──commands──▶ engine thread: step, step, ... ──events, one hand-over per step──▶ mailboxes
             │                             (one of each replica, or of those that share experts)
             └─ a request goes to the replica with the least to compute, among equals to the longest cached prefix

A lost rank, or any other failure of a step, ends all threads: every open request is told at once, and later ones are
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


Delivery = tuple["Ticket", Event] | EngineFailure


class Mailbox:
    """What came for one reader, on the event loop: all of a step at once, and one wake-up for it."""

    def __init__(self) -> None:
        self._came: list[Delivery] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, delivery: Delivery) -> None:
        """For the reader."""
        self._came.append(delivery)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[Delivery]:
        """All that has come, in order; waits for the first."""
        if not self._came:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        came, self._came = self._came, []
        return came


@dataclass(slots=True, eq=False)
class Ticket:
    """One prompt of a client's request: its sequences' events come into the mailbox."""

    num_open: int
    """Sequences that have not ended."""
    driver: _Driver
    """Whose thread answers it."""
    engine: Engine
    """Of the replica that does."""
    mailbox: Mailbox
    num_prompt: int = 0
    """Tokens of all its prompts."""
    sequences: list[Sequence] = field(default_factory=list)
    is_cancelled: bool = False

    def index(self, sequence: Sequence) -> int:
        """Which of the request's answers an event is of."""
        return self.sequences.index(sequence)

    @property
    def num_left(self) -> int:
        """Tokens that are known and not computed yet."""
        open_ones = [sequence for sequence in self.sequences if sequence.finish is None]
        return sum(sequence.num_left for sequence in open_ones) if self.sequences else self.num_prompt


class EngineLoop:
    """Runs an engine, and those of its other replicas, until it is stopped or one fails.

    Args:
        engine: of this process; of several ranks, rank 0's.
        watch: called in an engine's thread after each step, with its events and how many tokens it computed; and
            for sequences that nobody wants any more.
        on_failure: called on the event loop when an engine has failed.
    """

    def __init__(
        self,
        engine: Engine,
        watch: Callable[[Ordered[Event], int], None] = lambda events, num_tokens: None,
        on_failure: Callable[[EngineFailure], None] = lambda failure: None,
    ) -> None:
        self.engine = engine
        self.failure: EngineFailure | None = None
        self._on_failure = on_failure
        self._open: set[Ticket] = set()
        """Of clients that wait; the event loop's."""
        self._loop: asyncio.AbstractEventLoop | None = None
        together, replicas = engine.num_sharing, engine.replicas
        groups = [replicas[at : at + together] for at in range(0, len(replicas), together)]
        self._drivers = [_Driver(group, watch, self._hand_over, self._fail) for group in groups]
        self._driver_of = {each: driver for driver in self._drivers for each in driver.engines}

    def start(self) -> None:
        """Begin, from the event loop that the events are for."""
        self._loop = asyncio.get_running_loop()
        for driver in self._drivers:
            driver.start()

    async def stop(self) -> None:
        """End after the steps that run; the ranks that follow end too."""
        for driver in self._drivers:
            driver.end()
        for driver in self._drivers:
            await asyncio.to_thread(driver.join)

    def submit(
        self,
        prompt: Ordered[int],
        params: SamplingParams,
        priority: int = 0,
        timeout_s: float | None = None,
        matchers: Callable[[], object] | None = None,
        mailbox: Mailbox | None = None,
    ) -> Ticket:
        """Hand a request over. As :meth:`Engine.submit`; what happens to it comes into the mailbox, or one of its own.

        Raises:
            InputError: a request that could never be answered.
            EngineFailure: an engine has failed.
        """
        if self.failure is not None:
            raise self.failure
        self.engine.check(prompt, params)
        engine = self._engine_for(prompt)
        driver = self._driver_of[engine]
        ticket = Ticket(params.n, driver, engine, mailbox or Mailbox(), len(prompt) * params.n)
        self._open.add(ticket)

        def command() -> None:
            if ticket.is_cancelled:
                return
            made = engine.enqueue(prompt, params, priority=priority, timeout_s=timeout_s, matchers=matchers)
            ticket.sequences = made
            driver.tickets.update(dict.fromkeys(made, ticket))

        driver.ask(command)
        return ticket

    def _engine_for(self, prompt: Ordered[int]) -> Engine:
        """The least to compute, in whole steps: a smaller difference is none; then the longest cached prefix."""
        if len(self.engine.replicas) == 1:
            return self.engine
        left = dict.fromkeys(self.engine.replicas, 0)
        for ticket in self._open:
            left[ticket.engine] += ticket.num_left
        step = self.engine.options.step_tokens
        least = min(left.values()) // step
        equals = [engine for engine in self.engine.replicas if left[engine] // step == least]
        cached = {engine: len(engine.scheduler.blocks.match(prompt)[0]) for engine in equals}
        return min(equals, key=lambda engine: (-cached[engine], left[engine]))

    def check_room(self, count: int) -> None:
        """Raises InputError where so many more sequences would make the queue too long."""
        most, num_open = self.engine.options.max_waiting, sum(ticket.num_open for ticket in self._open)
        waiting = max(0, num_open - sum(len(engine.scheduler.running) for engine in self.engine.replicas))
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
        ticket.driver.ask(lambda: ticket.driver.cancel(ticket))

    # --- called in the engines' threads --------------------------------------------------------------------

    def _hand_over(self, pairs: Ordered[tuple[Ticket, Event]]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, pairs)

    def _deliver(self, pairs: Ordered[tuple[Ticket, Event]]) -> None:
        for ticket, event in pairs:
            ticket.num_open -= event.finish is not None
            if not ticket.num_open:
                self._open.discard(ticket)
            ticket.mailbox.put((ticket, event))

    def _fail(self, failed: _Driver, failure: EngineFailure) -> None:
        """The first failure is what all are told; the other replicas end too."""
        self.failure = self.failure or failure

        def tell() -> None:
            for ticket in self._open:
                ticket.mailbox.put(failure)
            self._on_failure(failure)

        for driver in self._drivers:
            if driver is not failed:
                driver.end()
        if self._loop is not None and self.failure is failure:
            self._loop.call_soon_threadsafe(tell)


class _Driver:
    """One engine in its thread, or several that step together.

    Args:
        engines: of one replica each.
        watch: as of :class:`EngineLoop`.
        hand_over: takes a step's events that somebody waits for.
        on_failure: takes what ended it, and itself.
    """

    def __init__(
        self,
        engines: Ordered[Engine],
        watch: Callable[[Ordered[Event], int], None],
        hand_over: Callable[[Ordered[tuple[Ticket, Event]]], None],
        on_failure: Callable[[_Driver, EngineFailure], None],
    ) -> None:
        self.engines = engines
        self.tickets: dict[Sequence, Ticket] = {}
        self._ready: list[tuple[Ticket, Event]] = []
        """What the last step brought, until the event loop has it."""
        self._watch = watch
        self._hand_over, self._on_failure = hand_over, on_failure
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """Begin no further step."""
        self._commands.put(None)

    def join(self) -> None:
        """Return when it has ended."""
        self._thread.join()

    def ask(self, command: Callable[[], None]) -> None:
        """Call it in the thread, between two steps."""
        self._commands.put(command)

    def cancel(self, ticket: Ticket) -> None:
        """In the thread: nobody wants these answers any more."""
        for sequence in ticket.sequences:
            if sequence.finish is None:
                ticket.engine.cancel(sequence)
                self._watch([Event(sequence, finish="abort")], 0)
            self.tickets.pop(sequence, None)

    def _run(self) -> None:
        """What a step brought is handed over just before the next one computes: the event loop works while this thread
        needs no interpreter."""
        try:
            while self._obey():
                busy = [engine for engine in self.engines if not engine.is_idle]
                for engine in busy:
                    engine.begin_step()
                self._tell()
                for engine in busy:
                    events = engine.end_step()
                    self._watch(events, engine.last_step_tokens)
                    self._gather(events)
                if all(engine.is_idle for engine in self.engines):
                    self._tell()
            self._tell()
            for engine in self.engines:
                engine.stop()
        except Exception as error:
            what = str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"
            self._on_failure(self, EngineFailure(f"the engine has failed: {' '.join(what.split())}"))

    def _obey(self) -> bool:
        """Carry out what was asked for; wait where there is nothing else to do. False: it is to end."""
        wait = all(engine.is_idle for engine in self.engines)
        while True:
            try:
                command = self._commands.get(timeout=BEAT_S) if wait else self._commands.get_nowait()
            except Empty:
                if wait:
                    for engine in self.engines:
                        engine.beat()
                return True
            if command is None:
                return False
            command()
            wait = False

    def _gather(self, events: Ordered[Event]) -> None:
        for event in events:
            ticket = self.tickets.get(event.sequence)
            if ticket is not None:
                self._ready.append((ticket, event))
                if event.finish is not None:
                    del self.tickets[event.sequence]

    def _tell(self) -> None:
        pairs, self._ready = self._ready, []
        if pairs:
            self._hand_over(pairs)
