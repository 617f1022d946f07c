"""One replica's part in a job, in memory: the owner's changes take effect."""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from common.core.messages import Batch, ModelId, UpdateApplied, WorkerId
from common.core.settings import RateSchedule
from common.core.spans import LogPosition, Partition, Span
from common.errors import UnknownTopicError
from common.jobs.build import trainer_of
from common.jobs.job_file import parse_job
from common.jobs.operations import AfterLoss, JobOperations
from common.jobs.spec import ScheduleSpec
from common.kafka.memory import MemoryLog
from common.kafka.names import control_topic, updates_topic
from common.kafka.port import NewTopic
from common.learning.checkpoint import packed
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from common.storage.snapshot_file import SnapshotFile, from_bytes, to_bytes
from common.telemetry.logging import fields_of
from common.wire.messages import encode_audit
from services.coordinator.loop import protocol_settings
from tests.unit.cli.test_job import JOB
from tests.unit.services.replicas import PATIENCE_S, MemoryReplica, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.kafka.memory import MemoryTail
    from common.storage.port import Blobs

NAME = "digits"
UPDATES = Partition(updates_topic(NAME), 0)


class Begun(NamedTuple):
    """A reader of a partition was opened."""

    place: Partition
    offset: int  # first offset
    updates: int  # length of the updates topic


class RecordingLog(MemoryLog):
    """Records the offsets at which readers begin."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = list[Begun]()

    def tail(
        self,
        partition: Partition,
        position: int | LogPosition,
        on_ready: Callable[[], None] | None = None,
        *,
        prompt: bool = False,
    ) -> MemoryTail:
        """See the port."""
        with suppress(UnknownTopicError):  # no job yet
            end = self.bounds(UPDATES).end
            self.begun.append(Begun(partition, LogPosition.of(position).offset, end))
        return super().tail(partition, position, on_ready, prompt=prompt)


class BlockedBlobs(MemoryBlobs):
    """Storage whose writes wait for a test's permission."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write after the test's permission."""
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        super().put(name, data)


class Bench:
    """A job with two replicas; the first one leads."""

    def __init__(self, options: str = "", blobs: Blobs | None = None) -> None:
        self.log = RecordingLog()
        self.redis = MemoryRedis()
        self.board = MemoryBoard(self.redis, NAME)
        self.log.create_topics([NewTopic("clinic-a")])
        self.job_store = JobOperations(self.log)
        self.record = self.job_store.submit(parse_job(JOB + options))
        self.leader = MemoryReplica(self.log, self.redis, "c1", blobs=blobs)
        self.leader.look()
        until(lambda: self.leader.leads(NAME), "a replica leads")
        self.other = MemoryReplica(self.log, self.redis, "c2")
        self.other.look()
        until(lambda: self.other.takes_part_in(NAME), "the other replica is a candidate")
        self.later = list[MemoryReplica]()

    def both(self) -> tuple[MemoryReplica, MemoryReplica]:
        """Return the two replicas."""
        return self.leader, self.other

    def close(self) -> None:
        """Stop all replicas."""
        for replica in (*self.both(), *self.later):
            replica.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with closing(Bench()) as bench:
        yield bench


def test_deleted_job_ends_on_all_replicas_and_stays_deleted(bench: Bench) -> None:
    bench.job_store.patch(NAME, "enough", wanted="stopped")
    bench.job_store.delete(NAME)
    for replica in bench.both():
        replica.look_until(lambda each=replica: not each.takes_part_in(NAME), "the job has ended")  # type: ignore[misc]
    assert bench.job_store.read() == {}


def test_deleted_job_keeps_its_leader_until_the_last_checkpoint_is_written() -> None:
    # wanted   stopped | deleted
    # upload   ████████████████████ done
    # c1       ends, keeps the lease     leaves
    blobs = BlockedBlobs()
    with closing(Bench(blobs=blobs)) as bench:
        bench.job_store.patch(NAME, "enough", wanted="stopped")
        bench.leader.look_until(blobs.begun.is_set, "the leader writes the last checkpoint")
        bench.job_store.delete(NAME)
        bench.leader.look()
        leases = list[tuple[str, float] | None]()

        def renewed() -> bool:
            if (lease := bench.redis.jobs[NAME].lease) not in leases:
                leases.append(lease)
            return len(leases) > 3

        until(renewed, "the lease is renewed")
        assert len({lease and lease[0] for lease in leases}) == 1
        assert bench.leader.takes_part_in(NAME)
        blobs.may_end.set()
        bench.leader.look_until(lambda: not bench.leader.takes_part_in(NAME), "the job has ended")


def test_replicas_leave_a_job_whose_name_a_later_job_took(bench: Bench) -> None:
    later = replace(bench.record, submitted_s=bench.record.submitted_s + 1.0)
    for replica in bench.both():
        replica.jobs.follow({NAME: later})
    for replica in bench.both():
        until(lambda each=replica: not each.takes_part_in(NAME), "the job has ended")  # type: ignore[misc]


def test_stopped_job_ends_and_is_led_again_after_resume(bench: Bench) -> None:
    bench.job_store.patch(NAME, "enough", wanted="stopped")
    bench.leader.look_until(lambda: not bench.leader.takes_part_in(NAME), "the job has ended")
    bench.job_store.patch(NAME, "not enough", wanted="running")
    bench.leader.look_until(lambda: bench.leader.leads(NAME), "the replica leads again")


def test_closing_replica_releases_the_lease_at_once(bench: Bench) -> None:
    bench.leader.close()
    until(lambda: bench.other.leads(NAME), "the other replica leads")


def test_candidate_reads_updates_only_from_the_last_snapshot_on(bench: Bench) -> None:
    # This position is after the first leader's Lead.
    end = bench.log.bounds(UPDATES).end
    until(lambda: len(bench.board.snapshots()) == 1, "the first leader has a snapshot")
    bench.leader.close()
    until(lambda: len(bench.board.snapshots()) == 2, "the next leader has a snapshot")
    bench.log.begun.clear()
    bench.later.append(MemoryReplica(bench.log, bench.redis, "c3"))
    bench.other.close()
    bench.later[0].look_until(lambda: bench.later[0].leads(NAME), "the last replica leads")
    assert min(each.offset for each in bench.log.begun if each.place == UPDATES) > end


def test_candidate_reads_claims_only_once(bench: Bench) -> None:
    until(lambda: len(bench.board.snapshots()) == 1, "the first leader has a snapshot")
    lead = bench.log.bounds(UPDATES).end
    bench.log.begun.clear()
    bench.leader.close()
    until(lambda: len(bench.board.snapshots()) == 2, "the next leader has a snapshot")
    claims = Partition(control_topic(NAME), 0)
    assert [each for each in bench.log.begun if each.place == claims] == [Begun(claims, 0, lead)]


def test_earlier_deadline_stops_a_running_job(bench: Bench) -> None:
    beat(bench, "w1")
    bench.job_store.patch(NAME, "no money left", changed={"deadline_s": 1e-3})
    bench.leader.look_until(
        lambda: bench.job_store.get(NAME).wanted == "stopped", "the deadline has passed"
    )
    record = bench.job_store.get(NAME)
    assert (record.reason, record.revision) == ("its deadline has passed", 1)


def test_protocol_settings_follow_the_job_record(bench: Bench) -> None:
    changed = bench.job_store.patch(NAME, "", changed={"group_size": 7, "learning_rate": 0.5})
    settings = protocol_settings(changed)
    assert (settings.mode.group_size, settings.bound) == (7, 14)
    assert (settings.revision, settings.mode.learning_rate) == (1, 0.5)
    assert protocol_settings(bench.record).stop_at is None
    assert settings.schedule == RateSchedule()
    schedule = ScheduleSpec(kind="step", updates=9, warmup_updates=2, factor=0.5)
    optimizer = changed.spec.optimizer.model_copy(update={"schedule": schedule})
    scheduled = replace(changed, spec=changed.spec.model_copy(update={"optimizer": optimizer}))
    assert protocol_settings(scheduled).schedule == RateSchedule("step", 2, 9, 0.5)


def test_need_of_more_workers_is_logged_when_it_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def log_lines() -> int:
        return sum("window_too_small" in record.getMessage() for record in caplog.records)

    with closing(Bench("waiting_batches: 2\nsynchronisation: {mode: stale}\n")) as bench:
        beat(bench, "w1")
        beat(bench, "w2")
        until(lambda: live(bench) == 2, "both workers are seen")
        metrics = bench.leader.replica.metrics.registry
        busy = partial(metrics.get_sample_value, "doll_workers_busy_ratio", {"job_name": NAME})
        until(lambda: busy() == 1.0, "the workers are busy")
        # On a busy machine, the leader may have seen the first worker alone, and logged this.
        before = log_lines()
        beat(bench, "w2", "leaving")
        until(lambda: log_lines() == before + 1, "the window is logged as too small")


def beat(bench: Bench, worker: str, status: str = "alive", digest: str = "") -> None:
    """Send a worker's heartbeat, by default with the digest of the job's model."""
    digest = digest or trainer_of(bench.record.spec, ())().digest
    bench.board.beat(WorkerId(worker), status, 60.0, digest)


def test_worker_with_another_model_is_reported_once_and_gets_no_work(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    beat(bench, "w1")
    beat(bench, "w2", digest="0" * 16)
    until(lambda: live(bench) == 1, "one worker is seen")
    status = bench.board.get_leader_status()
    assert status is not None
    assert status.left_out.keys() == {"w2"}
    beat(bench, "w3")
    until(lambda: live(bench) == 2, "another worker is seen")
    said = [fields_of(each) for each in caplog.records if each.msg == "worker_left_out"]
    assert [each["worker"] for each in said] == ["w2"]
    assert "layout 0000000000000000, expected" in str(said[0]["reason"])


def snapshot_of_another_model(bench: Bench, version: int) -> bytes:
    """Return a hot snapshot of the leader in force, with another name for its first layer."""
    until(lambda: len(bench.board.snapshots()) == 1, "the first leader has a snapshot")
    (data,) = bench.board.snapshots()
    snapshot = from_bytes(data).snapshot
    own = trainer_of(bench.record.spec, ())()
    first, *others = own.kind.layout
    layout = (msgspec.structs.replace(first, names=("2.weight",)), *others)
    weights = np.frombuffer(own.weights(), np.float32)
    other = packed(msgspec.structs.replace(own.kind, layout=layout), weights, {})
    made = ModelId(snapshot.by, version)
    saved = SnapshotFile(msgspec.structs.replace(snapshot, made=made), other)
    return to_bytes(saved, bench.job_store.get(NAME).seal)


def test_trained_hot_snapshot_of_another_model_holds_the_job(
    bench: Bench,
) -> None:
    # The hot snapshot of version 1 has another model than the job, and storage has no checkpoint.
    other = snapshot_of_another_model(bench, 1)
    epoch = from_bytes(other).snapshot.by
    batch = Batch(0, WorkerId("w1"), (Span("clinic-a", 0, 0, 2),), 2)
    update = UpdateApplied(epoch, 1, (batch,), 2, 1.0, number=1)
    # The standby first: otherwise it leads as soon as the leader is gone.
    for replica in reversed(bench.both()):
        replica.close()
    with closing(bench.log.writer()) as writer:
        writer.append(UPDATES.topic, encode_audit(update))
    bench.redis.jobs[NAME].snapshots[epoch] = other
    later = lead_on(bench, "c3")
    later.look_until(lambda: bench.job_store.get(NAME).held, "the job is held")
    reason = bench.job_store.get(NAME).reason
    assert "at place 1 it has the parameter '2.weight' (16, 1, 3, 3) float32, but the" in reason
    assert "--after-loss --from-start` starts again from version 0" in reason


def live(bench: Bench) -> int:
    status = bench.board.get_leader_status()
    return 0 if status is None else status.live


def test_leader_reacquires_a_lease_that_redis_lost(bench: Bench) -> None:
    # Otherwise the other replica could acquire the lease first.
    bench.other.close()
    before = bench.board.get_leader_status()
    assert before is not None
    bench.redis.restart()
    until(
        lambda: bench.board.get_leader_status() is not None,
        "the leader has written its status again",
    )
    until(bench.board.is_leased, "the leader has its lease again")
    leader_status = bench.board.get_leader_status()
    assert leader_status is not None
    assert leader_status.epoch == before.epoch


OWN = UPDATES, Partition(control_topic(NAME), 0)


def litter(log: MemoryLog, place: Partition, count: int) -> None:
    """Write records that do not decode."""
    with closing(log.writer()) as writer:
        for _ in range(count):
            writer.append(place.topic, b"garbage")


def litter_claims(bench: Bench) -> None:
    """Write garbage into the control topic, and wait for a snapshot that contains it."""
    litter(bench.log, OWN[1], 3)

    def contained() -> bool:
        snapshots = [from_bytes(data).snapshot for data in bench.board.snapshots()]
        return any(each.control_position == 3 for each in snapshots)

    bench.leader.look_until(contained, "a snapshot contains the records")


def lead_on(bench: Bench, name: str) -> MemoryReplica:
    """Start another replica."""
    replica = MemoryReplica(bench.log, bench.redis, name)
    bench.later.append(replica)
    return replica


@pytest.mark.parametrize("place", OWN, ids=["updates", "control"])
def test_topic_that_lost_records_and_grew_again_holds_the_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: Partition
) -> None:
    # control  0 1 2 | lost, and others in their places: the log is longer than before
    litter_claims(bench)
    for replica in bench.both():
        replica.close()
    litter(bench.log, place, 9)
    monkeypatch.setattr(
        bench.log, "agrees", lambda known, _=None: {place: 0} if place in known else {}
    )

    later = lead_on(bench, "c3")
    later.look_until(lambda: bench.job_store.get(NAME).held, "the job is held")
    reason = bench.job_store.get(NAME).reason
    assert (
        "lost records that Kafka had acknowledged: it has other records from offset 0 on" in reason
    )
    assert f"`doll job resume {NAME} --after-loss --from-start`" in reason

    bench.job_store.patch(NAME, "go on", after_loss=AfterLoss(from_start=True))
    later.look_until(lambda: later.leads(NAME), "the replica leads from version 0")


@pytest.mark.parametrize("count", [0, 9], ids=["empty", "longer"])
@pytest.mark.parametrize("place", OWN, ids=["updates", "control"])
def test_recreated_topic_of_the_job_holds_it_until_resumed_from_start(
    bench: Bench, place: Partition, count: int
) -> None:
    litter_claims(bench)
    bench.log.recreate(place.topic)
    litter(bench.log, place, count)

    bench.leader.look_until(lambda: bench.job_store.get(NAME).held, "the job is held")
    reason = bench.job_store.get(NAME).reason
    assert f"the topic {place.topic} was deleted and recreated" in reason
    assert f"`doll job resume {NAME} --after-loss`" in reason
    bench.job_store.patch(NAME, "go on", after_loss=AfterLoss())
    bench.leader.look_until(lambda: bench.job_store.get(NAME).held, "the job is held again")
    reason = bench.job_store.get(NAME).reason
    assert f"`doll job resume {NAME} --after-loss --from-start` starts again" in reason
    bench.job_store.patch(NAME, "from the start, then", after_loss=AfterLoss(from_start=True))
    until_led(bench)
    assert bench.job_store.get(NAME).after_loss == 2


@pytest.mark.parametrize("place", OWN, ids=["updates", "control"])
def test_resume_from_start_recreates_a_deleted_topic_of_the_job(
    bench: Bench, place: Partition
) -> None:
    bench.log.delete_topics([place.topic])
    bench.leader.look_until(lambda: bench.job_store.get(NAME).held, "the job is held")
    reason = bench.job_store.get(NAME).reason
    assert f"the topic {place.topic} of this job does not exist" in reason
    assert f"`doll job resume {NAME} --after-loss --from-start` creates it again" in reason

    bench.job_store.patch(NAME, "go on", after_loss=AfterLoss(from_start=True))
    until_led(bench)


def until_led(bench: Bench) -> None:
    """Poll until one of the replicas leads."""

    def led() -> bool:
        for replica in bench.both():
            replica.look()
        return any(replica.leads(NAME) for replica in bench.both())

    until(led, "one replica leads")
