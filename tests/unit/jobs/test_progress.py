"""The view of a job: correct numbers for every order of reading, and the correct state."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from common.core.audit import audit
from common.core.history import History
from common.core.ledger import Ledger
from common.core.liveness import OUTAGE, REGISTRY_LATE, REGISTRY_UNREACHABLE, TURN, OutageNotice
from common.core.messages import (
    AuditRecord,
    Batch,
    BatchReady,
    Claim,
    ControlRecord,
    GroupStatus,
    Lead,
    LeaderStatus,
    ModelId,
    Opened,
    Positions,
    Quarantined,
    Replayed,
    Requeued,
    Skipped,
    SpanExpired,
    Synchrony,
    WorkerId,
)
from common.core.spans import Partition, Span
from common.errors import UserError
from common.jobs import progress
from common.jobs.edit import changed_spec
from common.jobs.progress import (
    QUIET_S,
    RECENT_RECORDS,
    JobObservation,
    JobProgress,
    SynchronyAnswer,
    Updates,
)
from common.jobs.spec import ScheduleSpec
from tests.unit.admin.live.helpers import BATCH, STREAMS, batch, job, lead, quarantine, update

if TYPE_CHECKING:
    from common.jobs.store import JobRecord

PLACES = [Partition(stream, index) for stream in STREAMS for index in (0, 1)]
ADDED = Partition(STREAMS[0], 2)  # added while the job runs
FIRST = job().first
NOW = 2000.0
STEP_S = 0.5


class MachineRecord(NamedTuple):
    """Records of the control and updates topics, and the bounds of the streams."""

    control: list[tuple[int, ControlRecord | None]]
    updates: list[tuple[int, AuditRecord | None]]
    starts: Positions
    ends: Positions


def story(seed: int, length: int) -> MachineRecord:  # noqa: C901, PLR0915 -- one case per record
    """Return a random history of claims, some too late, and of leaders, some of them deposed."""
    chance = random.Random(seed)  # noqa: S311 -- no secret
    ledger, history = Ledger(FIRST), History()
    control = list[tuple[int, ControlRecord | None]]()
    updates = list[tuple[int, AuditRecord | None]]()
    accepted, settled, epochs = list[Batch](), dict[int, list[Batch]](), [-1]

    def append(record: AuditRecord | None) -> bool:
        updates.append((len(updates), record))
        return history.feed(len(updates) - 1, record)

    def open_batches() -> list[Batch]:
        gone = {each.offset for made in settled.values() for each in made}
        return [
            each
            for each in accepted
            if each.offset not in gone and each.offset not in history.quarantined
        ]

    append(lead())
    epochs.append(0)
    for _ in range(length):
        if chance.random() < 0.04:
            opened = Opened(ADDED, None, chance.randint(1, 9), "one", 0, -1)
            if chance.random() < 0.5:
                place = chance.choice(sorted(ledger.claimed))
                topic_id = chance.choice(["one", "one", "other"])
                start = max(ledger.claimed[place] - chance.randint(0, 12), 0)
                after = ledger.generation(place)
                opened = Opened(place, after, len(control) + 10, topic_id, start, -1)
            control.append((len(control), opened))
            ledger.decide(len(control) - 1, opened)
        what = chance.random()
        if what < 0.5:
            place = chance.choice(sorted(ledger.claimed))
            begin = ledger.claimed[place] + chance.choice([0, 0, 0, 0, 3])
            end = begin + chance.randint(1, 5)
            known = chance.choice([-1, end, end])
            span = Span(*place, begin, end, ledger.generation(place) or 0, -1, known)
            bad = chance.randint(0, span.end - begin) if chance.random() < 0.4 else 0
            left_out = tuple(Skipped(*place, begin + index, "torn") for index in range(bad))
            worker = WorkerId(f"w{chance.randint(0, 2)}")
            claim: Claim | None = chance.choice(
                [BatchReady(worker, (span,), span.end - begin - bad, left_out)] * 8
                + [SpanExpired(worker, (span,)), None]
            )
            control.append((len(control), claim))
            found = ledger.decide(len(control) - 1, claim).batch
            accepted += [] if found is None else [found]
        elif what < 0.8 and (left := open_batches()):
            made = left[: chance.randint(1, 3)]
            epoch = chance.choice(epochs[1:]) if chance.random() < 0.3 else history.epoch
            version = history.head.version + chance.choice([1, 1, 1, 2])
            if append(update(epoch, version, *made)):
                settled[version] = made
        elif what < 0.87 and (left := open_batches()):
            reason = chance.choice(["poison: it raised", "poison: it raised", "expired"])
            append(Quarantined(history.epoch, chance.choice(left), reason))
        elif what < 0.95:
            after = chance.choice([history.epoch, history.epoch, epochs[-2]])
            base = history.path[-min(len(history.path), chance.randint(1, 4))]
            if append(Lead(after, base, "c", len(updates))):
                epochs.append(len(updates) - 1)
                settled = {v: made for v, made in settled.items() if v <= base.version}
        elif what < 0.98 and history.quarantined:
            given_up = chance.choice([each.batch for each in history.quarantined.values()])
            taken_back = chance.random() < 0.7
            append((Requeued if taken_back else Replayed)(given_up, "olga", 1.0))
        else:
            append(None)
    ends = {place: end + chance.randint(0, 6) for place, end in ledger.claimed.items()}
    # Retention may have deleted claimed and unclaimed records.
    starts = {
        place: chance.randint(min(FIRST.get(place, 0), end), end) for place, end in ends.items()
    }
    return MachineRecord(control, updates, starts, ends)


def fed(whole: MachineRecord, seed: int) -> JobProgress:
    """Return a view that reads both topics alternately, a random number of records at a time."""
    chance = random.Random(seed)  # noqa: S311 -- no secret
    view = JobProgress(job())
    control, updates = list(whole.control), list(whole.updates)
    while control or updates:
        count = chance.randint(1, 7)
        if control and (not updates or chance.random() < 0.5):
            for offset, claim in control[:count]:
                view.claims.feed(offset, claim)
            del control[:count]
        else:
            for offset, record in updates[:count]:
                view.feed_update(offset, record, offset * STEP_S, offset * STEP_S)
            del updates[:count]
            view.numbers(NOW)  # reading must change nothing
            view.state(NOW)
    view.look(
        JobObservation(NOW, {"w1": "alive"}, None, led=True, ends=whole.ends, starts=whole.starts)
    )
    return view


@given(st.integers(0, 2**32), st.integers(0, 80), st.integers(0, 2**32))
def test_view_equals_the_audit_for_every_order_of_reading(
    seed: int, length: int, order: int
) -> None:
    whole = story(seed, length)
    proof = audit(FIRST, whole.control, whole.updates, whole.starts)
    # The story may use a batch twice. It must have no other flaw.
    assert not [flaw for flaw in proof.flaws if flaw.kind != "used twice"]
    view = fed(whole, order)
    numbers = view.numbers(NOW)
    assert numbers.whole
    assert numbers.version == len(proof.updates)
    assert numbers.samples == proof.trained
    assert numbers.skipped == proof.skipped
    assert numbers.quarantined == len(proof.quarantined)
    assert numbers.expired == proof.expired_records

    claimed = Ledger(FIRST)
    left = dict[int, Batch]()
    for offset, claim in whole.control:
        found = claimed.decide(offset, claim).batch
        if found is not None:
            left[offset] = found
    settled = [each for made in proof.updates for each in made.batches]
    for each in (*settled, *(given_up.batch for given_up in proof.quarantined)):
        left.pop(each.offset, None)
    expiring = [part for b in left.values() for part in map(claimed.lost_part, b.address) if part]
    assert numbers.lost == proof.lost_records + sum(part.end - part.start for part in expiring)
    there = {place: max(whole.starts[place], at) for place, at in claimed.claimed.items()}
    unclaimed = sum(end - there[place] for place, end in whole.ends.items())
    waiting = sum(span.end - span.start for each in left.values() for span in each.address)
    assert numbers.waiting == len(left)
    assert numbers.lag == unclaimed + waiting
    assert sum(stream.lag or 0 for stream in view.streams()) == numbers.lag
    again = fed(whole, order + 1)
    assert again.numbers(NOW) == numbers
    assert again.state(NOW) == view.state(NOW)
    assert again.streams() == view.streams()


# --- the state ------------------------------------------------------------------------------------

LONG_AGO_S, NOW_S = NOW - 100.0, NOW


def claim_of(made: Batch) -> BatchReady:
    return BatchReady(made.worker, made.address, made.samples, made.skipped)


def running(claims: list[Batch], updates: int, end: int, at_s: float = LONG_AGO_S) -> JobProgress:
    """Return a job of one partition with this end and these claims. Two batches make an update."""
    view = JobProgress(job())
    view.feed_update(0, lead(), at_s, at_s)
    for offset, each in enumerate(claims):
        view.claims.feed(offset, claim_of(each))
    for version in range(1, updates + 1):
        made = [claims[2 * version - 2], claims[2 * version - 1]]
        view.feed_update(version, update(0, version, *made), at_s, at_s)
    ends = dict(FIRST) | {PLACES[0]: end}
    view.look(JobObservation(NOW, {"w1": "alive"}, leader_status(), led=True, ends=ends))
    return view


def leader_status(waiting: int = 0) -> LeaderStatus:
    return LeaderStatus(0, 9, dict(FIRST), 9, waiting, 1, dict(FIRST))


def rows(count: int, skipped: int = 0) -> list[Batch]:
    """Return consecutive batches, each with this number of records that do not decode."""
    made = list[Batch]()
    for number in range(count):
        begin = 100 + number * BATCH
        left_out = tuple(Skipped("clicks", 0, begin + each, "torn") for each in range(skipped))
        span = Span("clicks", 0, begin, begin + BATCH)
        made.append(Batch(number, WorkerId("w1"), (span,), BATCH - skipped, left_out))
    return made


def test_state_of_an_inactive_job_is_that_of_its_record() -> None:
    record = job()
    for changed, word in (
        ({"wanted": "paused"}, "paused"),
        ({"wanted": "paused", "held": True}, "held"),
        ({"wanted": "stopped"}, "stopped"),
        ({"wanted": "stopped", "finished": True}, "finished"),
    ):
        view = JobProgress(replace(record, reason="why", **changed))
        assert view.state(NOW) == (word, "why")


def test_job_without_a_leader_waits_for_a_coordinator() -> None:
    view = JobProgress(job())
    assert view.state(NOW).why == "its state has not been read yet"
    view.look(JobObservation(NOW, {}, None, led=False, ends=FIRST))
    assert view.state(NOW) == (
        "waiting for a coordinator",
        "no coordinator leads digits yet; `doll coordinator` starts one",
    )
    view.look(
        JobObservation(NOW, {}, None, led=False, ends=FIRST, unable={"c2": "y", "c1": "no task x"})
    )
    assert view.state(NOW) == ("waiting for a coordinator", "c1: no task x; c2: y")
    view.look(JobObservation(NOW, {}, None, led=True, ends=FIRST))
    assert view.state(NOW) == ("waiting for a coordinator", "a coordinator is taking over")
    view.look(JobObservation(NOW, board_away="connection refused", ends=FIRST))
    assert view.state(NOW) == (
        "waiting for a server",
        "Redis is unavailable: connection refused",
    )


def test_member_that_cannot_take_part_degrades_the_job_with_its_reason() -> None:
    view = running(rows(4), 1, 200, at_s=NOW)
    group = GroupStatus(
        (WorkerId("w1"),), {WorkerId("w2"): "w2 and w1 cannot connect to each other"}
    )
    look = JobObservation(
        NOW, {"w1": "alive", "w2": "alive"}, leader_status(), led=True, ends=FIRST
    )
    unable = {"worker w3": "no room", "worker w1": "it has joined since", "c2": "no task x"}
    view.look(look._replace(unable=unable))
    assert view.state(NOW) == ("degraded", "worker w3: no room")
    left_out = replace(leader_status(), group=group)
    view.look(look._replace(leader_status=left_out))
    assert view.state(NOW) == ("degraded", "w2 is left out: w2 and w1 cannot connect to each other")


def test_worker_with_another_model_is_reported_by_the_leader_or_itself() -> None:
    view = running(rows(4), 1, 200, at_s=NOW)
    status = replace(leader_status(), left_out={WorkerId("w2"): "another model"})
    look = JobObservation(NOW, {"w1": "alive", "w2": "alive"}, status, led=True, ends=FIRST)
    view.look(look)
    assert view.state(NOW) == ("degraded", "w2 is left out: another model")
    view.look(look._replace(unable={"worker w2": "another model; '0.weight' is not there"}))
    assert view.state(NOW) == ("degraded", "worker w2: another model; '0.weight' is not there")
    backlog = look._replace(statuses={"w2": "alive"}, ends={PLACES[0]: 900})
    view.look(backlog)
    assert view.state(NOW).word == "waiting for workers"
    assert view.state(NOW).why.endswith("wait and w2 is left out: another model")


def aggregated(block: dict[str, str] | None) -> JobRecord:
    """Return the job with this `aggregation` block."""
    record = job()
    checkpoint = record.spec.checkpoint.model_copy(update={"every_updates": 5})
    spec = record.spec.model_copy(update={"checkpoint": checkpoint})
    return replace(record, spec=changed_spec(spec, {"aggregation": block}))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("transport", "gloo", "nccl"), ("wire", "float32", "bfloat16")],
)
def test_what_travels_in_a_running_group_cannot_be_changed(
    name: str, before: str, after: str
) -> None:
    running, wanted = aggregated({"mode": "group"}).spec, {"mode": "group", name: after}

    with pytest.raises(
        UserError, match=rf"{name}: cannot change from {before} to {after} directly; change to agg"
    ):
        changed_spec(running, {"aggregation": wanted})

    on_the_board = changed_spec(running, {"aggregation": None})
    among = changed_spec(on_the_board, {"aggregation": wanted}).aggregation
    assert getattr(among, name) == after


@pytest.mark.parametrize("holds", [UNSET, 0, 32], ids=["board", "replicas", "slices"])
def test_job_whose_weight_handover_waits_for_storage_is_degraded(
    holds: int | UnsetType,
) -> None:
    layouts: dict[str, int | UnsetType] = {"board": UNSET, "replicas": 0, "slices": 32}
    view = running(rows(4), 1, 200)
    view.feed_update(
        2, replace(lead(0, base=ModelId(0, 1), epoch=2), slices=holds), LONG_AGO_S, LONG_AGO_S
    )
    for layout, slices in layouts.items():
        block = None if layout == "board" else {"mode": "group", "layout": layout}
        view.record = aggregated(block)
        state = view.state(NOW)
        if slices == holds:
            assert state.word != "degraded"
        else:
            assert state.word == "degraded"
            assert "`aggregation` was changed" in state.why
        lately = view.state(LONG_AGO_S + QUIET_S / 2)
        # A healthy job, too, may be without an update for this time.
        assert lately.word != "degraded"


def test_layout_of_the_weights_is_unknown_with_a_partial_history() -> None:
    view = JobProgress(job(), 500)
    assert view.state(NOW).word != "degraded"
    view.record = aggregated({"mode": "group"})
    view.feed_update(501, update(480, 9, *rows(2)), LONG_AGO_S, LONG_AGO_S)
    view.look(JobObservation(NOW, {"w1": "alive"}, leader_status(), led=True, ends=FIRST))
    assert view.state(NOW).word != "degraded"
    view.feed_update(502, lead(480, base=ModelId(480, 9), epoch=502), LONG_AGO_S, LONG_AGO_S)
    assert view.state(NOW).word == "degraded"


def test_job_whose_only_worker_cannot_join_waits_for_workers() -> None:
    view = running(rows(4), 1, 200)
    unable = {"worker w3": "no room"}
    view.look(
        JobObservation(NOW, {}, leader_status(), led=True, ends={PLACES[0]: 900}, unable=unable)
    )
    assert view.state(NOW).word == "waiting for workers"
    assert view.state(NOW).why.endswith("wait and worker w3: no room")


def test_job_without_workers_names_the_jobs_that_have_them() -> None:
    view = running(rows(4), 1, 200)
    turn = "another job has its turn: the 3 workers are working for `a` and `b`"
    seen = JobObservation(
        NOW, {}, leader_status(), led=True, ends={PLACES[0]: 900}, unable={TURN: turn}
    )
    view.look(seen)
    assert view.state(NOW) == ("waiting for workers", f"780 records wait and {turn}")
    view.look(seen._replace(unable={TURN: turn, "worker w3": "no room"}))
    assert view.state(NOW).why.endswith("wait and worker w3: no room")
    view.look(seen._replace(statuses={"w1": "alive"}))
    assert view.state(NOW).word == "running"
    view.look(seen._replace(led=False))
    assert "turn" not in view.state(NOW).why


def test_job_with_recent_updates_is_running_without_redis() -> None:
    view = running(rows(4), 1, 200, at_s=NOW - QUIET_S / 2)
    view.look(JobObservation(NOW, board_away="connection refused", ends=FIRST))
    assert view.state(NOW) == ("running", "")


def test_job_waits_for_workers_only_while_records_wait() -> None:
    view = running(rows(2), 0, 200)
    view.look(
        JobObservation(NOW, {}, leader_status(), led=True, ends=dict(FIRST) | {PLACES[0]: 200})
    )
    assert view.state(NOW) == ("waiting for workers", "100 records wait and no worker runs")
    view.look(
        JobObservation(
            NOW, {"w1": "leaving"}, leader_status(), led=True, ends={**FIRST, PLACES[0]: 200}
        )
    )
    assert view.state(NOW).word == "waiting for workers"
    view = running(rows(2), 1, 120)
    view.look(
        JobObservation(NOW, {}, leader_status(), led=True, ends=dict(FIRST) | {PLACES[0]: 120})
    )
    assert view.state(NOW).word == "drained"


def test_job_is_degraded_while_records_wait_for_a_schema() -> None:
    view = running(rows(2), 1, 200)
    waiting = {"w2": REGISTRY_LATE, "w1": REGISTRY_LATE, "w3": REGISTRY_UNREACHABLE}
    view.look(view.seen._replace(waiting=waiting))
    word, why = view.state(NOW)
    assert word == "degraded"
    assert why.split("; ") == [
        "w1, w2: records wait for a schema: the schema registry did not answer in time",
        "w3: records wait for a schema: the schema registry cannot be reached",
    ]


def test_job_that_an_evaluator_cannot_track_is_degraded_with_the_reason() -> None:
    view = running(rows(2), 1, 200)
    view.look(view.seen._replace(unable={"evaluator e1": "DOLL_MLFLOW is not set"}))
    assert view.state(NOW) == ("degraded", "evaluator e1: DOLL_MLFLOW is not set")
    view.look(view.seen._replace(led=False))
    assert "evaluator" not in view.state(NOW)[1]


def test_job_is_drained_once_all_records_are_settled_and_none_arrives() -> None:
    assert running(rows(2), 1, 120).state(NOW) == (
        "drained",
        "all records are settled, and no new ones arrive",
    )
    assert running(rows(2), 1, 120, at_s=NOW - 1).state(NOW).word == "running"
    assert running([], 0, 100).state(NOW) == ("waiting for records", "no record has arrived yet")


def test_job_waits_for_records_until_an_update_has_enough() -> None:
    # An update needs two batches of ten records. One batch and nine unclaimed records wait.
    view = running(rows(3), 1, 139)
    assert view.state(NOW) == (
        "waiting for records",
        "an update needs 2 batches of 10 records; 1 batch and 9 records are waiting",
    )
    # A worker is about to claim ten records.
    assert running(rows(3), 1, 140).state(NOW).word == "running"
    assert running(rows(4), 1, 140).state(NOW).word == "running"  # an update is in flight
    # The leader's rule chose this K.
    by_rule = replace(update(0, 2, batch(1)), synchrony=Synchrony(4))
    view.feed_update(2, by_rule, NOW - QUIET_S, NOW - QUIET_S)
    assert "an update needs 4 batches of 10 records; 0 batches and 9 " in view.state(NOW).why
    view = running(rows(3), 1, 139)
    # Each of two workers may have nine of the unclaimed records, too few for a batch.
    view.look(
        JobObservation(
            NOW,
            dict.fromkeys("ab", "alive"),
            leader_status(),
            led=True,
            ends={**FIRST, PLACES[0]: 148},
        )
    )
    assert view.state(NOW).word == "waiting for records"


@pytest.mark.parametrize(
    ("end", "too_few", "why"),
    [
        (121, ("w1",), "1 record waits: batch normalization needs two"),
        (122, ("w1", "w2"), "2 records wait: batch normalization needs two at each of 2 workers"),
    ],
)
def test_too_few_records_for_batch_normalization_are_lag_with_a_reason(
    end: int, too_few: tuple[str, ...], why: str
) -> None:
    record = job()
    spec = record.spec.model_copy(update={"batch_linger_s": 0.5})
    view = JobProgress(replace(record, spec=spec))
    view.feed_update(0, lead(), NOW, NOW)
    for offset, each in enumerate(rows(2)):
        view.claims.feed(offset, claim_of(each))
    view.feed_update(1, update(0, 1, *rows(2)), NOW - QUIET_S, NOW - QUIET_S)
    ends = {**FIRST, PLACES[0]: end}
    alive = dict.fromkeys(("w1", "w2"), "alive")
    view.look(JobObservation(NOW, alive, leader_status(), led=True, ends=ends, too_few=too_few))
    assert view.lag == end - 120
    assert view.state(NOW) == ("waiting for records", why)


def test_job_is_degraded_above_a_share_of_unusable_recent_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = rows(200)
    # No record of this batch decodes, so the batch is in no update.
    made[7] = rows(8, skipped=BATCH)[7]
    view = JobProgress(job())
    view.feed_update(0, lead(), NOW, NOW)
    for offset, each in enumerate(made):
        view.claims.feed(offset, claim_of(each))
    ends = dict(FIRST) | {PLACES[0]: 100 + 200 * BATCH}
    view.look(JobObservation(NOW, {"w1": "alive"}, leader_status(), led=True, ends=ends))
    assert view.state(NOW).word == "running"  # 10 of 2,000
    monkeypatch.setattr(progress, "DEGRADED_SHARE", 0.004)
    assert view.state(NOW) == ("degraded", "of the last 2,000 records 10 could not be decoded")
    view.feed_update(1, Quarantined(0, made[0], "poison: it raised"), NOW, NOW)
    assert view.state(NOW).why == (
        "of the last 2,000 records 10 could not be decoded and 10 were quarantined"
    )


def test_records_skipped_long_ago_do_not_degrade_the_job() -> None:
    view = JobProgress(job())
    view.feed_update(0, lead(), NOW, NOW)
    for offset, each in enumerate(
        rows(200, skipped=BATCH) + rows(RECENT_RECORDS // BATCH + 200)[200:]
    ):
        view.claims.feed(offset, claim_of(each))
    view.look(JobObservation(NOW, {"w1": "alive"}, leader_status(), led=True, ends=FIRST))
    assert view.numbers(NOW).skipped == 200 * BATCH
    assert view.state(NOW).word != "degraded"


def test_job_whose_records_all_fail_to_decode_is_degraded_not_drained() -> None:
    view = JobProgress(job())
    for offset, each in enumerate(rows(20, skipped=BATCH)):
        view.claims.feed(offset, claim_of(each))
    ends = dict(FIRST) | {PLACES[0]: 100 + 20 * BATCH}
    view.look(JobObservation(NOW, {"w1": "alive"}, leader_status(), led=True, ends=ends))
    assert view.numbers(NOW).lag == 0
    assert view.state(NOW) == (
        "degraded",
        "200 of the last 200 records of clicks could not be decoded: 200 torn",
    )


def test_slow_stream_that_does_not_decode_is_named_with_top_reasons() -> None:
    view = JobProgress(job())
    busy, slow = PLACES[0], PLACES[2]
    ends = dict(FIRST)

    def claim(place: Partition, count: int, bad: dict[str, int]) -> None:
        start = at = ends[place]
        ends[place] += count
        skipped = list[Skipped]()
        for reason, records in bad.items():
            skipped.append(Skipped(*place, at, reason, (1,) * (records - 1)))
            at += records
        spans, samples = (Span(*place, start, ends[place]),), count - sum(bad.values())
        view.claims.feed(claims.pop(0), BatchReady(WorkerId("w1"), spans, samples, tuple(skipped)))

    claims = list(range(100))
    for _ in range(60):
        claim(busy, 500, {})
    bad = {"label: is missing": 4, "no JSON": 8, "x\n" * 90: 2, "has 3 bytes": 1}
    for number in range(12):
        claim(slow, 100, bad if number == 11 else {})
    view.look(JobObservation(NOW, {"w1": "alive"}, leader_status(), led=True, ends=ends))

    reasons = f"8 no JSON; 4 label: is missing; 2 {'x ' * 48}x..."
    why = f"15 of the last 1,000 records of {slow.topic} could not be decoded: {reasons}"
    assert view.state(NOW) == ("degraded", why)
    for _ in range(11):
        claim(slow, 100, {})
    assert view.state(NOW).word != "degraded"


# --- partial histories ----------------------------------------------------------------------------


def test_progress_comes_from_the_leader_status_with_a_partial_history() -> None:
    view = JobProgress(job(), updates_start=500, control_start=7)
    # The ledger is incomplete, so the view cannot tell if this claim is accepted.
    view.claims.feed(7, claim_of(rows(1)[0]))
    skipped = {"clicks": 2}
    view.feed_update(501, replace(update(480, 41, batch(1)), skipped=skipped), NOW, NOW)
    view.feed_update(502, lead(480, epoch=502), NOW, NOW)
    view.feed_update(503, replace(update(502, 1, batch(1)), skipped=skipped), NOW, NOW)  # again
    numbers = view.numbers(NOW)
    assert (numbers.whole, numbers.lag, numbers.waiting, numbers.skipped) == (False, None, None, 2)
    ends = dict.fromkeys(PLACES, 200)
    claimed = dict.fromkeys(PLACES, 180)
    settled = dict.fromkeys(PLACES, 100) | {PLACES[0]: 180, PLACES[1]: 180}
    seen = LeaderStatus(0, 9, claimed, 9, waiting=3, live=2, settled=settled)
    view.look(JobObservation(NOW, {}, seen, led=True, ends=ends))
    # 20 records per partition are unclaimed. 3 batches of 10 wait, all of the stream that no
    # checkpoint covers.
    assert view.lag == 80 + 30
    assert [(each.lag, each.settled) for each in view.streams()] == [(40, 160), (70, 0)]


# --- parts of the view ----------------------------------------------------------------------------


def test_rate_is_the_growth_over_the_last_ten_seconds() -> None:
    view = JobProgress(job())
    assert [state.rate_per_s for state in view.streams()] == [None, None]
    for second in range(31):
        count = 5 * second if second <= 20 else 100 + 50 * (second - 20)
        ends = {PLACES[0]: count, PLACES[1]: count, PLACES[2]: 7, PLACES[3]: 0}
        view.look(JobObservation(float(second), ends=ends))
    assert [state.rate_per_s for state in view.streams()] == [pytest.approx(100.0), 0.0]


def test_rate_and_lag_become_unknown_without_kafka() -> None:
    view = JobProgress(job())
    for second in range(5):
        view.look(JobObservation(float(second), ends=FIRST))
    view.look(JobObservation(6.0))
    # One missing answer proves nothing.
    assert view.lag == 0
    view.look(JobObservation(30.0))
    assert view.lag is None
    assert [state.rate_per_s for state in view.streams()] == [None, None]


def test_update_totals_exclude_what_was_taken_back() -> None:
    updates = Updates(STREAMS)
    made = [batch(1), batch(2, stream="views")]
    updates.append(update(0, 1, batch(0)), 1.0)
    updates.append(update(0, 2, *made, short="linger"), 2.0)
    assert updates.offsets == {"clicks": 2 * BATCH, "views": BATCH}
    [row] = updates.rows(2, 2)
    assert row.short == "linger"
    assert updates.take_back(1)
    assert +updates.offsets == Counter({"clicks": BATCH})
    assert (updates.samples, updates.batches, updates.version) == (BATCH, 1, 1)


def test_lag_comes_from_the_leader_after_a_rollback_beyond_kept_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The view keeps the updates 17 to 20 of 20. A Lead then takes back all versions above 4.
    monkeypatch.setattr("common.jobs.progress.POINTS", 4)
    monkeypatch.setattr("common.jobs.progress.KEPT", 4)
    view = JobProgress(job())
    view.feed_update(0, lead(), NOW, NOW)
    for version in range(1, 21):
        view.claims.feed(version - 1, BatchReady(WorkerId("w0"), batch(version).address, BATCH))
        view.feed_update(version, update(0, version), NOW, NOW)
    assert view.numbers(NOW).whole
    view.feed_update(21, lead(0, ModelId(0, 4), epoch=21), NOW, NOW)
    view.look(JobObservation(NOW, {}, leader_status(waiting=3), led=True, ends=FIRST))
    numbers = view.numbers(NOW)
    assert (numbers.version, numbers.whole, numbers.waiting) == (4, False, 3)
    assert numbers.samples <= 4 * BATCH
    assert view.feed_update(22, update(21, 5), NOW, NOW)
    assert [row.version for row in view.updates.rows(1, 5)] == [5]


def switches(view: JobProgress) -> list[tuple[int, float | None, str]]:
    return [(row.version, row.at_s, row.mode) for row in view.updates.switches]


def test_mode_switches_are_recorded_and_removed_by_a_rollback() -> None:
    stale = {"synchrony": Synchrony(1, staleness=1), "base": 0, "equivalent": 1.5}
    view = JobProgress(job())
    view.feed_update(0, lead(), NOW, NOW)
    made = (update(0, 1, batch(0)), update(0, 2, batch(1)), update(0, 3, batch(2)))
    assert view.numbers(NOW).updates == 0
    for offset, (record, more) in enumerate(zip(made, ({}, stale, {}), strict=True), 1):
        view.feed_update(offset, replace(record, **more), NOW, NOW)
    assert switches(view) == [(2, NOW, "stale"), (3, NOW, "synchronous")]
    [row] = view.updates.rows(2, 2)
    assert (row.mode, row.stale) == ("stale", 1)
    view.feed_update(4, lead(0, base=ModelId(0, 2), epoch=4), NOW, NOW)
    assert switches(view) == [(2, NOW, "stale")]
    assert (view.numbers(NOW).stale, view.numbers(NOW).updates) == (1, 1.5)


def test_learning_rate_is_of_the_newest_update_or_of_the_schedule_start() -> None:
    record = job()
    schedule = ScheduleSpec(kind="cosine", updates=100, warmup_updates=10)
    optimizer = record.spec.optimizer.model_copy(update={"schedule": schedule})
    view = JobProgress(
        replace(record, spec=record.spec.model_copy(update={"optimizer": optimizer}))
    )
    assert view.numbers(NOW).learning_rate == pytest.approx(optimizer.learning_rate / 10)
    view.feed_update(0, lead(), NOW, NOW)
    for version, rate in ((1, UNSET), (2, 0.25)):
        assert view.feed_update(version, replace(update(0, version), rate=rate), NOW, NOW)
        assert view.numbers(NOW).learning_rate == (rate or None)


def test_window_metric_is_the_newest_value_and_others_are_means() -> None:
    view = JobProgress(job())
    view.feed_update(0, lead(), NOW, NOW)
    for version, value in ((1, 0.5), (2, 0.75)):
        made = replace(update(0, version), metrics={"auc": value, "accuracy": value})
        view.feed_update(version, made, NOW, NOW)
    assert view.numbers(NOW).metrics == {"auc": 0.75, "accuracy": 0.625}


def test_metric_mean_excludes_samples_without_a_value() -> None:
    view = JobProgress(job())
    view.feed_update(0, lead(), NOW, NOW)
    samples = update(0, 1).samples
    for version, value, measured in ((1, 0.5, UNSET), (2, 2.0, {"half": 1}), (3, 9.0, UNSET)):
        metrics = {"half": value} if version < 3 else {}
        made = replace(update(0, version), metrics=metrics, measured=measured)
        assert view.feed_update(version, made, NOW, NOW)
    mean = (0.5 * samples + 2.0) / (samples + 1)
    assert view.numbers(NOW).metrics == {"half": pytest.approx(mean)}
    assert [row.measured for row in view.updates.rows(1, 3)] == [{}, {"half": 1}, {}]


def test_gradients_in_parts_are_counted_until_their_update_is_taken_back() -> None:
    view = JobProgress(job())
    view.feed_update(0, lead(), NOW, NOW)
    for version, cut in ((1, 2), (2, UNSET), (3, 1)):
        assert view.feed_update(version, replace(update(0, version), cut=cut), NOW, NOW)
    assert view.numbers(NOW).cut_gradients == 3
    assert view.feed_update(4, lead(0, ModelId(0, 2), epoch=4), NOW, NOW)
    assert view.numbers(NOW).cut_gradients == 2


def shown(made: Synchrony) -> SynchronyAnswer:
    return SynchronyAnswer.model_validate(made, from_attributes=True)


def test_synchrony_is_of_the_newest_update_or_of_a_later_change() -> None:
    record = job()
    view = JobProgress(record)
    own = Synchrony(record.spec.group_size)
    assert (view.numbers(NOW).synchrony, view.numbers(NOW).stale) == (shown(own), None)
    view.feed_update(0, lead(), NOW, NOW)
    by_rule = Synchrony(2, staleness=1)
    view.feed_update(1, replace(update(0, 1, batch(0)), synchrony=by_rule), NOW, NOW)
    assert view.numbers(NOW).synchrony == shown(by_rule)
    block = {"synchronisation": {"mode": "asynchronous"}}
    view.record = replace(record, revision=1, spec=changed_spec(record.spec, block))
    view.look(JobObservation(NOW, {"a": "alive", "b": "alive"}))
    one_worker = Synchrony(own.group_size, 8, single_worker=True)
    assert view.numbers(NOW).synchrony == shown(one_worker)


def test_quarantine_by_an_unknown_leader_is_ignored() -> None:
    view = JobProgress(job())
    view.feed_update(0, lead(), NOW, NOW)
    assert not view.feed_update(1, quarantine(7, 3), NOW, NOW)
    assert view.feed_update(2, quarantine(0, 3), NOW, NOW)
    assert view.numbers(NOW).quarantined == 1


@pytest.mark.parametrize("lost", ["expired", "poison: it raised"])
def test_quarantine_of_a_batch_with_a_lost_claim_is_replaced(
    lost: str,
) -> None:
    # control   3: a claim, which Kafka loses; another claim then gets its offset
    # updates   0: lead | 1: quarantine of the lost batch | 2: of the other one | 3: its requeue
    view, again = JobProgress(job()), batch(3, "w1", samples=BATCH - 1)
    view.feed_update(0, lead(), NOW, NOW)
    view.feed_update(1, quarantine(0, 3, lost), NOW, NOW)
    assert view.feed_update(2, Quarantined(0, again, "poison: it raised"), NOW, NOW)
    numbers = view.numbers(NOW)
    assert (numbers.quarantined, numbers.requeueable, numbers.expired) == (1, 1, 0)
    assert view.feed_update(3, Requeued(again, "olga", 1.0), NOW, NOW)
    assert view.numbers(NOW).quarantined == 0


def test_records_deleted_unread_count_as_expired_and_not_as_lag() -> None:
    # clicks[0] has ten records from `FIRST` on, none of them claimed. Kafka deletes seven.
    view, place = JobProgress(job()), PLACES[0]
    ends = {**FIRST, place: FIRST[place] + 10}
    view.look(JobObservation(1.0, ends=ends, starts=FIRST))
    before = view.numbers(NOW)
    view.look(JobObservation(2.0, ends=ends, starts={**FIRST, place: FIRST[place] + 7}))
    # This poll does not know the starts of partitions. The view keeps those that it knows.
    view.look(JobObservation(3.0, ends=ends))
    after = view.numbers(NOW)
    assert (before.expired, before.lag) == (0, 10)
    assert (after.expired, after.lag) == (7, 3)


def unable_to_use(server: str, process: str, since_s: float, reason: str) -> dict[str, str]:
    """Return an outage notice in the form in which a process writes it to a job's board."""
    return {f"{OUTAGE}{server} {process}": f"{since_s:.0f} {reason}"}


SINCE = datetime.fromtimestamp(NOW - 60.0, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@pytest.mark.parametrize("server", ["kafka", "redis"])
def test_outage_of_a_required_server_is_the_state_once_updates_stop(server: str) -> None:
    name = server.title()
    view = running(rows(4), 1, 200, at_s=NOW)
    outages = {server: OutageNotice(NOW - 60.0, f"{name} is unavailable: refused")}
    view.look(JobObservation(NOW, {}, None, led=False, ends=FIRST, outages=outages))
    assert view.state(NOW).word != "waiting for a server"  # there was an update just now
    later = NOW + QUIET_S
    state = ("waiting for a server", f"{name} is unavailable since {SINCE}: refused")
    assert view.state(later) == state
    short = {server: OutageNotice(later - 1.0, "refused")}
    view.look(JobObservation(later, {}, None, led=False, ends=FIRST, outages=short))
    assert view.state(later).word == "waiting for a coordinator"


def test_server_unavailable_to_some_processes_is_reported_with_their_names() -> None:
    view = running(rows(4), 1, 200, at_s=NOW)
    look = JobObservation(NOW, {"w1": "alive"}, leader_status(), led=True, ends=FIRST)
    unable = unable_to_use("storage", "c1", NOW - 60.0, "no bucket")
    unable |= unable_to_use("storage", "w1", NOW - 20.0, "refused")
    view.look(look._replace(unable=unable))
    away = f"object storage is unavailable to c1, w1 since {SINCE}: no bucket"
    assert view.state(NOW) == ("degraded", away)
    view.look(look._replace(leader_status=None, unable=unable))
    assert view.state(NOW + QUIET_S) == ("waiting for a coordinator", away)
    view.look(look._replace(unable=unable_to_use("kafka", "c1", NOW - 60.0, "too few replicas")))
    assert view.state(NOW + QUIET_S) == (
        "waiting for a server",
        f"Kafka is unavailable to c1 since {SINCE}: too few replicas",
    )


@pytest.mark.parametrize(
    "since", ["", "yesterday", "-1", "1" * 12, "9" * 400, "9" * 5000, "\u0661"]
)
def test_forged_notice_of_an_outage_is_ignored(since: str) -> None:
    view = running(rows(4), 1, 200, at_s=NOW)
    look = JobObservation(NOW, {"w1": "alive"}, leader_status(), led=True, ends=FIRST)
    view.look(look._replace(unable={f"{OUTAGE}storage c1": f"{since} no bucket"}))
    assert view.state(NOW).word == "running"


def test_unavailable_registry_is_reported_with_the_time_since_when() -> None:
    view = running(rows(4), 1, 200, at_s=NOW)
    unable = unable_to_use("schema_registry", "w1", NOW - 60.0, "refused")
    waiting = {"w1": REGISTRY_UNREACHABLE}
    look = JobObservation(NOW, {"w1": "alive"}, leader_status(), led=True, ends=FIRST)
    view.look(look._replace(unable=unable, waiting=waiting))
    why = f"w1: records wait for a schema since {SINCE}: the schema registry cannot be reached"
    assert view.state(NOW) == ("degraded", why)
    unable |= unable_to_use("storage", "c1", NOW - 60.0, "no bucket")
    view.look(look._replace(unable=unable, waiting=waiting))
    away = f"object storage is unavailable to c1 since {SINCE}: no bucket"
    assert view.state(NOW) == ("degraded", f"{away}; {why}")
