"""The view of a job equals a naive recomputation from the records that count."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.api.jobs import progress_answer
from common.core.history import History
from common.core.liveness import Device
from common.core.messages import (
    AuditRecord,
    Lead,
    ModelId,
    Quarantined,
    UpdateApplied,
)
from common.jobs.progress import SHOWN_UPDATES, WINDOW_S, JobObservation, JobProgress
from common.spot.provisioning.fleet_ledger import FleetLedger
from services.admin.live.answers import curves_answer, updates_page, workers_answer
from tests.unit.admin.live.helpers import BATCH, batch, job, lead, quarantine, update

STEP_S = 0.5  # seconds between records
COURSE = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(0, 2), st.sampled_from([0, 0, 0, 1, -1])),
        st.tuples(st.just("update"), st.just(0), st.just(0)),
        st.tuples(st.just("lead"), st.integers(0, 1), st.integers(0, 12)),
        st.tuples(st.just("quarantine"), st.integers(0, 1), st.integers(1000, 1003)),
        st.tuples(st.just("garbage"), st.just(0), st.just(0)),
    ),
    max_size=80,
)


def written(course: list[tuple[str, int, int]]) -> list[AuditRecord | None]:
    """Return the records of several leaders, including dead ones that still write.

    Args:
        course: For each record, its kind; which leader wrote it, counted back from the newest; and
            the distance from the right version, the number of versions that a new leader rolls
            back, or the number of the batch.
    """
    history, epochs, records = History(), [-1], list[AuditRecord | None]()
    for offset, (what, ago, number) in enumerate([("lead", 0, 0), *course]):
        epoch = epochs[max(0, len(epochs) - 1 - ago)]
        record: AuditRecord | None = None
        if what == "update":
            version = max(1, history.head.version + 1 + number)
            made = [batch(offset * 2, f"w{offset % 3}"), batch(offset * 2 + 1)]
            name = "accuracy" if offset % 3 else "top5"
            record = update(epoch, version, *made, loss=offset / 7, metrics={name: offset / 100})
        elif what == "lead":
            back = history.path[-min(len(history.path), 1 + number)]
            record = lead(epoch, back, epoch=offset)
        elif what == "quarantine":
            record = quarantine(epoch, number)
        if history.feed(offset, record) and isinstance(record, Lead):
            epochs.append(offset)
        records.append(record)
    return records


def effective(
    records: list[AuditRecord | None],
) -> tuple[list[tuple[float, UpdateApplied]], list[Quarantined]]:
    """Return the effective updates with their times, and the quarantined batches."""
    history, by_name = History(), dict[ModelId, tuple[float, UpdateApplied]]()
    for offset, record in enumerate(records):
        if history.feed(offset, record) and isinstance(record, UpdateApplied):
            by_name[ModelId(record.epoch, record.version)] = offset * STEP_S, record
    return [by_name[model] for model in history.path[1:]], list(history.quarantined.values())


@given(COURSE, st.sets(st.integers(0, 79)))
def test_view_of_a_job_matches_its_effective_history(
    course: list[tuple[str, int, int]], asked_at: set[int]
) -> None:
    records = written(course)
    view = JobProgress(job())
    for offset, record in enumerate(records):
        view.feed_update(offset, record, offset * STEP_S, offset * STEP_S)
        if offset in asked_at:
            # Reading must not change the view.
            progress_answer(view, offset * STEP_S)
            workers_answer(view, FleetLedger(), offset * STEP_S)
    now = len(records) * STEP_S
    made, quarantined = effective(records)
    updates = [record for _, record in made]
    last = updates[-SHOWN_UPDATES:]

    progress = progress_answer(view, now)
    assert progress.version == len(made)
    assert progress.samples == sum(each.samples for each in updates)
    assert progress.quarantined == len(quarantined)
    assert progress.last_update_s == (made[-1][0] if made else None)
    if updates:
        samples = sum(each.samples for each in last)
        mean = sum(each.loss * each.samples for each in last) / samples
        assert progress.loss == pytest.approx(mean)
        assert set(progress.metrics) == {name for each in last for name in each.metrics}
        for name, value in progress.metrics.items():
            having = [each.metrics[name] for each in last if name in each.metrics]
            # Each update has the same number of samples.
            assert value == pytest.approx(sum(having) / len(having))
    else:
        assert progress.loss is None

    page = updates_page(view, 0, 1000)
    assert [(each.version, each.epoch, each.at_s) for each in page.updates] == [
        (record.version, record.epoch, at_s) for at_s, record in made
    ]
    assert [(each.loss, each.metrics, each.samples) for each in page.updates] == [
        (record.loss, record.metrics, record.samples) for record in updates
    ]
    assert (page.newest, page.next) == (len(made), None)

    reported = {each.stream: each.dead_lettered for each in view.streams()}
    assert reported == {"clicks": BATCH * len(quarantined), "views": 0}

    curves = curves_answer(view, FleetLedger(), now)
    assert list(curves.version) == [record.version for record in updates]
    assert curves.loss == pytest.approx([record.loss for record in updates])
    assert list(curves.update_at_s) == [at_s for at_s, _ in made]


@given(COURSE)
def test_rates_cover_the_effective_updates_of_the_last_ten_seconds(
    course: list[tuple[str, int, int]],
) -> None:
    records = written(course)
    view = JobProgress(job())
    first_s = None
    for offset, record in enumerate(records):
        counts = view.feed_update(offset, record, offset * STEP_S, offset * STEP_S)
        if counts and isinstance(record, UpdateApplied) and first_s is None:
            first_s = offset * STEP_S
    now = len(records) * STEP_S
    recent = [record for at_s, record in effective(records)[0] if at_s >= now - WINDOW_S]
    progress = progress_answer(view, now)
    if first_s is None:
        assert progress.updates_per_s is None
        return
    span_s = min(WINDOW_S, max(1.0, now - first_s))
    assert progress.updates_per_s == pytest.approx(len(recent) / span_s)
    assert progress.samples_per_s == pytest.approx(sum(each.samples for each in recent) / span_s)
    samples = Counter[str]()
    for record in recent:
        for each in record.batches:
            samples[each.worker] += each.samples
    view.look(JobObservation(now, statuses=dict.fromkeys(samples, "alive")))
    assert {
        each.name: each.samples for each in workers_answer(view, FleetLedger(), now).workers
    } == samples


@given(COURSE, st.integers(1, 30))
def test_newest_updates_are_kept_and_sums_cover_all(
    course: list[tuple[str, int, int]], kept: int
) -> None:
    records = written(course)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.jobs.progress.KEPT", kept)
        view = JobProgress(job())
    for offset, record in enumerate(records):
        view.feed_update(offset, record, offset * STEP_S, offset * STEP_S)
    updates = [record for _, record in effective(records)[0]]
    page = updates_page(view, 0, 1000)
    versions = [each.version for each in page.updates]
    assert versions == [each.version for each in updates[len(updates) - len(versions) :]]
    assert len(versions) <= kept
    assert page.oldest == (versions[0] if versions else None)
    assert progress_answer(view, 0.0).version == len(updates)


def test_update_pages_follow_one_another_without_a_gap() -> None:
    view = JobProgress(job())
    view.feed_update(0, lead(), 1.0, 1.0)
    for version in range(1, 26):
        view.feed_update(version, update(0, version), 1.0 + version, 1.0 + version)
    seen, after = list[int](), 0
    while True:
        page = updates_page(view, after, 10)
        seen += [each.version for each in page.updates]
        if page.next is None:
            break
        after = page.next
    assert seen == list(range(1, 26))
    assert updates_page(view, 25, 10).updates == ()
    assert updates_page(view, 10**9, 10).next is None


def test_updates_are_followed_if_the_topic_lost_its_beginning() -> None:
    # Offsets below 500 are gone. The first update shows that the epoch of Lead 480 is in force.
    view = JobProgress(job(), updates_start=500)
    assert not view.feed_update(500, None, 1.0, 1.0)
    assert view.feed_update(501, update(480, 41), 1.0, 1.0)
    # A deposed leader wrote this update.
    assert not view.feed_update(502, update(300, 41), 1.0, 1.0)
    assert view.feed_update(503, update(480, 42), 2.0, 2.0)
    assert view.feed_update(504, lead(480, ModelId(480, 41), epoch=504), 3.0, 3.0)
    assert view.feed_update(505, update(504, 42), 4.0, 4.0)
    page = updates_page(view, 0, 10)
    assert [(each.version, each.epoch) for each in page.updates] == [(41, 480), (42, 504)]
    assert page.oldest == 41


def test_update_of_a_deposed_leader_is_dropped_once_a_later_epoch_is_read() -> None:
    view = JobProgress(job(), updates_start=500)
    # A later epoch is not known yet.
    assert view.feed_update(500, update(300, 17), 1.0, 1.0)
    assert view.feed_update(501, update(480, 41), 1.0, 1.0)
    assert [each.version for each in updates_page(view, 0, 10).updates] == [41]
    assert progress_answer(view, 2.0).samples == BATCH


def test_unknown_values_are_null() -> None:
    view = JobProgress(job())
    progress = progress_answer(view, 5.0)
    assert (progress.lag, progress.workers, progress.led) == (None,) * 3
    assert (progress.loss, progress.updates_per_s, progress.last_update_s) == (None,) * 3
    view.feed_update(0, lead(), None, 1.0)
    view.feed_update(1, update(0, 1), None, 1.0)
    [reported] = updates_page(view, 0, 1).updates
    assert reported.at_s is None
    assert reported.gradient_s is None


def test_workers_are_not_shown_as_silent_while_redis_is_unavailable() -> None:
    view = JobProgress(job())
    view.look(JobObservation(1.0, {"w1": "alive", "w2": "leaving"}, None, led=True))
    assert [
        (each.name, each.status) for each in workers_answer(view, FleetLedger(), 1.0).workers
    ] == [
        ("w1", "alive"),
        ("w2", "leaving"),
    ]
    assert progress_answer(view, 1.0).led
    view.look(JobObservation(2.0, board_away="connection refused"))
    assert workers_answer(view, FleetLedger(), 2.0).board_away == "connection refused"
    assert progress_answer(view, 2.0).led is None


def test_workers_are_shown_with_the_devices_that_they_report() -> None:
    view = JobProgress(job())
    gpu = Device("cuda", "NVIDIA L4", 24 << 30, "580.65.06", "8.9")
    statuses = {"w1": "alive", "w2": "alive"}
    view.look(JobObservation(1.0, statuses, None, led=True, devices={"w1": gpu}))
    found = workers_answer(view, FleetLedger(), 1.0).workers
    assert [each.device and each.device.model_dump() for each in found] == [gpu._asdict(), None]


def test_stopped_job_shows_its_reason() -> None:
    view = JobProgress(job())
    assert progress_answer(view, 1.0).done == ""
    view.record = replace(view.record, wanted="stopped", reason="the loss is reached")
    assert progress_answer(view, 1.0).done == "the loss is reached"


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), max_size=12))
def test_curve_contains_first_newest_and_some_effective_updates(
    steps: list[tuple[int, int]],
) -> None:
    # For example: updates 1 to 60 | rollback to 45 | updates 46 to 80 | rollback to 60 | ...
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.jobs.progress.POINTS", 8)
        view = JobProgress(job())
    epoch, offset, path = 0, 1, list[UpdateApplied]()
    view.feed_update(0, lead(), 0.0, 0.0)
    for made, back in steps:
        for _ in range(made):
            path.append(update(epoch, len(path) + 1, loss=offset / 7))
            view.feed_update(offset, path[-1], float(offset), float(offset))
            offset += 1
        del path[max(1, len(path) - back) :]
        base = ModelId(path[-1].epoch, len(path))
        view.feed_update(offset, lead(epoch, base, epoch=offset), 0.0, 0.0)
        epoch, offset = offset, offset + 1
    path.append(update(epoch, len(path) + 1))
    view.feed_update(offset, path[-1], float(offset), float(offset))

    curves = curves_answer(view, FleetLedger(), 0.0)

    assert (curves.version[0], curves.version[-1]) == (1, len(path))
    assert len(curves.version) <= 8
    assert list(curves.version) == sorted(set(curves.version))
    assert curves.loss == tuple(path[version - 1].loss for version in curves.version)


def test_rate_on_a_curve_covers_the_ten_seconds_before() -> None:
    view = JobProgress(job())
    view.feed_update(0, lead(), 0.0, 0.0)
    for version in range(1, 101):
        view.feed_update(version, update(0, version), version * 0.5, version * 0.5)
    # The updates pause for 100 s.
    view.feed_update(101, update(0, 101), 150.0, 150.0)
    rates = curves_answer(view, FleetLedger(), 150.0).updates_per_s
    assert rates[:100] == pytest.approx((2.0,) * 100)
    assert rates[100] == pytest.approx(0.01)


def test_update_without_a_time_has_the_time_of_the_previous_one() -> None:
    view = JobProgress(job())
    view.feed_update(0, lead(), 1.0, 1.0)
    view.feed_update(1, update(0, 1), 5.0, 5.0)
    view.feed_update(2, update(0, 2), None, 5.0)
    curves = curves_answer(view, FleetLedger(), 5.0)
    assert curves.update_at_s == (5.0, 5.0)
    assert curves.updates_per_s == (0.0, 0.0)
