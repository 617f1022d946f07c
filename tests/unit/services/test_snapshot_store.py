"""Snapshots survive every failure of object storage, and no job starts over in silence."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from common.core.messages import ModelId, unused_number
from common.core.snapshots import Snapshot, genesis
from common.core.spans import LogPosition, Partition
from common.errors import CorruptError, FutureFormatError, UserError
from common.jobs.job_file import parse_job
from common.jobs.store import JobRecord, StartCheckpoint, by_stream
from common.learning.checkpoint import Kind, packed, unnamed
from common.redis.memory import MemoryBoard, MemoryRedis
from common.runtime.supervisor import Supervisor
from common.storage.memory import MemoryBlobs
from common.storage.snapshot_file import SnapshotFile, to_bytes, to_parts
from common.storage.store import TAKEN_BACK_S, CheckpointStore
from common.telemetry.logging import event_logger
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from common.telemetry.metrics.serving import Watchdogs
from common.wire.messages import frame
from load.harness.s3_servers import LIES, Lie
from services.coordinator.effects.snapshots import SnapshotStore
from tests.bad_blobs import DyingBlobs, LyingBlobs
from tests.fakes.clock import ManualClock
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.jobs.spec import JobSpec
    from common.storage.port import Blobs

FIRST = {Partition("clinic-a", 0): 5}
KNOWN = {Partition("clinic-a", 0): LogPosition(5)}
SPEC = parse_job(JOB + "checkpoint: {keep: 2}\n")
FOLDER = "digits/checkpoints/"
PATIENCE_S = 120.0
SEAL = "the job's secret"
MANY = 10**6


def saved(version: int, by: int = 3, loss: float = 0.5) -> SnapshotFile:
    """Return a snapshot whose weights name its leader and version."""
    snapshot = Snapshot(by, ModelId(by, version), version, 0, FIRST, losses=(loss,))
    return SnapshotFile(snapshot, b"weights of %d-%d" % (by, version))


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Bench:
    """Stores of one job, and their environment."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.board = MemoryBoard(MemoryRedis(), "digits")
        self.metrics = CoordinatorMetrics()
        self.faults = list[BaseException]()
        self.stored, self.verified = list[ModelId](), list[ModelId]()
        self.steps = Supervisor(None, Watchdogs(), event_logger("test"), threads=2)
        self._stores = list[SnapshotStore]()

    def store(
        self, blobs: Blobs | None, origin: StartCheckpoint | None = None, spec: JobSpec = SPEC
    ) -> SnapshotStore:
        """Return a replica's store."""
        record = JobRecord(spec, "running", by_stream(FIRST), "", 0.0, origin, seal=SEAL)
        self._stores.append(
            SnapshotStore(
                record,
                "c1",
                self.board,
                None if blobs is None else CheckpointStore(blobs, "digits"),
                logger=event_logger("coordinator"),
                steps=self.steps,
                metrics=self.metrics,
                wake=lambda: None,
                fail=self.faults.append,
                stored=self.stored.append,
                verified=self.verified.append,
                clock=self.clock,
            )
        )
        return self._stores[-1]

    def failures(self) -> float:
        """Return the number of checkpoints that could not be written."""
        found = self.metrics.registry.get_sample_value("doll_checkpoint_failures_total")
        return found or 0.0

    def close(self) -> None:
        """Close all stores."""
        for store in self._stores:
            store.end()
        assert self.steps.close(PATIENCE_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def wrote(blobs: Blobs, *snapshots: SnapshotFile) -> None:
    for each in snapshots:
        CheckpointStore(blobs, "digits").save(each.name, to_parts(each), 900.0)


def finished(blobs: Blobs) -> list[ModelId]:
    return CheckpointStore(blobs, "digits").finished()


def part(blobs: Blobs, version: int, name: str) -> str:
    (found,) = [each for each in blobs.names(FOLDER) if each.endswith(f"{version:012}/{name}")]
    return found


# --- checkpoints of a leader ---------------------------------------------------------------------


def test_checkpoint_manifest_contains_the_loss_and_old_ones_are_deleted(bench: Bench) -> None:
    blobs = MemoryBlobs()
    store = bench.store(blobs)
    for version, loss in ((10, 0.5), (20, 0.1), (30, 0.4), (40, 0.3)):
        store.put(saved(version, loss=loss), checkpoint=True)
        until(lambda: store.all_uploaded, "the checkpoint is uploaded")
    assert [name.version for name in finished(blobs)] == [40, 30, 20]
    checkpoint = CheckpointStore(blobs, "digits").open(ModelId(3, 20))
    assert (checkpoint.manifest.loss, checkpoint.manifest.created_s) == (0.1, 1000.0)


class HangingBlobs(MemoryBlobs):
    """Storage that writes only with permission."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let = threading.Event(), threading.Event()

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write after permission."""
        self.asked.set()
        assert self.let.wait(PATIENCE_S)
        super().put(name, data)


def test_hot_snapshots_continue_while_storage_hangs_and_newest_checkpoint_follows(
    bench: Bench,
) -> None:
    # storage  ──────│ hangs with 10 ────────────│ 10 │ 40 │
    # leader     10c      20c  25  30c  35  40c                (c: a checkpoint, too)
    blobs = HangingBlobs()
    store = bench.store(blobs)
    store.put(saved(10), checkpoint=True)
    assert blobs.asked.wait(PATIENCE_S)
    for version in range(20, 45, 5):
        store.put(saved(version), checkpoint=version % 10 == 0)
        assert [hot.snapshot.made.version for hot in store.hot()] == [version]
    assert not store.all_uploaded
    blobs.let.set()
    until(lambda: store.all_uploaded, "the checkpoint is uploaded")
    assert [name.version for name in finished(blobs)] == [40, 10]


class RefusingBlobs(MemoryBlobs):
    """Storage that refuses access at first."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = True

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write, or refuse."""
        if self.closed:
            raise UserError("check the bucket's policy")
        super().put(name, data)


@pytest.mark.parametrize("kind", ["away", "refusing"])
def test_newest_checkpoint_is_written_after_an_outage_and_failures_count(
    bench: Bench, kind: str
) -> None:
    memory, refusing = MemoryBlobs(), RefusingBlobs()
    dying = DyingBlobs(memory, 0)
    store = bench.store(dying if kind == "away" else refusing)
    for version in (10, 20, 30):
        store.put(saved(version), checkpoint=True)
        until(lambda: bench.failures() >= 1, "a failure is counted")
        assert [hot.snapshot.made.version for hot in store.hot()] == [version]
    dying.revive(MANY)
    refusing.closed = False
    until(lambda: store.all_uploaded, "the checkpoint is uploaded")
    assert [name.version for name in finished(memory if kind == "away" else refusing)] == [30]
    assert bench.faults == []


def test_closed_store_stops_retrying_during_an_outage(bench: Bench) -> None:
    store = bench.store(DyingBlobs(MemoryBlobs(), 0))
    store.put(saved(10), checkpoint=True)
    until(lambda: bench.failures() >= 1, "a failure is counted")
    store.end()
    assert bench.steps.close(PATIENCE_S)


class BrokenBlobs(MemoryBlobs):
    """Storage with a bug."""

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Raise an error that no store may raise."""
        raise RuntimeError(f"{len(data)} bytes of {name}: a bug")


def test_internal_error_in_an_upload_is_reported_to_the_actor_of_the_job(bench: Bench) -> None:
    bench.store(BrokenBlobs()).put(saved(10), checkpoint=True)
    until(lambda: len(bench.faults) == 1, "the fault is reported")
    assert isinstance(bench.faults[0], RuntimeError)


def test_reverted_checkpoint_is_deleted_a_day_later(bench: Bench) -> None:
    # leader 3             10 ── 20 ── 30
    # leader at 1,000 s           └──── 25, a day later 26
    blobs, epoch = MemoryBlobs(), unused_number(1000.0, 1)
    wrote(blobs, saved(10), saved(20), saved(30))
    store = bench.store(blobs)
    store.put(saved(20, by=epoch), checkpoint=False)
    until(lambda: store.age_s() == 100.0, "storage has been listed")
    assert finished(blobs) == [ModelId(3, 30), ModelId(3, 20), ModelId(3, 10)]
    store.put(saved(25, by=epoch), checkpoint=True)
    until(lambda: store.all_uploaded, "the checkpoint is uploaded")
    assert finished(blobs) == [ModelId(epoch, 25), ModelId(3, 30), ModelId(3, 20)]
    bench.clock.advance(TAKEN_BACK_S + 1)
    store.put(saved(26, by=epoch), checkpoint=True)
    until(lambda: store.all_uploaded, "the checkpoint is uploaded")
    assert finished(blobs) == [ModelId(epoch, 26), ModelId(epoch, 25)]


@pytest.mark.parametrize("lie", LIES)
def test_checkpoint_counts_as_stored_once_it_was_read_back(bench: Bench, lie: Lie) -> None:
    blobs = LyingBlobs()
    store = bench.store(blobs)
    store.put(saved(10), checkpoint=True)
    until(lambda: bench.verified == [ModelId(3, 10)], "the checkpoint is read back")
    blobs.lie = lie
    store.put(saved(20), checkpoint=True)
    until(lambda: bench.failures() >= 1 or store.all_uploaded, "the upload is tried")
    assert (ModelId(3, 20) in bench.verified) == store.all_uploaded
    blobs.lie = None
    until(lambda: bench.verified[-1] == ModelId(3, 20), "the checkpoint is read back")
    assert blobs.deleted == []
    assert bench.faults == []


# --- age of the newest checkpoint ----------------------------------------------------------------


def test_checkpoint_age_is_that_of_the_newest_checkpoint_of_any_leader(bench: Bench) -> None:
    blobs = MemoryBlobs()
    wrote(blobs, saved(10))  # at 900
    store = bench.store(blobs)
    assert store.age_s() is None
    store.put(saved(15, by=9), checkpoint=False)  # at 1000
    until(lambda: store.age_s() == 100.0, "storage has been listed")
    bench.clock.advance(50.0)
    assert store.age_s() == 150.0
    store.put(saved(20, by=9), checkpoint=True)
    until(lambda: store.all_uploaded, "the checkpoint is uploaded")
    bench.clock.advance(1.0)
    assert store.age_s() == 1.0


def test_checkpoint_age_counts_from_the_start_of_the_leader_during_an_outage(bench: Bench) -> None:
    dying = DyingBlobs(MemoryBlobs(), 0)
    store = bench.store(dying)
    store.put(saved(10), checkpoint=False)
    bench.clock.advance(60.0)
    store.put(saved(20), checkpoint=True)
    assert store.age_s() == 60.0
    dying.revive(MANY)
    until(lambda: store.all_uploaded, "the checkpoint is uploaded")
    assert store.age_s() == 0.0


def test_store_without_object_storage_has_no_checkpoint_age(bench: Bench) -> None:
    store = bench.store(None)
    store.put(saved(10), checkpoint=True)
    assert store.age_s() is None
    assert store.lasting().found == []
    assert "set DOLL_BLOBS" in store.lasting().said


# --- search of a candidate -----------------------------------------------------------------------


def found(store: SnapshotStore) -> dict[int, bytes | str]:
    """Return weights by version, or the reason why they cannot be read."""
    results = dict[int, bytes | str]()
    for stored in store.lasting().found:
        try:
            results[stored.snapshot.made.version] = stored.trainer()
        except CorruptError as error:
            results[stored.snapshot.made.version] = str(error)
    return results


def test_torn_checkpoint_is_skipped_for_the_previous_one(bench: Bench) -> None:
    blobs = MemoryBlobs()
    wrote(blobs, saved(10), saved(20), saved(30))
    blobs.put(part(blobs, 30, "manifest.json"), b"{")
    blobs.put(part(blobs, 20, "trainer.safetensors"), b"weights of 3-2O")
    results = found(bench.store(blobs))
    assert list(results) == [20, 10]
    assert str(results[20]).startswith("trainer.safetensors has 15 bytes of sha256")
    assert results[10] == b"weights of 3-10"


def test_search_reports_the_place_and_the_checkpoints_found(bench: Bench) -> None:
    blobs = LyingBlobs()
    wrote(blobs, saved(10), saved(20))
    blobs.put(part(blobs, 20, "manifest.json"), b"{")
    store, where = bench.store(blobs), "memory (digits/checkpoints/)"
    lasting = store.lasting()
    assert lasting.said == f"{where} has 1 readable checkpoint, the newest 3-10"
    assert list(lasting.torn) == [ModelId(3, 20)]
    blobs.lie = "latest"
    assert "`latest` does not parse: b'<html>" in store.lasting().said
    blobs.lie = "page"
    assert store.lasting().failed
    assert store.lasting().said == f"{where}: the answer is not a list"


def test_job_does_not_restart_from_scratch_if_all_checkpoints_are_torn(bench: Bench) -> None:
    blobs = MemoryBlobs()
    wrote(blobs, saved(10), saved(20))
    whole = dict(blobs.content)
    blobs.put(part(blobs, 20, "manifest.json"), b"")
    blobs.delete(part(blobs, 10, "trainer.safetensors"))
    store = bench.store(blobs)
    # A search starts over after each torn snapshot.
    for _ in range(2):
        found(store)
    assert "none can be used to continue (3-10: trainer.safetensors is missing" in store.unreadable
    assert "3-20: manifest.json does not parse" in store.unreadable

    blobs.content.update(whole)
    assert found(store) == {20: b"weights of 3-20", 10: b"weights of 3-10"}
    for name in blobs.names(FOLDER):
        blobs.delete(name)
    assert found(store) == {}
    assert store.unreadable == ""
    assert store.first(FIRST).snapshot == genesis(FIRST, KNOWN)


def test_checkpoint_that_was_never_finished_does_not_prevent_a_first_start(bench: Bench) -> None:
    blobs = MemoryBlobs()
    wrote(blobs, saved(10))
    blobs.delete(part(blobs, 10, "manifest.json"))
    # `latest` is moved only after all files are written.
    blobs.delete(FOLDER + "latest")
    store = bench.store(blobs)
    assert found(store) == {}
    assert store.unreadable == ""
    assert store.first(FIRST).trainer() == b""


def test_checkpoint_that_disappeared_after_completion_is_reported(bench: Bench) -> None:
    blobs = MemoryBlobs()
    wrote(blobs, saved(10))
    blobs.delete(part(blobs, 10, "manifest.json"))
    store = bench.store(blobs)
    assert found(store) == {}
    assert "(3-10: manifest.json is missing)" in store.unreadable


def test_checkpoint_of_a_later_format_raises(bench: Bench) -> None:
    blobs = MemoryBlobs()
    wrote(blobs, saved(10), saved(20))
    blobs.put(part(blobs, 20, "manifest.json"), b'{"format":2}')
    with pytest.raises(FutureFormatError, match="the checkpoint 3-20 has format 2"):
        bench.store(blobs).lasting()


@pytest.mark.parametrize("key", ["", "another secret"])
def test_hot_snapshot_with_wrong_key_or_later_format_is_skipped(bench: Bench, key: str) -> None:
    own, ahead = saved(1), saved(10**6, by=10**6)
    future = frame(msgspec.msgpack.encode({"format": 99}), b"")
    bench.store(None).put(own, checkpoint=False)
    assert bench.board.put_snapshot(10**6, to_bytes(ahead, key), "c1")
    assert bench.board.put_snapshot(10**6 + 1, future, "c1")

    assert [each.snapshot for each in bench.store(None).hot()] == [own.snapshot]


def test_torn_hot_snapshot_is_skipped(bench: Bench) -> None:
    store = bench.store(None)
    store.put(saved(10), checkpoint=False)
    bench.board.put_snapshot(9, b"torn", "c1")
    (hot,) = store.hot()
    assert (hot.title, hot.trainer()) == ("the hot snapshot 3-10", b"weights of 3-10")


# --- start from other weights --------------------------------------------------------------------


def test_first_version_uses_the_weights_of_the_origin_job(bench: Bench) -> None:
    blobs = MemoryBlobs()
    origin = StartCheckpoint(
        "letters", 7, 400, CheckpointStore(blobs, "digits").put_origin(b"theirs")
    )
    first = bench.store(blobs, origin).first(FIRST)
    assert (first.snapshot, first.trainer()) == (genesis(FIRST, KNOWN), b"theirs")


def test_changed_or_missing_origin_weights_raise(bench: Bench) -> None:
    blobs = MemoryBlobs()
    origin = StartCheckpoint(
        "letters", 7, 400, CheckpointStore(blobs, "digits").put_origin(b"theirs")
    )
    (name,) = blobs.names("digits/origin/")
    blobs.put(name, b"others")
    with pytest.raises(CorruptError, match=r"the weights of letters@400: .* has 6 bytes of sha256"):
        bench.store(blobs, origin).first(FIRST)
    with pytest.raises(CorruptError, match="the weights of letters@400, which are in object stor"):
        bench.store(None, origin).first(FIRST)


def test_store_without_the_lease_writes_only_checkpoints(bench: Bench) -> None:
    store, saved = (
        bench.store(MemoryBlobs()),
        SnapshotFile(Snapshot(3, ModelId(3, 1), 9, 0, FIRST), b"w"),
    )
    bench.board.hold_lease("c2", 60.0)

    store.put(saved, checkpoint=True)

    # The updates topic decides whether the checkpoint counts.
    until(lambda: store.all_uploaded, "the checkpoint is uploaded")
    assert store.hot() == []
    assert [each.snapshot for each in store.lasting().found] == [saved.snapshot]


def test_checkpoint_of_a_group_uses_the_state_that_a_member_stored(bench: Bench) -> None:
    blobs, weights = MemoryBlobs(), np.arange(3, dtype=np.float32)
    checkpoints, made = CheckpointStore(blobs, "digits"), ModelId(2, 7)
    data = packed(Kind("sgd", 3, 0, unnamed(3, 0)), weights, {})
    for version in (4, 7):
        checkpoints.put_state(ModelId(2, version), data)
    options = "aggregation: {mode: group}\nevaluation: {stream: clinic-test}\n"
    store = bench.store(blobs, spec=parse_job(JOB + options))
    snapshot = Snapshot(3, made, 9, 0, FIRST, stored=(made,), slices=0)

    store.put(SnapshotFile(snapshot, b""), checkpoint=True)

    until(lambda: store.all_uploaded, "the checkpoint is uploaded")
    [found] = store.lasting().found
    assert (found.snapshot.made, found.trainer()) == (made, data)
    assert blobs.names("digits/states/") == ["digits/states/2-7.safetensors"]
    offered = bench.board.offered_model()
    assert offered == (made, data)
    [hot] = store.hot()
    # The snapshot in Redis has no weights, so the store reads the state that the member stored.
    assert hot.trainer() == data
    later = Snapshot(3, ModelId(2, 8), 10, 0, FIRST, stored=(made,), slices=0)
    store.put(SnapshotFile(later, b""), checkpoint=False)
    [hot] = store.hot()
    with pytest.raises(CorruptError, match="only the workers have its weights"):
        hot.trainer()


def test_checkpoint_for_a_group_is_stored_as_its_members_copy_it(bench: Bench) -> None:
    blobs, made = MemoryBlobs(), ModelId(3, 7)
    store = bench.store(blobs)
    store.put(SnapshotFile(Snapshot(3, made, 9, 0, FIRST), b"numbers"), checkpoint=True, state=True)
    until(lambda: bench.stored == [made], "the checkpoint is uploaded")
    assert CheckpointStore(blobs, "digits").state(made) == b"numbers"
    [found] = store.lasting().found
    assert found.snapshot.stored == (made,)
