"""Effects of a coordinator's decisions if external services fail or change."""

from __future__ import annotations

import logging
from time import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace as with_

from common.core import commands as do
from common.core import events
from common.core.liveness import Heartbeat
from common.core.messages import (
    Batch,
    CheckpointStored,
    Gradient,
    LeaderStatus,
    ModelId,
    TriggerId,
    UpdateApplied,
    UpdateTrigger,
    WorkerId,
)
from common.core.snapshot_search import AWAITED
from common.core.snapshots import genesis
from common.core.spans import Span
from common.core.vectors import write_to
from common.errors import UserError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.memory import MemoryLog
from common.kafka.names import updates_topic
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded
from common.learning.checkpoint import weights_in
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from common.storage.snapshot_file import from_bytes
from common.telemetry.logging import event_logger, fields_of
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from common.telemetry.outages import Outage
from common.telemetry.tracing import NoTracer
from common.wire.messages import decode_audit
from common.wire.vectors import decode_sparse
from services.coordinator.effects.dispatch import Effects
from services.coordinator.inbox import CoordinatorInbox
from services.coordinator.metrics_observer import MetricsObserver
from services.coordinator.replica import JobContext
from tests.unit.cli.test_job import JOB
from tests.unit.services.replicas import MemoryReplica, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common.storage.port import Blobs

NAME = "digits"


class Bench:
    """A job with its coordinator's command executor."""

    def __init__(self, options: str = "", job: str = JOB, blobs: Blobs | None = None) -> None:
        self.log = MemoryLog()
        self.spec = parse_job(job + options)
        for stream in self.spec.streams:
            self.log.create_topics([NewTopic(stream)])
        self.job_store = JobOperations(self.log)
        record = self.job_store.submit(self.spec)
        self.redis = MemoryRedis()
        self.board = MemoryBoard(self.redis, NAME)
        self.replica = MemoryReplica(self.log, self.redis, blobs=blobs)
        self.metrics = CoordinatorMetrics()
        self.woken = 0  # wake-ups of the actor
        log = event_logger("test")
        self.inbox = CoordinatorInbox(self._wake, Outage(log, "redis"))
        self.job = JobContext(
            self.replica.replica,
            record,
            self.replica.replica.boards.board(record.id),
            self.inbox,
            MetricsObserver(self.spec, self.metrics, NoTracer()),
            log,
            self.inbox.outage,
        )
        self.effects = Effects(self.job, 1.0)

    def have_weights(self) -> events.SnapshotsFound:
        """Load the weights of the genesis."""
        (found,) = self.effects.carry_out(do.FindSnapshots("genesis"))
        assert isinstance(found, events.SnapshotsFound)
        list(self.effects.carry_out(do.RestoreSnapshot(found.snapshots[0])))
        return found

    def _wake(self) -> None:
        self.woken += 1

    def wakes(self, command: do.CoordinatorCommand, *expected: events.CoordinatorEvent) -> bool:
        """Carry out a command, check its answer, and return True if the answer woke the actor."""
        before = self.woken
        self.carry_out(command)
        assert list(self.inbox.read()) == list(expected)
        return self.woken > before

    def close(self) -> None:
        """Stop the executor."""
        self.effects.close()
        self.replica.close()

    def carry_out(self, command: do.CoordinatorCommand) -> None:
        """Carry out a command that has no immediate result."""
        assert list(self.effects.carry_out(command)) == []


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_hold_is_written_after_kafka_recovers(bench: Bench) -> None:
    bench.log.go_away()
    bench.carry_out(do.Hold("a checkpoint of another model"))
    bench.log.come_back()
    assert bench.job_store.get(NAME).wanted == "running"

    def is_written() -> bool:
        bench.effects.poll()
        return bench.job_store.get(NAME).wanted != "running"

    until(is_written, "the hold is written")
    held = bench.job_store.get(NAME)
    assert (held.wanted, held.reason) == ("paused", "a checkpoint of another model")


def test_awaited_checkpoint_is_named_in_job_state_and_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    reason = f"{AWAITED}7-40, but the list is empty; `doll job resume --after-loss` continues"
    bench.have_weights()
    for _ in range(2):
        bench.carry_out(do.AwaitCheckpoint(reason))

    expected = reason.replace("resume", f"resume {NAME}")
    assert bench.board.unable() == {bench.replica.replica.name: expected}
    assert bench.job.role == "standby"
    logged = [r for r in caplog.records if r.getMessage() == "checkpoint_awaited"]
    assert [fields_of(each)["reason"] for each in logged] == [expected]


def test_last_checkpoint_of_an_ending_job_is_named_in_the_updates_topic() -> None:
    bench = Bench(blobs=MemoryBlobs())
    try:
        found = bench.have_weights()
        snapshot = with_(found.snapshots[0], by=7)
        bench.carry_out(do.Begin(7, snapshot))
        bench.carry_out(do.CopyWeights())
        bench.carry_out(do.PublishSnapshot(snapshot, checkpoint=True))
        bench.carry_out(do.Finish("4 updates applied"))

        def finished() -> bool:
            bench.effects.poll()
            return bench.effects.ending.finished

        until(finished, "the leader has finished")
        topic = updates_topic(bench.job_store.get(NAME).id)
        records = [record for _, record in read_decoded(bench.log, topic, decode_audit)]
        assert records == [CheckpointStored(7, 0)]
    finally:
        bench.close()


def test_snapshot_time_of_a_version_stays_the_same_across_leaders(bench: Bench) -> None:
    snapshot = with_(bench.have_weights().snapshots[0], by=7, made_at_s=1000.0)
    bench.carry_out(do.Begin(7, snapshot))

    def published(made: ModelId) -> float:
        bench.carry_out(do.CopyWeights())
        changed = with_(snapshot, made=made, made_at_s=0.0)
        bench.carry_out(do.PublishSnapshot(changed, checkpoint=False))
        [data] = bench.board.snapshots()
        return from_bytes(data).snapshot.made_at_s

    began_s = time()
    assert published(snapshot.made) == 1000.0
    newer_s = published(ModelId(7, 1))
    assert began_s <= newer_s <= time()
    assert published(ModelId(7, 1)) == newer_s


def test_finished_job_is_stopped_with_the_reason(bench: Bench) -> None:
    bench.carry_out(do.Finish("4 updates applied"))
    record = bench.job_store.get(NAME)
    assert (record.wanted, record.reason) == ("stopped", "4 updates applied")


def test_finish_for_an_outdated_revision_does_not_stop_the_job(bench: Bench) -> None:
    bench.job_store.patch(NAME, "no hurry", changed={"deadline_s": 9000.0})
    bench.carry_out(do.Finish("its deadline has passed", 0))
    assert bench.job_store.get(NAME).wanted == "running"
    bench.carry_out(do.Finish("its deadline has passed", 1))
    assert bench.job_store.get(NAME).wanted == "stopped"


@pytest.mark.parametrize("command", [do.Hold("diverged"), do.Finish("4 updates applied")])
def test_hold_or_finish_leaves_a_deleted_job_deleted(
    bench: Bench, command: do.CoordinatorCommand
) -> None:
    bench.job_store.patch(NAME, "enough", wanted="stopped")
    bench.job_store.delete(NAME)
    bench.carry_out(command)
    assert bench.job_store.read() == {}


@pytest.mark.parametrize("command", [do.Hold("diverged"), do.Finish("4 updates applied")])
def test_hold_or_finish_does_not_affect_a_later_job_of_the_same_name(
    bench: Bench, command: do.CoordinatorCommand
) -> None:
    bench.job_store.patch(NAME, "enough", wanted="stopped")
    bench.job_store.delete(NAME)
    bench.job_store.submit(bench.spec)
    bench.carry_out(command)
    assert bench.job_store.get(NAME).reason == "submitted"


def test_answer_without_news_does_not_wake_the_actor(bench: Bench) -> None:
    one, two = WorkerId("one"), WorkerId("two")
    bench.board.beat(one, "alive", 60.0)
    first = events.WorkersSeen({one: Heartbeat("alive")})
    assert bench.wakes(do.ReadHeartbeats(), first)
    assert not bench.wakes(do.ReadHeartbeats(), first)
    bench.board.beat(two, "alive", 60.0)
    both = events.WorkersSeen({one: Heartbeat("alive"), two: Heartbeat("alive")})
    assert bench.wakes(do.ReadHeartbeats(), both)
    bench.board.beat(one, "leaving", 60.0)
    assert bench.wakes(
        do.ReadHeartbeats(),
        events.WorkersSeen({one: Heartbeat("leaving"), two: Heartbeat("alive")}),
    )
    # A new leadership has seen no workers yet.
    bench.inbox.leadership += 1
    again = events.WorkersSeen({one: Heartbeat("leaving"), two: Heartbeat("alive")})
    assert bench.wakes(do.ReadHeartbeats(), again)
    assert not bench.wakes(do.ReadHeartbeats(), again)
    status = do.PutLeaderStatus(LeaderStatus(3, 0, {}, 0, 0, 1, {}))
    assert bench.wakes(status)
    assert not bench.wakes(status)
    bench.board.wipe()
    assert bench.wakes(status, events.BoardWiped())


def test_leader_moves_to_another_trigger_stream_if_a_forged_id_blocks_its_own(
    bench: Bench,
) -> None:
    found = bench.have_weights()
    bench.carry_out(do.Begin(3, found.snapshots[0]))
    forged = UpdateTrigger(TriggerId(2**62, 1), ModelId(2**62, 1), ())
    assert bench.board.post_trigger(forged)
    bench.carry_out(do.PutLeaderStatus(LeaderStatus(3, 0, {}, 0, 0, 1, {})))
    bench.carry_out(do.PostTrigger(UpdateTrigger(TriggerId(3, 1), ModelId(3, 0), ())))
    bench.carry_out(do.PostTrigger(UpdateTrigger(TriggerId(3, 2), ModelId(3, 0), ())))
    leader_status = bench.board.get_leader_status()
    assert leader_status is not None
    triggers = bench.board.triggers(TriggerId(-1, 0), 1.0, leader_status.triggers)
    assert [trigger.id for trigger in triggers] == [TriggerId(3, 1), TriggerId(3, 2)]


def test_trigger_that_moves_is_written_to_another_stream_named_in_the_status(bench: Bench) -> None:
    found = bench.have_weights()
    bench.carry_out(do.Begin(3, found.snapshots[0]))
    bench.carry_out(do.PutLeaderStatus(LeaderStatus(3, 0, {}, 0, 0, 1, {})))
    bench.carry_out(do.PostTrigger(UpdateTrigger(TriggerId(3, 1), ModelId(3, 0), ())))
    bench.carry_out(do.PostTrigger(UpdateTrigger(TriggerId(3, 2), ModelId(3, 0), ()), moves=True))
    leader_status = bench.board.get_leader_status()
    assert leader_status is not None
    triggers = bench.board.triggers(TriggerId(-1, 0), 1.0, leader_status.triggers)
    assert [trigger.id for trigger in triggers] == [TriggerId(3, 2)]


def test_learning_rate_reaches_the_trainer(bench: Bench) -> None:
    bench.have_weights()
    trainer, update = bench.job.trainer, UpdateApplied(3, 1, (), 1, 0.0)
    before = np.frombuffer(bytes(trainer.weights()), np.float32)
    vector = np.ones_like(before)
    gradient = Gradient(WorkerId("a"), ModelId(3, 0), (0,), 1, 1.0, {}, 0.1, vector=vector)
    bench.carry_out(do.AddGradient(1, gradient))
    bench.carry_out(do.Apply(1, update, 0.25))
    moved = np.frombuffer(trainer.weights(), np.float32) - before
    assert moved[0] == pytest.approx(-0.25)  # the first step of Adam
    bench.carry_out(do.AddGradient(2, gradient))
    with pytest.raises(UserError, match=r"learning_rate: must be above 0 and finite, got -1\.0"):
        bench.carry_out(do.Apply(2, update, -1.0))


def test_apply_reports_the_squared_sum_if_measured(bench: Bench) -> None:
    bench.have_weights()
    trainer, update = bench.job.trainer, UpdateApplied(3, 1, (), 1, 0.0)
    vector = np.full(len(trainer.weights()) // 4, 2, np.float32)
    gradient = Gradient(WorkerId("a"), ModelId(3, 0), (0,), 1, 1.0, {}, 0.1, vector=vector)
    bench.carry_out(do.AddGradient(1, gradient))
    found = list(bench.effects.carry_out(do.Apply(1, update, 0.25, measured=True)))
    assert found == [events.Summed(ModelId(3, 1), 4.0 * trainer.parameter_count)]


def test_logged_events_contain_the_epoch_until_the_leader_steps_down(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = bench.have_weights()
    bench.carry_out(do.Begin(7, found.snapshots[0]))
    bench.carry_out(do.StepDown("another coordinator has the lease"))
    bench.carry_out(do.Hold("diverged"))
    logged = {r.getMessage(): fields_of(r).get("epoch") for r in caplog.records if r.name == "test"}
    assert logged == {"leader_elected": 7, "leadership_lost": 7, "job_held": None}


@pytest.mark.parametrize("source", ["hot", "all"])
def test_snapshot_search_fails_if_redis_is_unavailable(bench: Bench, source: events.Source) -> None:
    bench.redis.kill()
    (said,) = bench.effects.carry_out(do.FindSnapshots(source))
    assert isinstance(said, events.AttemptFailed)


@pytest.mark.parametrize(
    "command",
    [
        do.PublishModel(ModelId(3, 0)),
        do.PostTrigger(UpdateTrigger(TriggerId(3, 1), ModelId(3, 0), ())),
    ],
)
def test_failed_board_write_is_reported_once_redis_is_back(
    bench: Bench, command: do.CoordinatorCommand
) -> None:
    found = bench.have_weights()
    bench.carry_out(do.Begin(3, found.snapshots[0]))
    bench.redis.kill()
    bench.carry_out(command)
    bench.redis.restart()
    status = LeaderStatus(3, 0, {}, 0, 0, 1, {})
    bench.board.put_leader_status(status)
    # The failed write is reported with the next answer, although that answer has no other news.
    assert bench.wakes(do.PutLeaderStatus(status), events.OrdersLost())
    assert not bench.wakes(do.PutLeaderStatus(status))


# --- trigger contents ----------------------------------------------------------------------------

WIDE = """
name: digits
streams: [clinic-a]
records:
  codec: tensor
  fields: {features: {dtype: float32, shape: [20000]}, label: {dtype: int64}}
task: {name: logistic-regression, classes: 2}
batch_size: 2
group_size: 1
optimizer: {name: sgd, learning_rate: 1.0}
"""


@pytest.fixture
def compressed() -> Iterator[Bench]:
    bench = Bench("compression: {significance: 0.5}\n", WIDE)
    found = bench.have_weights()
    bench.carry_out(do.Begin(3, found.snapshots[0]))
    yield bench
    bench.close()


def posted(bench: Bench, number: int, version: int) -> UpdateTrigger:
    bench.carry_out(do.PostTrigger(UpdateTrigger(TriggerId(3, number), ModelId(3, version), ())))
    [trigger] = bench.board.triggers(TriggerId(3, number - 1), 1.0)
    return trigger


def step(bench: Bench, version: int, numbers: Sequence[int], by: float) -> None:
    vector = np.zeros(len(bench.job.trainer.weights()) // 4, np.float32)
    vector[numbers] = by
    gradient = Gradient(WorkerId("a"), ModelId(3, version), (0,), 1, 1.0, {}, 0.1, vector=vector)
    bench.carry_out(do.AddGradient(version, gradient))
    batch = Batch(version, WorkerId("a"), (Span("clinic-a", 0, version, version + 1),), 1)
    update = UpdateApplied(3, version, (batch,), 1, 1.0)
    bench.carry_out(do.Apply(version, update, None))
    bench.carry_out(do.PublishModel(ModelId(3, version), whole=False))


def test_trigger_contains_changes_since_the_previous_version(compressed: Bench) -> None:
    # version 0   published whole
    # version 2   its trigger has the changes since 0; requested again, it is published whole
    # version 3   published whole, because all numbers change
    bench = compressed
    first, board = ModelId(3, 0), bench.board
    bench.carry_out(do.PublishModel(first))
    known = np.frombuffer(board.get_model(first) or b"", np.float32).copy()
    assert posted(bench, 1, 0).since is UNSET
    step(bench, 1, [5], 1.0)
    step(bench, 2, [7], 1.0)
    assert board.get_model(ModelId(3, 2)) is None
    trigger = posted(bench, 2, 2)
    assert trigger.since == first
    changes = decode_sparse(memoryview(trigger.changes or b""))
    assert set(changes.blocks.tolist()) >= {5, 7}
    write_to(known, changes)
    assert posted(bench, 3, 2).since is UNSET
    bench.carry_out(do.PublishModel(ModelId(3, 2)))
    assert known.tobytes() == board.get_model(ModelId(3, 2))
    step(bench, 3, range(len(known)), 1.0)
    assert posted(bench, 4, 3).since is UNSET
    assert board.get_model(ModelId(3, 3)) == bytes(bench.job.trainer.weights())


def changed(bench: Bench, options: str) -> None:
    bench.job.record = with_(bench.job.record, spec=parse_job(WIDE + options))
    bench.effects.models.change()


def whole(bench: Bench, version: int) -> bytes | None:
    return bench.board.get_model(ModelId(3, version))


def test_compression_can_be_switched_off_and_on_between_versions(compressed: Bench) -> None:
    # compression   ████████ 0.5 ████████│ off            │ largest 1 %
    # versions      0 whole    1 since 0   2, 3 whole        4 since 3
    bench = compressed
    bench.carry_out(do.PublishModel(ModelId(3, 0)))
    step(bench, 1, [5], 1.0)
    assert posted(bench, 1, 1).since == ModelId(3, 0)
    changed(bench, "")
    step_of_view = bytes(bench.job.trainer.weights())
    # A worker that has version 1 already has its view, so the trigger has no changes.
    assert posted(bench, 2, 1).since is UNSET
    bench.carry_out(do.PublishModel(ModelId(3, 1)))
    assert whole(bench, 1) is not None
    step(bench, 2, [7], 1e-9)
    trigger = posted(bench, 3, 2)
    assert trigger.since is UNSET
    assert whole(bench, 2) == bytes(bench.job.trainer.weights()) != step_of_view
    step(bench, 3, [7], 1.0)
    assert whole(bench, 3) == bytes(bench.job.trainer.weights())
    changed(bench, "compression: {changes: 0.01}\n")
    step(bench, 4, [9], 1.0)
    assert whole(bench, 4) is None
    trigger = posted(bench, 4, 4)
    assert trigger.since == ModelId(3, 3)
    known = np.frombuffer(whole(bench, 3) or b"", np.float32).copy()
    write_to(known, decode_sparse(memoryview(trigger.changes or b"")))
    bench.carry_out(do.PublishModel(ModelId(3, 4)))
    assert known.tobytes() == whole(bench, 4)


# --- versions for evaluators ---------------------------------------------------------------------


@pytest.fixture
def evaluated() -> Iterator[Bench]:
    bench = Bench("evaluation: {every_updates: 10}\n")
    bench.have_weights()
    yield bench
    bench.close()


def offered(bench: Bench) -> ModelId | None:
    found = bench.board.offered_model()
    return None if found is None else found[0]


def begins(bench: Bench, version: int) -> None:
    snapshot = with_(genesis({}), by=2, made=ModelId(2, version))
    bench.carry_out(do.Begin(3, snapshot))
    bench.carry_out(do.PublishModel(ModelId(3, version)))


def test_every_nth_version_is_offered_to_evaluators(evaluated: Bench) -> None:
    seen = list[ModelId | None]()
    begins(evaluated, 0)
    seen.append(offered(evaluated))
    for version in (1, 9, 10, 11, 20):
        step(evaluated, version, [0], 0.5)
        seen.append(offered(evaluated))
    first, tenth, twentieth = ModelId(3, 0), ModelId(3, 10), ModelId(3, 20)
    assert seen == [first, first, first, tenth, tenth, twentieth]
    found = evaluated.board.offered_model()
    assert found is not None
    assert found[0] == twentieth
    weights, _ = weights_in(found[1])
    assert weights.tobytes() == evaluated.board.get_model(twentieth)


def test_republished_version_is_not_offered_again(evaluated: Bench) -> None:
    begins(evaluated, 10)
    evaluated.board.wipe()
    evaluated.carry_out(do.PublishModel(ModelId(3, 10)))
    assert offered(evaluated) is None


def test_last_version_is_offered_whatever_its_number(evaluated: Bench) -> None:
    begins(evaluated, 17)
    assert offered(evaluated) is None
    evaluated.carry_out(do.Finish("17 updates applied"))
    assert offered(evaluated) == ModelId(3, 17)


def test_restored_weights_are_not_offered_as_the_version_before(
    evaluated: Bench,
) -> None:
    # A leader that steps down and restores a snapshot has weights without a version until it leads.
    begins(evaluated, 17)
    evaluated.carry_out(do.StepDown("another coordinator has the lease"))
    (found,) = evaluated.effects.carry_out(do.FindSnapshots("genesis"))
    assert isinstance(found, events.SnapshotsFound)
    assert len(list(evaluated.effects.carry_out(do.RestoreSnapshot(found.snapshots[0])))) == 1
    evaluated.carry_out(do.Finish("stopped by its owner", stopped=True))
    assert offered(evaluated) is None


def test_job_finishes_while_redis_is_unavailable(evaluated: Bench) -> None:
    begins(evaluated, 17)
    evaluated.redis.kill()
    evaluated.carry_out(do.Finish("17 updates applied"))
    assert evaluated.job_store.get(NAME).wanted == "stopped"


def test_job_resumed_before_its_stop_is_executed_continues(evaluated: Bench) -> None:
    # owner        stops           resumes
    # leader               Finish           its last checkpoint is there
    begins(evaluated, 17)
    evaluated.carry_out(do.Finish("stopped by its owner", stopped=True))
    assert evaluated.effects.ending.finished
    assert evaluated.job_store.get(NAME).wanted == "running"


def test_job_without_evaluation_offers_no_versions(bench: Bench) -> None:
    bench.have_weights()
    bench.carry_out(do.PublishModel(ModelId(3, 0)))
    bench.carry_out(do.Finish("enough"))
    assert offered(bench) is None
