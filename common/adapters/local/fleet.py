"""Machines that are local processes (`common.ports.machines.Fleet`): a spot market in a box.

    claim ──▶ process, tagged ──▶ told to leave ──▶ SIGKILL ──▶ gone
      │                           released: SIGTERM, and time to finish
      └──▶ refused                preempted: SIGTERM and as much notice as the market gives, or none

What was launched survives whoever launched it: machines are found in the table of processes, by a
variable of their environment, and what must be remembered of them is in files. So any number of
fleets may stand on one directory, in several processes, and a token still launches once.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Protocol

from common.adapters.local.records import Claim, Gone, Leaving, Records, Refusal
from common.adapters.local.table import Table, ask_to_end, end
from common.errors import OutsideError
from common.ports.machines import Machine, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from common.adapters.local.market import Weather
    from common.adapters.local.records import Story
    from common.adapters.local.table import Found
    from common.config.market_file import Market
    from common.ports.machines import LaunchOrder

_APPEAR_S = 10.0  # from a claim to its process: milliseconds, unless who claimed it was killed
_LATELY_S = 3600.0  # so long are machines named that ended, as EC2 does
_LOOK_S = 0.5  # longest time between two looks at what runs: an end is billed so exactly
_SOON_S = 0.05  # likewise while one is ending


class Started(Protocol):
    """A process that we started: our child, whose exit code only we are told."""

    @property
    def exit_code(self) -> int | None:
        """How it ended, minus the signal that ended it; None while it runs."""
        ...

    def let_go(self) -> None:
        """Leave it to itself."""
        ...


class Start(Protocol):
    """How a machine is switched on."""

    def __call__(self, worker: str, environment: Mapping[str, str]) -> Started:
        """Start a worker in a session of its own, with these variables besides others.

        Raises:
            OSError: If there cannot be another process.
        """
        ...


class ProcessFleet:
    """Processes with a job's tag, under one directory.

    A thread of its own takes machines away in time, from the first call until `close`.

    Args:
        market: Its pools, and the notice that it gives.
        job: Its name.
        directory: Absolute; one folder in it is the job's.
        weather: When spot machines are taken away.
        start: How one is switched on.
        leave_s: Longest time between a release and the end.
        clock: Seconds since 1970.

    Raises:
        UnavailableError: If the directory cannot be used.
    """

    def __init__(
        self,
        market: Market,
        job: str,
        directory: Path,
        weather: Weather,
        start: Start,
        leave_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._spot = {pool.name: pool for pool in market.spot}
        self._pools = {market.on_demand.name, *self._spot}
        self._notice_s = market.process.notice_s
        self._weather, self._start, self._leave_s = weather, start, leave_s
        self._clock = clock
        self._records = Records(directory / job / "machines")
        self._table = Table(job, directory)
        self._born_s = self._records.born_s(clock())
        self._children: dict[str, Started] = {}  # by token
        self._seen_s: dict[str, float] = {}  # when each that runs was last looked at
        self._due_s = math.inf  # when the next of them is to be taken away, or further
        self._turn = threading.Condition()  # one thread at a time looks and acts
        self._watch: threading.Thread | None = None
        self._closed = False

    def launch(self, orders: Sequence[LaunchOrder]) -> tuple[Refused, ...]:
        """Start a process for each order that nobody has claimed; the others change nothing.

        Raises:
            UnavailableError: If the directory cannot be used.
        """
        with self._acting() as now:
            return tuple(filter(None, [self._order(order, now) for order in orders]))

    def release(self, machines: Sequence[str]) -> None:
        """Tell machines to leave, by SIGTERM; after some time they are made to.

        Raises:
            UnavailableError: If the directory cannot be used.
        """
        with self._acting() as now:
            self._look(now)
            found, stories = self._table.find(), self._records.read()
            for token in machines:
                if token in stories and not stories[token].over:
                    leaving = Leaving("released", now + self._leave_s)
                    if self._records.add(token, leaving) and token in found:
                        ask_to_end(found[token].process)

    def machines(self) -> tuple[Machine, ...]:
        """All that run, and those that ended within the hour, by launch.

        Raises:
            UnavailableError: If the directory cannot be used.
        """
        with self._acting() as now:
            running = self._look(now)
            stories = self._records.read()
        named = [
            _machine(token, story)
            for token, story in stories.items()
            if (token in running and not story.over)
            or (story.gone is not None and story.gone.at_s > now - _LATELY_S)
        ]
        return tuple(sorted(named, key=lambda machine: (machine.launch, machine.id)))

    def close(self) -> None:
        """Take nothing away any more; the machines stay."""
        with self._turn:
            self._closed = True
            self._turn.notify()
        if self._watch is not None:
            self._watch.join()
        for child in self._children.values():
            child.let_go()

    @contextlib.contextmanager
    def _acting(self) -> Iterator[float]:
        with self._turn:
            if self._watch is None:
                self._watch = threading.Thread(target=self._take_away, name="fleet", daemon=True)
                self._watch.start()
            yield self._clock()
            self._turn.notify()  # what was launched or told to leave may be due before all else

    def _take_away(self) -> None:
        """Let machines go when their time has come, without waiting to be asked."""
        with self._turn:
            while not self._closed:
                self._due_s = math.inf
                with contextlib.suppress(OutsideError):  # whoever calls hears of it
                    self._look(self._clock())
                wait_s = self._due_s - self._clock()
                self._turn.wait(min(max(wait_s, _SOON_S), _LOOK_S))

    def _order(self, order: LaunchOrder, now: float) -> Refused | None:
        stories = self._records.read()
        if order.token in stories:
            told = stories[order.token].refusal
            return None if told is None else Refused(order.launch, told.capacity, told.reason)
        claim = Claim(order.launch, order.slot, order.pool, order.worker, now)
        if not self._records.add(order.token, claim):  # somebody else was faster
            return None
        refusal = self._refusal(order, stories.values(), now)
        if refusal is None:
            try:
                child = self._start(order.worker, self._table.environment(order))
            except OSError as error:
                refusal = Refusal(capacity=True, reason=f"there is no room for a process: {error}")
            else:
                self._children[order.token] = child
                return None
        self._records.add(order.token, refusal)
        return Refused(order.launch, refusal.capacity, refusal.reason)

    def _refusal(self, order: LaunchOrder, stories: Iterable[Story], now: float) -> Refusal | None:
        if order.pool not in self._pools:
            return Refusal(capacity=False, reason=f"the market has no pool {order.pool!r}")
        if order.pool not in self._spot:
            return None
        if self._down_s(order.slot, now) <= now:
            reason = f"pool {order.pool!r} has no machine for slot {order.slot} just now"
            return Refusal(capacity=True, reason=reason)
        there = [not story.over and story.claim.pool == order.pool for story in stories]
        capacity = self._spot[order.pool].capacity
        if capacity is not None and sum(there) >= capacity:
            reason = f"pool {order.pool!r} has {capacity} machines, and they are taken"
            return Refusal(capacity=True, reason=reason)
        return None

    def _look(self, now: float) -> set[str]:
        """See what runs, by token, and what has ended; take away what is due."""
        found = self._table.find()
        stories = self._records.read()
        running = set[str]()
        for token, machine in found.items():
            if token not in stories:  # the folder was emptied while it ran
                self._records.add(token, machine.claim)
            elif stories[token].over:  # a ghost: it appeared after it was given up
                end(machine.process)
            else:
                running.add(token)
                self._urge(token, stories[token], machine, now)
        for token, story in stories.items():
            if token not in found and not story.over:
                child = self._children.get(token)
                if child is not None and child.exit_code is None:
                    running.add(token)  # it was started since we looked for it
                else:
                    self._miss(token, story, child, now)
        return running

    def _urge(self, token: str, story: Story, machine: Found, now: float) -> None:
        """Take a machine away if that is due, or see when it will be."""
        # Nobody takes away what fell due while no fleet stood here, as if there had been no outage.
        ours = token in self._children
        since_s = self._seen_s.get(token, story.claim.at_s if ours else now)
        self._seen_s[token] = now
        leaving = story.leaving
        if leaving is None and story.claim.pool in self._spot:
            down_s = self._down_s(story.claim.slot, since_s)
            if down_s > now:
                self._due_s = min(self._due_s, down_s)
                return
            leaving = Leaving("preempted", now + self._notice_s)
            if self._records.add(token, leaving) and self._notice_s > 0:
                ask_to_end(machine.process)
        if leaving is not None and leaving.until_s <= now:
            end(machine.process)
        if leaving is not None:
            self._due_s = min(self._due_s, leaving.until_s)

    def _miss(self, token: str, story: Story, child: Started | None, now: float) -> None:
        """Write down that a machine has ended, once it cannot appear any more."""
        # Only what runs is told to leave: whoever wrote that has seen it.
        seen = child is not None or token in self._seen_s or story.leaving is not None
        if not seen and now - story.claim.at_s < _APPEAR_S:
            return
        if child is not None:
            detail = f"exit code {child.exit_code}"
        else:
            detail = "nobody saw how it ended" if seen else "it never appeared"
        cause = story.leaving.cause if story.leaving is not None else "failed"
        self._records.add(token, Gone(now, cause, detail))
        self._children.pop(token, None)
        self._seen_s.pop(token, None)

    def _down_s(self, slot: int, at_s: float) -> float:
        return self._born_s + self._weather.next_down_s(slot, max(at_s - self._born_s, 0.0))


def _machine(token: str, story: Story) -> Machine:
    claim = story.claim
    running = Machine(
        id=token,
        launch=claim.launch,
        slot=claim.slot,
        pool=claim.pool,
        worker=claim.worker,
        state="running",
        started_s=claim.at_s,
    )
    if story.gone is None:
        return running
    at_s, cause, detail = story.gone.at_s, story.gone.cause, story.gone.detail
    return running._replace(state="ended", ended_s=at_s, cause=cause, detail=detail)
