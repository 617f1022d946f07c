"""Many jobs on few threads do not affect each other."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from itertools import count
from math import inf
from queue import SimpleQueue
from time import monotonic

import pytest

from common.errors import CorruptError, UnavailableError
from common.runtime.faults import Patience
from common.runtime.supervisor import LONG_S, Actor, Make, PreviousFault, Supervised, Supervisor
from common.telemetry.logging import event_logger, line_formatter
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import Watchdogs
from common.telemetry.outages import SETTLED_S
from tests.fakes.clock import ManualClock

PATIENCE_S = 120.0
AT_ONCE = Patience(first_s=0.0, longest_s=0.0)


@dataclass
class _Script:
    """An actor with a script, which has one entry for each turn."""

    turns: SimpleQueue[float | BaseException | None] = field(default_factory=SimpleQueue)
    had: SimpleQueue[int] = field(default_factory=SimpleQueue)  # the number of each turn
    closed: threading.Event = field(default_factory=threading.Event)
    numbers: Iterator[int] = field(default_factory=count)

    def turn(self) -> float | None:
        self.had.put(next(self.numbers))
        turn = inf if self.turns.empty() else self.turns.get()
        if isinstance(turn, BaseException):
            raise turn
        return turn

    def close(self) -> None:
        self.closed.set()


class _House:
    """A supervisor, and everything that it reports."""

    def __init__(
        self,
        patience: Patience = AT_ONCE,
        threads: int = 2,
        clock: Callable[[], float] = monotonic,
        **more: float,
    ) -> None:
        self.watchdogs = Watchdogs()
        self.meters = ProcessMetrics("coordinator")
        self.lines = StringIO()
        logger = logging.getLogger("tests.supervisor")
        logger.handlers = [logging.StreamHandler(self.lines)]
        logger.handlers[0].setFormatter(line_formatter("json", {}, colours=False))
        logger.setLevel("INFO")
        logger.propagate = False
        metrics = self.meters
        log = event_logger("tests.supervisor")
        self.supervisor = Supervisor(
            metrics, self.watchdogs, log, threads=threads, patience=patience, clock=clock, **more
        )

    def logged(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.lines.getvalue().splitlines()]

    def count(self, name: str, **labels: str) -> float | None:
        return self.meters.registry.get_sample_value(name, labels)


class _Counts:
    """An actor that counts the numbers in its queue. It fails if two threads run turns at once."""

    def __init__(self, awaited: int) -> None:
        self.awaited = awaited
        self.numbers = SimpleQueue[int]()
        self.inside = threading.Lock()
        self.seen = 0
        self.done = threading.Event()

    def turn(self) -> float | None:
        assert self.inside.acquire(blocking=False), "two turns at once"
        while not self.numbers.empty():
            self.numbers.get()
            self.seen += 1
        if self.seen == self.awaited:
            self.done.set()
        self.inside.release()
        return inf

    def close(self) -> None:
        pass


@pytest.fixture(name="house")
def _house() -> Iterator[_House]:
    house = _House()
    yield house
    assert house.supervisor.close(PATIENCE_S)


def making(*actors: Actor, faults: SimpleQueue[PreviousFault | None] | None = None) -> Make:
    left = iter(actors)

    def make(_wake: object, fault: PreviousFault | None) -> Actor:
        if faults is not None:
            faults.put(fault)
        return next(left)

    return make


def turns(actor: _Script, number: int) -> None:
    """Wait until the actor has begun this number of turns."""
    for _ in range(number):
        actor.had.get(timeout=PATIENCE_S)


def test_job_has_a_turn_when_it_starts_and_when_it_is_woken(house: _House) -> None:
    actor = _Script()

    job = house.supervisor.begin("digits", making(actor))
    turns(actor, 1)
    job.wake()

    turns(actor, 1)


def test_job_has_a_turn_when_it_is_due(house: _House) -> None:
    actor = _Script()
    actor.turns.put(monotonic() + 0.01)
    actor.turns.put(monotonic() + 0.02)

    house.supervisor.begin("digits", making(actor))

    turns(actor, 3)


def test_job_that_is_over_is_closed_and_has_no_further_turn(house: _House) -> None:
    actor = _Script()
    actor.turns.put(None)

    job = house.supervisor.begin("digits", making(actor))

    assert job.ended.wait(PATIENCE_S)
    job.wake()
    assert actor.closed.is_set()
    assert actor.had.qsize() == 1


def test_ended_job_is_closed(house: _House) -> None:
    actor = _Script()
    job = house.supervisor.begin("digits", making(actor))
    turns(actor, 1)

    job.end()

    assert job.ended.wait(PATIENCE_S)
    assert actor.closed.is_set()


@pytest.mark.parametrize("error", [KeyError("x"), MemoryError(), SystemExit(3)])
def test_exception_replaces_only_its_own_actor(house: _House, error: BaseException) -> None:
    bad, after, innocent = _Script(), _Script(), _Script()
    bad.turns.put(error)
    faults = SimpleQueue[PreviousFault | None]()
    other = house.supervisor.begin("innocent", making(innocent))
    turns(innocent, 1)

    house.supervisor.begin("digits", making(bad, after, faults=faults))

    turns(after, 1)
    assert bad.closed.is_set()
    assert faults.get() is None
    fault = faults.get()
    assert fault is not None
    assert fault.error is error
    assert type(error).__name__ in fault.detail
    other.wake()
    turns(innocent, 1)
    assert not innocent.closed.is_set()
    assert house.count("doll_job_faults_total", job_name="digits", kind="fault") == 1
    assert house.count("doll_job_faults_total", job_name="innocent", kind="fault") == 0


def test_failed_creation_of_an_actor_is_retried(house: _House) -> None:
    actor = _Script()
    tries = count()

    def make(_wake: object, _fault: PreviousFault | None) -> Actor:
        if next(tries) < 3:
            raise RuntimeError("cannot be made")
        return actor

    house.supervisor.begin("digits", make)

    turns(actor, 1)


def test_actor_that_cannot_be_closed_is_reported_and_replaced(house: _House) -> None:
    class Sticky(_Script):
        def close(self) -> None:
            raise OSError("sticks")

    sticky, after = Sticky(), _Script()
    sticky.turns.put(KeyError("x"))

    house.supervisor.begin("digits", making(sticky, after))

    turns(after, 1)
    assert "job_not_closed" in [line["event"] for line in house.logged()]


def test_outage_that_keeps_an_actor_from_closing_is_reported_once(
    house: _House,
) -> None:
    class Sticky(_Script):
        def close(self) -> None:
            raise UnavailableError("away")

    first, second, after = Sticky(), Sticky(), _Script()
    for each in (first, second):
        each.turns.put(UnavailableError("away"))

    house.supervisor.begin("digits", making(first, second, after))

    turns(after, 1)
    assert [line["event"] for line in house.logged()] == ["job_waits"]


def test_fault_reports_the_number_of_consecutive_faults(house: _House) -> None:
    errors = [KeyError("a"), UnavailableError("away"), KeyError("b"), ValueError("c")]
    actors = [_Script() for _ in range(5)]
    for actor, error in zip(actors, errors, strict=False):
        actor.turns.put(error)
    faults = SimpleQueue[PreviousFault | None]()

    house.supervisor.begin("digits", making(*actors, faults=faults))
    turns(actors[-1], 1)

    got = [faults.get() for _ in range(5)]
    assert [(fault.in_a_row, fault.alike) for fault in got if fault is not None] == [
        (1, 1),  # KeyError
        # An unavailable server is not a fault of the job, so the counts stay.
        (1, 1),
        (2, 2),
        (3, 1),
    ]


def test_repeated_exception_is_logged_once_with_its_traceback(house: _House) -> None:
    actors = [_Script() for _ in range(4)]
    for number, actor in enumerate(actors[:3]):
        actor.turns.put(CorruptError("torn") if number == 2 else KeyError(number))

    house.supervisor.begin("digits", making(*actors))
    turns(actors[-1], 1)

    logged = [line for line in house.logged() if line["event"] == "job_failed"]
    assert [line["reason"] for line in logged] == ["KeyError: 0", "torn"]
    assert "in turn" in str(logged[0]["traceback"])
    assert logged[0]["job"] == "digits"


def test_unavailable_server_is_waited_for_and_is_not_a_failure(house: _House) -> None:
    actor, after = _Script(), _Script()
    actor.turns.put(UnavailableError("Kafka is unavailable"))

    house.supervisor.begin("digits", making(actor, after))
    turns(after, 1)

    (line,) = house.logged()
    assert (line["event"], line["level"], line["reason"]) == (
        *("job_waits", "warning"),
        "Kafka is unavailable",
    )
    assert house.count("doll_job_faults_total", job_name="digits", kind="unavailable") == 1


def test_jobs_waiting_for_the_same_server_log_one_line_per_outage() -> None:
    # a waits   b waits   quiet   c waits
    clock = ManualClock(1.0)
    house = _House(clock=clock)
    for name, quiet_s in (("a", 0.0), ("b", 0.0), ("c", SETTLED_S)):
        clock.advance(quiet_s)
        actor, after = _Script(), _Script()
        actor.turns.put(UnavailableError(f"Kafka refuses write on topic doll.{name}.plans"))
        house.supervisor.begin(name, making(actor, after))
        turns(after, 1)

    assert [line["job"] for line in house.logged()] == ["a", "c"]
    assert house.supervisor.close(PATIENCE_S)


def test_each_right_that_jobs_wait_for_is_logged(house: _House) -> None:
    for name, topic in (("a", "clinic-a"), ("b", "clinic-b")):
        actor, after = _Script(), _Script()
        actor.turns.put(UnavailableError(f"Kafka refuses read on topic {topic}"))
        house.supervisor.begin(name, making(actor, after))
        turns(after, 1)

    assert [line["job"] for line in house.logged()] == ["a", "b"]


def test_pauses_double_up_to_a_bound() -> None:
    patience = Patience(first_s=1.0, longest_s=60.0)

    assert [patience.pause_s(number) for number in (1, 2, 3, 6, 7, 10_000)] == [
        *(1.0, 2.0, 4.0, 32.0),
        *(60.0, 60.0),
    ]


def test_pause_is_reset_after_a_minute_without_failure() -> None:
    house = _House()
    house.supervisor.close(PATIENCE_S)
    job = house.supervisor.begin("digits", making(_Script()))
    patience = Patience()
    pauses = []
    for lasted_s in (1.0, 1.0, 61.0, 1.0):
        job.began_at = 1000.0
        pauses.append(job.failed(KeyError("x"), 1000.0 + lasted_s, patience))

    assert pauses == [(1.0, True), (2.0, False), (1.0, True), (2.0, False)]


def test_unavailable_server_is_retried_at_a_constant_pace() -> None:
    house = _House()
    house.supervisor.close(PATIENCE_S)
    job = house.supervisor.begin("digits", making(_Script()))
    away, fault = UnavailableError("Kafka is unavailable"), KeyError("x")
    errors = (away, away, away, fault, away, fault)
    pauses = [job.failed(error, 1000.0, Patience())[0] for error in errors]

    assert pauses == [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]


def test_supervisor_pauses_before_it_replaces_an_actor() -> None:
    clock = ManualClock()
    house = _House(Patience(first_s=5.0), threads=1, clock=clock)
    bad, after, other = _Script(), _Script(), _Script()
    bad.turns.put(KeyError("x"))
    job = house.supervisor.begin("digits", making(bad, after))
    assert bad.closed.wait(PATIENCE_S)

    job.wake()  # too early: no effect
    house.supervisor.begin("other", making(other))
    # The only thread runs this turn after the one above.
    turns(other, 1)

    assert after.had.empty()
    clock.advance(5.0)
    job.wake()
    turns(after, 1)
    house.supervisor.close(PATIENCE_S)


def test_hanging_turn_stops_no_other_job_and_makes_the_process_unhealthy() -> None:
    clock = ManualClock()
    house = _House(threads=2, clock=clock, hangs_s=100.0)
    hanging, release = threading.Event(), threading.Event()

    class Hangs(_Script):
        def turn(self) -> float | None:
            hanging.set()
            release.wait(PATIENCE_S)
            return inf

    other = _Script()
    house.supervisor.begin("digits", making(Hangs()))
    assert hanging.wait(PATIENCE_S)
    clock.advance(101.0)

    job = house.supervisor.begin("other", making(other))
    turns(other, 1)
    job.wake()
    turns(other, 1)

    assert house.watchdogs.complaint() == "a turn of job digits has made no progress for 101 s"
    logged = [line for line in house.logged() if line["event"] == "turns_crowded"]
    assert [line["long_turns_of"] for line in logged] == ["digits"]
    release.set()
    assert house.supervisor.close(PATIENCE_S)
    assert house.watchdogs.complaint() == ""


def test_repeated_long_turns_are_logged_once() -> None:
    # digits   long | long | long      (less than SETTLED_S apart)
    # other         |      |
    clock = ManualClock()
    house = _House(threads=2, clock=clock)
    hanging, release = threading.Semaphore(0), threading.Semaphore(0)

    class Hangs(_Script):
        def turn(self) -> float | None:
            hanging.release()
            assert release.acquire(timeout=PATIENCE_S)
            return super().turn()

    long, other = Hangs(), _Script()
    hangs = house.supervisor.begin("digits", making(long))
    job = house.supervisor.begin("other", making(other))
    turns(other, 1)
    for _ in range(3):
        assert hanging.acquire(timeout=PATIENCE_S)
        clock.advance(LONG_S)
        job.wake()
        turns(other, 1)
        release.release()
        turns(long, 1)
        job.wake()
        turns(other, 1)
        hangs.wake()
    release.release()
    events = [line["event"] for line in house.logged()]
    assert events.count("turns_crowded") == 1
    assert events.count("turns_free") == 0
    assert house.supervisor.close(PATIENCE_S)


def test_slow_turns_are_counted_by_job() -> None:
    clock = ManualClock()
    house = _House(threads=1, clock=clock, slow_s=0.05)

    class Slow(_Script):
        def turn(self) -> float | None:
            clock.advance(0.25 if self.had.empty() else 0.125)
            return super().turn()

    actor, other = Slow(), _Script()
    actor.turns.put(clock())  # another turn at once
    house.supervisor.begin("digits", making(actor))
    house.supervisor.begin("other", making(other))
    turns(other, 1)  # on the only thread

    assert house.count("doll_slow_turns_total", job_name="digits") == 2
    assert house.count("doll_slow_turns_total", job_name="other") == 0
    assert house.supervisor.close(PATIENCE_S)
    assert house.count("doll_slow_turns_total", job_name="digits") is None


def test_no_wake_up_is_lost_and_no_job_is_in_two_threads() -> None:
    house = _House(threads=4)
    rounds, jobs = 2000, 6

    actors = [_Counts(2 * rounds) for _ in range(jobs)]
    handles = [
        house.supervisor.begin(f"job-{number}", making(actor))
        for number, actor in enumerate(actors)
    ]

    def send() -> None:
        for number in range(rounds):
            for actor, handle in zip(actors, handles, strict=True):
                actor.numbers.put(number)
                handle.wake()

    tellers = [threading.Thread(target=send) for _ in range(2)]
    for teller in tellers:
        teller.start()

    assert all(actor.done.wait(PATIENCE_S) for actor in actors)
    for teller in tellers:
        teller.join(PATIENCE_S)
    assert not [line for line in house.logged() if line["event"] == "job_failed"]
    assert house.supervisor.close(PATIENCE_S)


def test_close_closes_all_jobs_including_those_that_wait_for_a_retry() -> None:
    house = _House(Patience(first_s=1e6, longest_s=1e6))
    well, bad = _Script(), _Script()
    bad.turns.put(KeyError("x"))
    ended: list[Supervised] = [
        house.supervisor.begin("well", making(well)),
        house.supervisor.begin("bad", making(bad)),
    ]
    assert bad.closed.wait(PATIENCE_S)
    turns(well, 1)

    assert house.supervisor.close(PATIENCE_S)

    assert well.closed.is_set()
    assert all(job.ended.is_set() for job in ended)
    assert house.supervisor.begin("late", making(_Script())).ended.is_set()
