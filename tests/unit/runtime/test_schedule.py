"""Turns of jobs: never two of one job at once, no wake-up is lost, and no job starves."""

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.runtime.schedule import TurnSchedule

JOBS = st.sampled_from("abcd")


def test_added_job_has_its_first_turn_at_once() -> None:
    schedule = TurnSchedule[str]()

    schedule.add("a")

    assert schedule.next(0.0) == "a"


def test_job_has_no_second_turn_before_its_first_ends() -> None:
    schedule = TurnSchedule[str]()
    schedule.add("a")
    schedule.next(0.0)

    schedule.wake("a")

    assert schedule.next(1.0) is None


def test_wake_up_during_a_turn_causes_another_turn() -> None:
    schedule = TurnSchedule[str]()
    schedule.add("a")
    schedule.next(0.0)
    schedule.wake("a")

    schedule.done("a", inf)

    assert schedule.next(0.0) == "a"


def test_wake_ups_between_two_turns_count_once() -> None:
    schedule = TurnSchedule[str]()
    schedule.add("a")
    schedule.next(0.0)
    schedule.done("a", inf)

    assert [schedule.wake("a"), schedule.wake("a")] == [True, False]
    schedule.next(0.0)
    schedule.done("a", inf)

    assert schedule.next(0.0) is None


def test_woken_job_drops_its_earlier_due_time() -> None:
    schedule = TurnSchedule[str]()
    schedule.add("a")
    schedule.next(0.0)
    schedule.done("a", 5.0)
    schedule.wake("a")
    schedule.next(1.0)
    schedule.done("a", inf)

    assert schedule.next(6.0) is None


def test_obsolete_due_times_do_not_accumulate() -> None:
    schedule = TurnSchedule[str]()
    schedule.add("a")
    for turn in range(10_000):
        schedule.next(0.0)
        schedule.done("a", 1e6 + turn)
        schedule.wake("a")

    assert len(schedule._dues) < 100  # noqa: SLF001 -- memory is what this test is about


def test_waking_a_forgotten_job_has_no_effect() -> None:
    schedule = TurnSchedule[str]()
    schedule.add("a")
    schedule.next(0.0)

    schedule.forget("a")

    assert not schedule.wake("a")
    assert schedule.next(9.0) is None


class _TurnsInAnyOrder(RuleBasedStateMachine):
    """Compares the schedule with a plain list of turns that are due."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = TurnSchedule[str]()
        self.now = 0.0
        self.running = set[str]()
        # Time since which each job waits for a turn. inf: it does not wait.
        self.owed = dict[str, float]()
        self.due = dict[str, float]()

    @rule(job=JOBS)
    def add(self, job: str) -> None:
        if job not in self.due:
            self.schedule.add(job)
            self.owed[job], self.due[job] = self.now, inf

    @rule(job=JOBS)
    def wake(self, job: str) -> None:
        self.schedule.wake(job)
        if job in self.due:
            self.owed[job] = min(self.owed[job], self.now)

    @rule(seconds=st.sampled_from((0.0, 1.0, 3.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def next(self) -> None:
        job = self.schedule.next(self.now)
        for each, due in self.due.items():
            if each not in self.running and due <= self.now:
                self.owed[each] = min(self.owed[each], due)
        ready = {each for each in self.due.keys() - self.running if self.owed[each] < inf}
        assert (job in ready) if ready else (job is None)
        if job is not None:
            self.running.add(job)
            self.owed[job] = self.due[job] = inf

    @precondition(lambda self: self.running)
    @rule(after=st.sampled_from((-1.0, 0.0, 2.0, inf)), which=st.randoms(use_true_random=False))
    def done(self, after: float, which: object) -> None:
        job = which.choice(sorted(self.running))  # type: ignore[attr-defined]  # of `random.Random`
        self.running.remove(job)
        self.schedule.done(job, self.now + after)
        self.due[job] = self.now + after

    @precondition(lambda self: self.running)
    @rule()
    def forget(self) -> None:
        job = min(self.running)
        self.running.remove(job)
        self.schedule.forget(job)
        del self.due[job], self.owed[job]

    @invariant()
    def due_time_is_not_after_any_waiting_job(self) -> None:
        waiting = [
            due
            for job, due in self.due.items()
            if job not in self.running and self.owed[job] == inf
        ]
        assert self.schedule.due() <= min(waiting, default=inf)
        assert len(self.schedule) == len(self.due)


TestTurnsInAnyOrder = _TurnsInAnyOrder.TestCase
TestTurnsInAnyOrder.settings = settings(stateful_step_count=40)
