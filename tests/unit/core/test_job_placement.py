"""The plan that distributes workers over jobs, and one worker's part of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random  # noqa: TC003 -- hypothesis reads it when run

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.job_placement import (
    JobDemand,
    PlacementView,
    Sightings,
    WorkerPlacement,
    elsewhere,
    next_step,
    plan,
    with_jobs,
    workers_needed,
)

SPEED_PER_S = 100.0


def job(name: str, backlog: int = 0, **more: object) -> JobDemand:
    """Return a job with eight partitions that one worker trains at 100 records/s."""
    fields: dict[str, object] = {"worker_records_per_s": SPEED_PER_S, "most_workers": 8, **more}
    return msgspec.convert({"job": name, "backlog": backlog, **fields}, JobDemand)


def worker(index: int, at: str, stay_s: float = 1000.0, **more: object) -> WorkerPlacement:
    """Return a worker that has been at this job for long."""
    fields = {"worker": f"w{index}", "job": at, "stay_s": stay_s, **more}
    return msgspec.convert(fields, WorkerPlacement)


def view(jobs: list[JobDemand], workers: list[WorkerPlacement], *stale: str) -> PlacementView:
    return PlacementView(tuple(jobs), tuple(workers), frozenset(stale))


def four(at: str, stay_s: float = 1000.0, **more: object) -> list[WorkerPlacement]:
    return [worker(number, at, stay_s, **more) for number in range(4)]


DRAINED = job("drained")
HUGE = job("huge", 50_000)  # needs 8.3 workers

# --- what a job needs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("demand", "needed"),
    [
        (job("a", 6000), 1.0),  # done in a minute
        (job("a", 6000, arrivals_per_s=50.0), 1.5),  # though more arrives
        (job("a", 6_000_000), 8.0),  # no more than partitions
        (job("a", 1, target=3), 3.0),  # its owner's target
        (job("a", arrivals_per_s=0.1, target=3), 3.0),  # its owner's target
        # The job is drained, so its owner's target does not matter.
        (job("a", target=3), 0.0),
        (job("a", 6_000_000, target=3, runs=False), 0.0),  # paused
    ],
)
def test_workers_needed_cover_arrivals_and_drain_backlog_in_a_minute(
    demand: JobDemand, needed: float
) -> None:
    assert workers_needed(demand, SPEED_PER_S) == pytest.approx(needed)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], ""),
        ([worker(1, "")], ""),  # about to come
        ([worker(1, "other")], "the worker is working for `other`"),
        ([*four("a"), worker(5, "b")], "the 5 workers are working for `a` and `b`"),
        (
            [worker(n, f"j{n}") for n in range(4)],
            "the 4 workers are working for `j0`, `j1`, `j2` and another job",
        ),
        (
            [worker(n, f"j{n}") for n in range(9)],
            "the 9 workers are working for `j0`, `j1`, `j2` and 6 other jobs",
        ),
        ([worker(1, "other", pinned=True)], ""),  # cannot join
        ([worker(1, "other", tasks=["another"])], ""),  # cannot join
        # The worker itself reports why it avoids the job.
        ([worker(1, "other", avoided=["mine"])], ""),
    ],
)
def test_workers_at_other_jobs_are_reported(workers: list[WorkerPlacement], expected: str) -> None:
    mine = job("mine", 10)
    assert elsewhere(view([mine], workers), mine) == (
        expected and f"another job has its turn: {expected}"
    )


# --- the plan, by example --------------------------------------------------------------------


def test_drained_job_with_target_keeps_no_worker_that_another_needs() -> None:
    asked = job("asked", target=4)
    assert plan(view([asked, job("busy", 10)], [worker(1, "asked")])) == {"w1": "busy"}
    assert plan(view([asked], [worker(1, "asked")])) == {}  # no other job needs it


def test_workers_leave_a_drained_job_for_one_with_work() -> None:
    assert plan(view([HUGE, DRAINED], four("drained"))) == {f"w{n}": "huge" for n in range(4)}
    # One worker is enough.
    assert len(plan(view([job("small", 5000), DRAINED], four("drained")))) == 1


@pytest.mark.parametrize("runs", [True, False])
def test_half_of_the_workers_move_if_two_jobs_need_all(*, runs: bool) -> None:
    other = job("other", 50_000, runs=runs)

    assert len(plan(view([HUGE, other], four("huge")))) == (2 if runs else 0)
    assert len(plan(view([HUGE, other], four("other")))) == (2 if runs else 4)  # paused: all


def test_pinned_or_moving_worker_stays() -> None:
    assert not plan(view([HUGE, DRAINED], four("drained", pinned=True)))
    assert not plan(view([HUGE, DRAINED, job("c")], four("huge", goes="drained")))


def test_worker_that_came_recently_stays_while_there_is_work() -> None:
    other = job("other", 50_000)

    assert not plan(view([HUGE, other], four("huge", stay_s=5.0)))
    assert len(plan(view([HUGE, other], four("huge", stay_s=31.0)))) == 2
    assert len(plan(view([HUGE, DRAINED], four("drained", stay_s=5.0)))) == 4  # no job needs them


def test_job_with_silent_leader_neither_gives_nor_gets_workers() -> None:
    # four workers are at `other`
    # `other` is stale   they stay, although `huge` needs them
    # `huge` is stale    they stay, because nobody knows what `huge` needs
    other = job("other", 50_000)

    assert not plan(view([HUGE, other], four("other"), "other"))
    assert not plan(view([HUGE, other], four("other"), "huge"))


def test_worker_gets_no_job_it_cannot_do_or_has_failed() -> None:
    needy = job("needy", 50_000, task="mine:Task")
    able, unable = worker(0, "", tasks=("mine:Task",)), worker(1, "", tasks=("other:Task",))
    failed = worker(2, "", tasks=(), avoided=("needy",))

    assert plan(view([needy], [able, unable, failed])) == {"w0": "needy"}


def test_job_that_no_worker_can_do_blocks_no_other_job() -> None:
    alien = job("alien", 9000, unserved_s=900.0, task="alien:Task")
    known = job("known", 50_000, task="known:Task")
    one = worker(0, "drained", tasks=("known:Task",))

    assert plan(view([alien, known, DRAINED], [one])) == {"w0": "known"}


def test_longest_waiting_job_goes_first_after_a_minute() -> None:
    late, later = job("late", 10, unserved_s=61.0), job("later", 10, unserved_s=62.0)
    soon = job("soon", 10, unserved_s=59.0)

    assert "soon" not in plan(view([HUGE, soon], four("huge"))).values()
    assert plan(view([HUGE, late, later], [worker(0, "huge")])) == {"w0": "later"}
    heavier = msgspec.structs.replace(late, weight=2.0)
    assert plan(view([HUGE, heavier, later], [worker(0, "huge")])) == {"w0": "late"}


def test_targets_of_owners_are_filled_first() -> None:
    # All four would go to the other job by need alone.
    asked = job("asked", 10, target=2)

    moves = plan(view([HUGE, asked], four("")))

    assert sorted(moves.values()) == ["asked", "asked", "huge", "huge"]


def test_heavier_job_gets_more_workers() -> None:
    heavy, light = job("heavy", 50_000, weight=3.0), job("light", 50_000)

    moves = plan(view([heavy, light], [worker(n, "") for n in range(4)]))

    assert sorted(moves.values()) == ["heavy", "heavy", "heavy", "light"]


def test_plan_prefers_current_places_of_workers() -> None:
    near, far = job("near", 50_000), job("far", 45_000)

    for at in (("near", "near", "far"), ("near", "far", "far")):
        assert not plan(view([near, far], [worker(n, each) for n, each in enumerate(at)]))


def test_worker_without_job_waits_at_the_job_with_fewest_workers() -> None:
    here = [worker(0, "a"), worker(1, "b")]
    idle = [worker(number, "") for number in range(2, 6)]

    moves = plan(view([job("a"), job("b"), job("c"), job("d", runs=False)], [*here, *idle]))

    assert sorted(moves) == ["w2", "w3", "w4", "w5"]
    assert sorted(moves.values()) == ["a", "b", "c", "c"]


def test_job_without_known_speed_uses_the_mean_of_others() -> None:
    new = job("new", 60_000, worker_records_per_s=0.0)
    # At the speed of this job, `new` also needs one worker.
    fast = job("fast", 60_000, worker_records_per_s=1000.0)

    moves = plan(view([new, fast], four("")))

    # Each job needs one worker. Of the two that are left, one waits at each job.
    assert sorted(moves.values()).count("new") == 2


# --- the plan, by property -------------------------------------------------------------------

NAMES = ("a", "b", "c", "d", "e")
TASKS = ("t1", "t2")
demands = st.lists(
    st.builds(
        JobDemand,
        job=st.sampled_from(NAMES),
        backlog=st.sampled_from((0, 1, 90, 5000, 50_000)),
        arrivals_per_s=st.sampled_from((0.0, 0.5, 90.0, 400.0)),
        worker_records_per_s=st.sampled_from((0.0, 10.0, 100.0)),
        most_workers=st.integers(1, 8),
        weight=st.sampled_from((0.5, 1.0, 4.0)),
        runs=st.sampled_from((True, True, True, False)),
        target=st.sampled_from((0, 0, 1, 3)),
        unserved_s=st.sampled_from((0.0, 30.0, 61.0, 200.0)),
        task=st.sampled_from(TASKS),
    ),
    max_size=5,
    unique_by=lambda demand: demand.job,
)
placements = st.lists(
    st.builds(
        WorkerPlacement,
        worker=st.sampled_from([f"w{number}" for number in range(9)]),
        job=st.sampled_from(("", "gone", *NAMES)),
        stay_s=st.sampled_from((0.0, 29.0, 31.0, 1000.0)),
        pinned=st.booleans(),
        tasks=st.sampled_from(((), (), ("t1",), TASKS)),
        avoided=st.sampled_from(((), (), ("a",))),
        goes=st.sampled_from(("", "", "", *NAMES)),
    ),
    max_size=9,
    unique_by=lambda placement: placement.worker,
)
views = st.builds(
    PlacementView,
    demands.map(tuple),
    placements.map(tuple),
    st.frozensets(st.sampled_from(NAMES), max_size=2),
)
# Workers that may all leave their jobs and can serve every job.
free = st.lists(st.sampled_from(NAMES), max_size=9).map(
    lambda at: tuple(worker(number, each) for number, each in enumerate(at))
)


def moved(seen: PlacementView, stay_s: float = 1000.0) -> PlacementView:
    """Return the same view after all workers followed the plan."""
    moves = plan(seen)
    return replace(
        seen,
        workers=tuple(
            msgspec.structs.replace(it, job=moves[it.worker], stay_s=stay_s, goes="")
            if it.worker in moves
            else it
            for it in seen.workers
        ),
    )


@given(views, st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_order_of_jobs_and_workers(
    seen: PlacementView, random: Random
) -> None:
    jobs, workers = list(seen.jobs), list(seen.workers)
    random.shuffle(jobs)
    random.shuffle(workers)

    assert plan(PlacementView(tuple(jobs), tuple(workers), seen.stale)) == plan(seen)


@given(views)
def test_moving_worker_may_leave_and_can_do_its_new_job(seen: PlacementView) -> None:
    jobs = {demand.job: demand for demand in seen.jobs}
    workers = {it.worker: it for it in seen.workers}
    for name, to in plan(seen).items():
        mover = workers[name]
        assert not mover.pinned
        assert (mover.goes or mover.job) != to
        assert mover.job not in seen.stale & jobs.keys()
        assert mover.can_do(jobs[to])
        assert jobs[to].runs
        # Only a worker without a job may move to a stale one, and then it waits.
        assert to not in seen.stale or mover.job not in jobs


@given(views, st.sampled_from((0.0, 1000.0)))
def test_workers_that_follow_the_plan_come_to_rest(seen: PlacementView, stay_s: float) -> None:
    for _ in range(len(seen.workers) + 1):
        seen = moved(seen, stay_s)

    assert plan(seen) == {}


@given(demands.map(tuple), free, st.sampled_from((0.0, 1000.0)))
def test_one_move_each_is_enough_if_all_workers_can_do_all_jobs(
    jobs: tuple[JobDemand, ...], workers: tuple[WorkerPlacement, ...], stay_s: float
) -> None:
    assert plan(moved(PlacementView(jobs, workers), stay_s)) == {}


@given(demands.map(tuple), free)
def test_drained_job_keeps_at_most_one_worker_while_another_lacks_some(
    jobs: tuple[JobDemand, ...], workers: tuple[WorkerPlacement, ...]
) -> None:
    after = moved(PlacementView(jobs, workers))
    known = [it.worker_records_per_s for it in jobs if it.worker_records_per_s]
    mean = sum(known) / len(known) if known else SPEED_PER_S
    here = {it.job: sum(w.job == it.job for w in after.workers) for it in jobs}
    needed = {it.job: workers_needed(it, it.worker_records_per_s or mean) for it in jobs}
    lacking = [name for name, need in needed.items() if here[name] < need - 1e-6]
    if lacking:
        assert all(here[it.job] <= 1 for it in jobs if needed[it.job] <= 1e-9)


@given(demands.map(tuple), free)
def test_targets_of_owners_are_filled_before_anything_else(
    jobs: tuple[JobDemand, ...], workers: tuple[WorkerPlacement, ...]
) -> None:
    idle = tuple(msgspec.structs.replace(it, stay_s=1000.0) for it in workers)
    after = moved(PlacementView(jobs, idle))
    targets = {it.job: it.target for it in jobs if it.runs and (it.backlog or it.arrivals_per_s)}
    bound = sum(it.job in targets for it in after.workers)
    if sum(targets.values()) <= bound:
        for name, target in targets.items():
            assert sum(it.job == name for it in after.workers) >= target


# --- one worker's part -----------------------------------------------------------------------


def test_worker_announces_its_move_then_checks_again_and_moves() -> None:
    before = view([HUGE, DRAINED], [worker(0, "drained")])
    said = next_step(before, "w0")
    after = view([HUGE, DRAINED], [worker(0, "drained", goes="huge")])

    assert (said.goes, said.now) == ("huge", False)
    assert next_step(after, "w0")[:2] == ("huge", True)


def test_only_first_of_too_many_movers_moves() -> None:
    # `two` needs two workers. w0 is there, and three others announced their move at the same time.
    need_two = job("two", 12_000)
    going = [worker(number, "drained", goes="two") for number in (1, 2, 3)]
    seen = view([need_two, DRAINED], [worker(0, "two"), *going])

    steps = [next_step(seen, f"w{number}") for number in (1, 2, 3)]

    assert sorted(step.now for step in steps) == [False, False, True]
    assert sorted(step.goes for step in steps) == ["", "", "two"]


@pytest.mark.parametrize("why", ["paused", "gone", "stale"])
def test_worker_stays_if_its_destination_no_longer_needs_it(why: str) -> None:
    jobs = [DRAINED, *([job("huge", 50_000, runs=why != "paused")] if why != "gone" else [])]
    seen = view(jobs, [worker(0, "drained", goes="huge")], *(["huge"] if why == "stale" else []))

    assert next_step(seen, "w0")[:2] == ("", False)


def test_worker_without_job_moves_at_once() -> None:
    assert next_step(view([HUGE], [worker(0, "")]), "w0")[:2] == ("huge", True)
    assert next_step(view([DRAINED], [worker(0, "")]), "w0")[:2] == ("drained", True)


def test_no_worker_moves_without_a_view() -> None:
    assert next_step(PlacementView(), "w0")[:2] == ("", False)
    assert next_step(view([], [worker(0, "a")]), "w0")[:2] == ("", False)
    assert not plan(PlacementView())


@given(views, st.sampled_from([f"w{number}" for number in range(9)]))
def test_pinned_worker_never_moves(seen: PlacementView, name: str) -> None:
    pinned = replace(
        seen, workers=tuple(msgspec.structs.replace(it, pinned=True) for it in seen.workers)
    )

    assert next_step(pinned, name)[:2] == ("", False)


# --- live workers ----------------------------------------------------------------------------


def test_record_unchanged_for_five_seconds_is_stale() -> None:
    # time           0    4    5     10
    # number of a    1    1    2     2: stale
    # number of w0   1    1    1: gone
    sightings = Sightings()
    first: list[JobDemand | WorkerPlacement] = [job("a", number=1), worker(0, "a", number=1)]
    second: list[JobDemand | WorkerPlacement] = [job("a", number=2), worker(0, "a", number=1)]

    assert sightings.see(first, 0.0).stale == frozenset()
    assert len(sightings.see(first, 4.0).workers) == 1
    later = sightings.see(second, 5.0)
    assert (later.stale, later.workers) == (frozenset(), ())
    assert sightings.see(second, 10.0).stale == {"a"}


def test_empty_redis_moves_no_worker_and_keeps_known_jobs() -> None:
    # time     0      1        2      6          60
    # records  a w0   none     w0     none       none
    # view     a w0   nothing  a w0   a, stale   no a
    sightings = Sightings()
    sightings.see([job("a"), worker(0, "a")], 0.0)

    assert sightings.see([], 1.0) == PlacementView()
    back = sightings.see([worker(0, "a", number=1)], 2.0)
    assert ([it.job for it in back.jobs], len(back.workers), back.stale) == (["a"], 1, frozenset())
    assert sightings.see([], 6.0).stale == {"a"}
    assert sightings.see([], 60.0).jobs == ()


def test_worker_without_record_has_left() -> None:
    sightings = Sightings()
    sightings.see([job("a"), worker(0, "a")], 0.0)

    assert sightings.see([job("a")], 1.0).workers == ()


def test_unchanged_record_may_be_removed_after_a_minute() -> None:
    sightings = Sightings()
    records: list[JobDemand | WorkerPlacement] = [job("a"), worker(0, "a")]
    sightings.see(records, 0.0)
    sightings.see([*records, job("b")], 59.0)

    assert sightings.forget(59.0) == ((), ())
    assert sightings.forget(60.0) == (("a",), ("w0",))


def test_pause_by_a_person_overrides_the_report_of_the_leader() -> None:
    seen = view([job("a", 9), job("gone", 9), job("paused", 9)], [], "a", "gone")
    known = {"a": job("a"), "new": job("new"), "paused": job("paused", runs=False)}

    jobs = with_jobs(seen, known)

    assert {it.job: (it.backlog, it.runs) for it in jobs.jobs} == {
        "a": (9, True),
        "new": (0, True),
        "paused": (9, False),
    }
    assert jobs.stale == {"a"}
