"""Many jobs on one replica: candidates, and isolation from a faulty job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from common.config.settings import Settings
from common.errors import DeliveryError, OutsideError, TaskMissingError
from common.jobs import build as job_task
from common.jobs.build import trainer_of
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.jobs.store import StartCheckpoint
from common.kafka.memory import MemoryLog
from common.kafka.names import control_topic, dead_letter_topic, updates_topic
from common.kafka.port import NewRecord, NewTopic
from common.learning.base import Base
from common.learning.checkpoint import packed
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from common.storage.store import CheckpointStore
from common.telemetry.logging import fields_of
from services.coordinator import leadership, loop
from services.coordinator.effects import ending, lease
from services.coordinator.replica import LONGEST_S, Candidates
from tests.fakes.clock import ManualClock
from tests.unit.cli.test_job import JOB
from tests.unit.services.replicas import MemoryReplica, until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from common.jobs.store import JobRecord

STREAM = "clinic-a"
TASKS = "tests.unit.services.bad_tasks"
# Entrypoints, with the hold reasons of their jobs.
BAD = {
    "Raises": "build() of the task raised",
    "RefusesOptions": "refuses its options",
    "Exits": "SystemExit",
    "TooLarge": "the model takes 38,147 MiB, more than 16,384",
}


# --- candidates --------------------------------------------------------------------------------


def test_candidate_over_the_limit_waits_until_another_leaves() -> None:
    candidates, woken = Candidates(most=2), list[str]()

    def enters(job: str) -> bool:
        return candidates.enter(job, lambda: woken.append(job))

    assert [enters(job) for job in "abcd"] == [True, True, False, False]
    assert enters("a"), "the job is a candidate already"
    candidates.leave("b")
    assert woken == ["c"]
    assert enters("c")
    candidates.leave("a")
    candidates.leave("a")
    assert woken == ["c", "d"]


def test_candidate_that_stopped_waiting_is_not_woken() -> None:
    candidates, woken = Candidates(most=1), list[str]()
    for job in "abc":
        candidates.may_enter(job, lambda job=job: woken.append(job))  # type: ignore[misc]
        candidates.enter(job, lambda job=job: woken.append(job))  # type: ignore[misc]
    candidates.leave("b")
    candidates.leave("a")
    assert woken == ["c"]


def test_hanging_candidate_loses_its_place_after_a_timeout() -> None:
    clock = ManualClock()
    candidates = Candidates(most=1, clock=clock)
    assert candidates.enter("hangs", lambda: None)
    assert not candidates.may_enter("other", lambda: None)
    clock.advance(LONGEST_S)
    assert candidates.enter("other", lambda: None)


# --- many jobs ---------------------------------------------------------------------------------


class RefusingLog(MemoryLog):
    """A log that rejects records of one topic, as if writers had lost their rights."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = ""
        # A topic whose settings cause an unexpected error.
        self.faulty = ""

    def settings(
        self, topics: Collection[str], refused: list[str] | None = None
    ) -> dict[str, dict[str, str]]:
        """Fail for the faulty topic."""
        if self.faulty in topics:
            raise ZeroDivisionError("a bug")
        return super().settings(topics, refused)

    def append(self, record: NewRecord) -> int:
        """Fail for the refused topic."""
        if record.topic == self.refused:
            raise DeliveryError(f"{record.topic} takes nothing")
        return super().append(record)


class Bench:
    """A replica, and jobs beside a sound one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ending, "WRITE_RETRY_S", 0.01)
        self.log, self.redis = RefusingLog(), MemoryRedis()
        self.log.create_topics([NewTopic(STREAM)])
        self.job_store = JobOperations(self.log)
        self.submit("innocent")
        self.replicas = list[MemoryReplica]()

    def submit(self, name: str, task: str = "") -> JobRecord:
        """Submit a job."""
        text = JOB.replace("name: digits", f"name: {name}")
        if task:
            text = text.replace("name: image-classifier", f'entrypoint: "{TASKS}:{task}"')
            assert task in text
        return self.job_store.submit(parse_job(text))

    def replica(self, name: str = "c1", tasks: tuple[str, ...] = tuple(BAD)) -> MemoryReplica:
        """Start another replica."""
        settings = self.settings(tasks)
        self.replicas.append(MemoryReplica(self.log, self.redis, name, settings))
        return self.replicas[-1]

    def settings(self, tasks: tuple[str, ...] = tuple(BAD)) -> Settings:
        """Settings that allow these tasks."""
        return Settings(tasks=tuple(f"{TASKS}:{task}" for task in tasks))

    def board(self, job: str) -> MemoryBoard:
        """Return a job's board."""
        return MemoryBoard(self.redis, job)

    def close(self) -> None:
        """Stop all replicas."""
        for replica in self.replicas:
            replica.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    bench.close()


def test_replica_leads_all_jobs(bench: Bench) -> None:
    names = [f"digits-{number}" for number in range(12)]
    for name in names:
        bench.submit(name)
    replica = bench.replica()
    replica.look()
    until(lambda: all(map(replica.leads, names)), "the replica leads all jobs")


@pytest.mark.parametrize("task", BAD)
def test_job_whose_model_cannot_be_built_is_held_and_other_jobs_continue(
    bench: Bench, task: str
) -> None:
    bench.submit("bad", task)
    replica = bench.replica()
    replica.look_until(lambda: bench.job_store.get("bad").held, "the job is held")
    record = bench.job_store.get("bad")
    assert BAD[task] in record.reason
    assert "Traceback" in record.detail
    until(lambda: replica.leads("innocent"), "the other job is led")
    assert not replica.leads("bad")


def test_job_with_an_origin_of_another_model_is_held_with_the_first_difference(
    bench: Bench,
) -> None:
    spec, blobs = parse_job(JOB.replace("name: digits", "name: next")), MemoryBlobs()
    own = trainer_of(spec, ())()
    first, *others = own.kind.layout
    layout = (msgspec.structs.replace(first, names=("2.weight",)), *others)
    weights = np.frombuffer(own.weights(), np.float32)
    other = packed(msgspec.structs.replace(own.kind, layout=layout), weights, {})
    origin = StartCheckpoint("letters", 3, 400, CheckpointStore(blobs, "next").put_origin(other))
    bench.job_store.submit(spec, origin)
    replica = MemoryReplica(bench.log, bench.redis, "c1", Settings(), blobs)
    bench.replicas.append(replica)
    replica.look_until(lambda: bench.job_store.get("next").held, "the job is held")
    assert (
        "version 0, the weights of letters@400: at place 1 it has the parameter '2.weight'"
        " (16, 1, 3, 3) float32, but the task's model has the parameter '0.weight' (16, 1, 3, 3)"
        " float32"
    ) in bench.job_store.get("next").reason
    until(lambda: replica.leads("innocent"), "the other job is led")


def test_held_job_is_tried_again_after_resume(bench: Bench) -> None:
    bench.submit("bad", "Raises")
    replica = bench.replica()
    for _ in range(2):
        replica.look_until(lambda: bench.job_store.get("bad").held, "the job is held")
        replica.look()
        bench.job_store.patch("bad", "mended, as I thought", wanted="running")
    replica.look_until(lambda: bench.job_store.get("bad").held, "the job is held again")


def test_replica_without_the_task_leaves_the_job_to_one_that_has_it(bench: Bench) -> None:
    bench.submit("rare", "Rare")
    poor = bench.replica("c1", tasks=())
    poor.look()
    until(lambda: "c1" in bench.board("rare").unable(), "the replica reports that it is unable")
    assert "DOLL_TASKS" in bench.board("rare").unable()["c1"]
    until(lambda: poor.leads("innocent"), "the other job is led")

    rich = bench.replica("c2", tasks=("Rare",))
    rich.look()

    until(lambda: rich.leads("rare"), "the replica with the task leads")
    assert bench.job_store.get("rare").wanted == "running"


def test_replica_retries_a_job_after_its_missing_task_is_installed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "UNABLE_S", (0.01, 0.01))
    made = job_task.trainer_of
    missing = [True]

    def trainer_of(*given: object) -> object:
        if missing[0]:
            raise TaskMissingError("task x: No module named 'x'")
        return made(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(leadership, "trainer_of", trainer_of)
    replica = bench.replica()
    replica.look()
    until(lambda: "c1" in bench.board("innocent").unable(), "the replica reports that it is unable")

    # The task is installed meanwhile.
    missing[0] = False

    until(lambda: replica.leads("innocent"), "the replica leads the job")


@pytest.mark.parametrize("part", ["FlatModel", "Trainer"])
def test_job_whose_model_exceeds_the_memory_of_the_coordinator_is_held(
    bench: Bench, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes"
        )

    monkeypatch.setattr(f"common.jobs.build.{part}", allocate)
    replica = bench.replica()
    replica.look_until(lambda: bench.job_store.get("innocent").held, "the job is held")
    reason = bench.job_store.get("innocent").reason
    assert "memory does not suffice for the " in reason
    assert "(requested 8.00 GiB, free " in reason


@pytest.mark.parametrize("topic", [control_topic("bad"), updates_topic("bad")])
def test_job_with_deleted_topic_is_held_and_other_jobs_continue(bench: Bench, topic: str) -> None:
    bench.submit("bad")
    replica = bench.replica()
    replica.look()
    until(lambda: replica.leads("bad") and replica.leads("innocent"), "the replica leads both jobs")

    bench.log.delete_topics([topic])

    replica.look_until(lambda: bench.job_store.get("bad").held, "the job is held")
    assert f"the topic {topic} of this job does not exist" in bench.job_store.get("bad").reason
    assert replica.leads("innocent")


def test_job_with_deleted_stream_is_held_at_the_next_takeover(bench: Bench) -> None:
    log = bench.log
    log.create_topics([NewTopic("clinic-b")])
    text = JOB.replace("name: digits", "name: bad").replace("clinic-a", "clinic-b")
    bench.job_store.submit(parse_job(text))
    first = bench.replica("c1")
    first.look()
    until(lambda: first.leads("bad"), "the replica leads the job")
    log.delete_topics(["clinic-b"])
    first.close()

    second = bench.replica("c2")
    second.look_until(lambda: bench.job_store.get("bad").held, "the job is held")

    assert "the topic clinic-b of this job does not exist" in bench.job_store.get("bad").reason
    until(lambda: second.leads("innocent"), "the other job is led")


def test_job_is_held_if_kafka_keeps_refusing_its_records(bench: Bench) -> None:
    bench.submit("bad")
    bench.log.refused = updates_topic("bad")
    replica = bench.replica()
    replica.look_until(lambda: bench.job_store.get("bad").held, "the job is held")
    reason = bench.job_store.get("bad").reason
    assert reason.startswith("Kafka repeatedly refuses a record of this job: ")
    assert reason.endswith("; correct the cause, then run `doll job resume bad`")
    assert (
        replica.metrics.registry.get_sample_value(
            "doll_job_faults_total", {"job_name": "bad", "kind": "fault"}
        )
        or 0
    ) >= loop.DELIVERIES
    until(lambda: replica.leads("innocent"), "the other job is led")


@pytest.mark.parametrize(
    ("topic", "settings"),
    [
        (control_topic("bad"), {"cleanup.policy": "compact,delete"}),
        (updates_topic("bad"), {"retention.bytes": "1000000", "max.message.bytes": "1000"}),
    ],
)
def test_job_is_held_until_topics_that_would_lose_records_are_corrected(
    bench: Bench, topic: str, settings: dict[str, str]
) -> None:
    bench.submit("bad")
    right = bench.log.settings([topic])[topic]
    bench.log.configure(topic, settings)
    replica = bench.replica()
    replica.look_until(lambda: bench.job_store.get("bad").held, "the job is held")
    reason = bench.job_store.get("bad").reason
    assert reason.startswith(f"Kafka would lose records of the job: {topic} has ")
    repair = ",".join(f"{name}={right[name]}" for name in settings)
    assert f"--entity-name {topic} --add-config {repair}; then run `doll job resume bad`" in reason
    until(lambda: replica.leads("innocent"), "the other job is led")

    bench.log.configure(topic, right)
    bench.job_store.patch("bad", "set right", wanted="running")
    replica.look_until(lambda: replica.leads("bad"), "the job is led")


def test_unusual_settings_of_dead_letter_topic_do_not_hold_the_job(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.log.configure(
        dead_letter_topic(STREAM), {"cleanup.policy": "compact", "retention.ms": "1"}
    )
    replica = bench.replica()
    replica.look()
    until(lambda: replica.leads("innocent"), "the job is led")
    assert any(
        "clinic-a.dlq has cleanup.policy=compact, not delete" in str(fields_of(record))
        for record in caplog.records
    )


def test_internal_error_holds_only_its_job_after_retries_and_resume_works(
    bench: Bench,
) -> None:
    bench.submit("bad")
    bench.log.faulty = updates_topic("bad")
    replica = bench.replica()

    replica.look_until(lambda: bench.job_store.get("bad").held, "the job is held")
    record = bench.job_store.get("bad")
    assert "failed 5 times in a row, the last time with ZeroDivisionError: a bug" in record.reason
    assert "in settings" in record.detail
    until(lambda: replica.leads("innocent"), "the other job is led")
    replica.look()

    bench.log.faulty = ""
    bench.job_store.patch("bad", "a newer version", wanted="running")
    replica.look_until(lambda: replica.leads("bad"), "the replica leads the job")


class HastyOwner(JobOperations):
    """A job store with an operator who resumes a job as soon as the replica holds it."""

    def __init__(self, log: RefusingLog) -> None:
        super().__init__(log)
        self._source = log
        self.look: Callable[[], None] | None = None

    def hold(self, job: JobRecord, reason: str, detail: str = "") -> JobRecord:
        """Hold the job and let the operator resume it, before the replica reads both records."""
        held = super().hold(job, reason, detail)
        look, self.look = self.look, None
        if look is not None:
            self._source.faulty = ""
            self.patch(job.spec.name, "mended", wanted="running")
            look()
        return held


def test_job_resumed_right_after_it_was_held_continues(bench: Bench) -> None:
    bench.submit("bad")
    bench.log.faulty = updates_topic("bad")
    owner = HastyOwner(bench.log)
    replica = MemoryReplica(bench.log, bench.redis, job_store=owner)
    bench.replicas.append(replica)
    owner.look = replica.look

    replica.look()
    until(lambda: owner.look is None, "the job was held and resumed")

    replica.look_until(lambda: replica.leads("bad"), "the replica leads the job")


class EarlierOwner(HastyOwner):
    """A job store with another replica, which holds the job before this one does."""

    def hold(self, job: JobRecord, reason: str, detail: str = "") -> JobRecord:
        """Hold the job. Before the first time, another replica holds it, and it is resumed."""
        look, self.look = self.look, None
        if look is not None:
            self._source.faulty = ""
            super().hold(job, "another found it first")
            self.patch(job.spec.name, "mended", wanted="running")
            look()
        return super().hold(job, reason, detail)


@pytest.mark.parametrize("task", ["", "Raises"])
def test_job_resumed_before_a_late_hold_continues(bench: Bench, task: str) -> None:
    bench.submit("bad", task)
    bench.log.faulty = "" if task else updates_topic("bad")
    owner = EarlierOwner(bench.log)
    replica = MemoryReplica(bench.log, bench.redis, settings=bench.settings(), job_store=owner)
    bench.replicas.append(replica)
    owner.look = replica.look

    replica.look()
    until(lambda: owner.look is None, "the job was held and resumed")

    # The replica tries again. If the task raises again, it holds the job.
    if task:
        replica.look_until(lambda: len(bench.job_store.get("bad").changes) == 4, "the job is held")
    else:
        replica.look_until(lambda: replica.leads("bad"), "the replica leads the job")
    actions = [each.action for each in bench.job_store.get("bad").changes]
    assert actions == ["submitted", "held", "resumed", *["held"] * bool(task)]


def test_redis_that_refuses_commands_does_not_hold_the_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [True]
    puts = MemoryBoard.put_model

    def put_model(self: MemoryBoard, *given: object) -> None:
        if refused[0]:
            raise OutsideError("Redis denies SET")
        puts(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryBoard, "put_model", put_model)
    replica = bench.replica()
    replica.look()
    sample = replica.metrics.registry.get_sample_value

    def faults() -> float:
        return sample("doll_job_faults_total", {"job_name": "innocent", "kind": "fault"}) or 0

    until(lambda: faults() > loop.FAULTS, "the replica retries")
    refused[0] = False
    until(
        lambda: bench.board("innocent").get_leader_status() is not None, "the replica leads the job"
    )
    assert bench.job_store.get("innocent").wanted == "running"


def test_job_whose_frozen_tensors_changed_is_held_with_the_first_difference(bench: Bench) -> None:
    blobs, other = MemoryBlobs(), Base({"frozen": torch.full((2,), 3.0)})
    CheckpointStore(blobs, "bad").put_base(other.digest, other.save())
    bench.submit("bad", "Frozen")
    replica = MemoryReplica(bench.log, bench.redis, "c1", bench.settings(("Frozen",)), blobs)
    bench.replicas.append(replica)
    replica.look_until(lambda: bench.job_store.get("bad").held, "it is held")
    assert "the frozen 'frozen' is not the one of the job" in bench.job_store.get("bad").reason
