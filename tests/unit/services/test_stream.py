"""A worker's stream thread with log and board in memory, and a manual clock."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.core.messages import BatchReady, LeaderStatus, WorkerId
from common.core.settings import WorkerSettings
from common.core.spans import LogPosition, Partition
from common.core.worker_reading import Worker
from common.data.codecs import make_codec
from common.data.fields import Field
from common.data.registered import RegisteredCodec
from common.errors import UnavailableError
from common.kafka.memory import MemoryLog
from common.kafka.names import control_topic, group_name
from common.kafka.port import LogTruncated, NewRecord, NewTopic
from common.kafka.schemas import JobSchemas
from common.redis.memory import MemoryBoard, MemoryRedis
from common.telemetry.logging import event_logger
from common.telemetry.metrics.worker import WorkerMetrics
from common.telemetry.tracing import trace_of
from common.wire import messages as wire
from services.worker.effects.board import WorkerBoard
from services.worker.effects.claims import ClaimSender
from services.worker.effects.schemas import SchemaFinder, SchemaGate
from services.worker.rows import BatchCache
from services.worker.stream import Stream
from services.worker.time_lag import TimeLag
from services.worker.traces import BatchTraces
from tests.fakes.clock import ManualClock
from tests.fakes.tracing import MemoryTracer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import pytest

    from common.core.liveness import Device
    from common.kafka.port import SchemaRegistry

JOB, W, P = "job", WorkerId("w1"), Partition("s", 0)
LINGER_S = 1.0
RECORDS = 5
TWO = {"id": np.arange(2)}
WALL_S = 4e9  # later than any time of a test


class FullBoard(MemoryBoard):
    """Redis without free memory: it answers reads and refuses writes."""

    full = False

    def beat(
        self,
        worker: WorkerId,
        status: str,
        ttl_s: float,
        digest: str = "",
        device: Device | None = None,
        life: str = "",
    ) -> None:
        """Write a heartbeat while there is memory.

        Raises:
            UnavailableError: If Redis is out of memory.
        """
        if self.full:
            raise UnavailableError("Redis refused SET")
        super().beat(worker, status, ttl_s, digest, device, life)


class WatchedLog(MemoryLog):
    """Reports each append with its topic."""

    def __init__(self) -> None:
        super().__init__()
        self.appends: Callable[[str], object] = str

    def append(self, record: NewRecord) -> int:
        """Append a record and return its offset; the lock must be held."""
        self.appends(record.topic)
        return super().append(record)


class Bench:
    """A stream of one partition with some records, fewer than a batch."""

    def __init__(self, registry: SchemaRegistry | None = None) -> None:
        self.clock = ManualClock()
        self.log = WatchedLog()
        self.log.create_topics([NewTopic("s")])
        self.log.create_topics([NewTopic(control_topic(JOB))])
        self.schemas, codec = None, make_codec("tensor", [Field("id", "int64")])
        if registry is None:
            self.produce(*codec.encode({"id": np.arange(RECORDS)}))
        else:
            registered = codec = RegisteredCodec([Field("id", "int64")], "AVRO")
            found = JobSchemas(self.log, JOB, registry)
            self.schemas = SchemaFinder(registered, found, event_logger("test"), self.clock)
        self.metrics, self.tracer = WorkerMetrics(("s",)), MemoryTracer()
        self.board = FullBoard(MemoryRedis(self.clock), JOB)
        self.cache = BatchCache(1 << 20)
        traces = BatchTraces(self.tracer, JOB, W, lambda: WALL_S)
        logger = event_logger("test")
        self.stream = Stream(
            Worker(W, WorkerSettings(batch_size=8, bound=4, batch_linger_s=LINGER_S)),
            self.log.stream(group_name(JOB), ("s",), W),
            ClaimSender(self.log, JOB, logger, self.metrics, traces),
            WorkerBoard(W, self.board, (), "", logger, self.clock),
            gate=SchemaGate(self.schemas),
            codec=codec,
            cache=self.cache,
            time_lag=TimeLag(("s",), logger, self.metrics),
            logger=logger,
            measures=self.metrics,
            clock=self.clock,
        )

    def produce(self, *values: bytes) -> None:
        """Write records."""
        writer = self.log.writer()
        for value in values:
            writer.append("s", value)
        assert writer.flush(1.0)

    def sample(self, name: str, **labels: str) -> float | None:
        """Return the job's sample of this name."""
        return self.metrics.registry.get_sample_value(name, labels)

    def stand(self, control_position: int, claimed: int) -> None:
        """Report in the leader's status that the partition is claimed up to here."""
        at = {P: claimed}
        self.board.put_leader_status(
            LeaderStatus(0, control_position, at, control_position, 0, 1, at)
        )

    def turn(self, times: int = 10, step_s: float = 0.01) -> None:
        """Run turns of the stream thread."""
        for _ in range(times):
            self.stream.turn()
            self.clock.advance(step_s)

    def claims(self) -> list[BatchReady]:
        """Return the announced batches."""
        topic = Partition(control_topic(JOB), 0)
        tail = self.log.tail(topic, 0)
        records = tail.read(100, 0.0)
        claims = [wire.decode_claim(record.value or b"") for record in records]
        return [claim for claim in claims if isinstance(claim, BatchReady)]


def test_partial_batch_is_announced_after_its_linger_time() -> None:
    bench = Bench()
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    assert bench.claims() == []
    bench.clock.advance(LINGER_S)
    bench.turn()
    [claim] = bench.claims()
    assert (claim.samples, claim.address[0].end) == (RECORDS, RECORDS)
    assert bench.cache.get(claim.address) is not None


def test_batches_of_one_turn_are_announced_together() -> None:
    # b=8      3 batches are cut and decoded, which takes time for each; then all are sent at once
    bench = Bench()
    bench.produce(*make_codec("tensor", [Field("id", "int64")]).encode({"id": np.arange(19)}))
    cut = list[float | None]()
    bench.log.appends = lambda _topic: cut.append(bench.sample("doll_batches_announced_total"))
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    assert [claim.samples for claim in bench.claims()] == [8, 8, 8]
    assert cut == [3, 3, 3]


def test_claim_without_offset_is_decided_once_the_later_bound_is_read() -> None:
    """Another claim follows, so this one is at offset 0 or 1. It is decided once both are."""
    bench = Bench()
    bench.log.reports_no_offsets = True
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    bench.clock.advance(LINGER_S)
    bench.stream.turn()
    [claim] = bench.claims()
    bench.log.writer().append(control_topic(JOB), wire.encode_claim(claim))
    bench.log.go_away()
    bench.turn()
    bench.log.come_back()
    bench.turn()
    bench.stand(control_position=1, claimed=RECORDS)
    bench.turn(50)
    bench.stand(control_position=2, claimed=RECORDS)
    bench.turn(50)
    bench.produce(*make_codec("tensor", [Field("id", "int64")]).encode({"id": np.arange(8)}))
    bench.turn()
    assert [each.address[0].end for each in bench.claims()] == [RECORDS, RECORDS, RECORDS + 8]


def test_end_of_a_log_without_records_is_claimed_a_second_later() -> None:
    bench = Bench()
    bench.produce(b"aborted")
    bench.log.punch(P, RECORDS)
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    bench.clock.advance(LINGER_S)
    bench.turn()
    bench.produce(b"aborted, too")
    bench.log.punch(P, RECORDS + 1)
    bench.turn()
    bench.clock.advance(1.0)
    bench.turn()
    claims = [(each.address[0].start, each.address[0].end, each.samples) for each in bench.claims()]
    assert claims == [(0, RECORDS + 1, RECORDS), (RECORDS + 1, RECORDS + 2, 0)]


def test_record_below_its_position_after_truncation_stops_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # s[0]       0 1 2 3 4   5: aborted, claimed without samples
    #            cut at 5    5: a record, 6 to 12 more, of the next leader epoch
    bench = Bench()
    topic_id = bench.log.describe(["s"])["s"].topic_id
    bench.produce(b"aborted")
    with bench.log.anyway():
        stored = bench.log.stored(P)
        stored.records, stored.end = stored.records[:RECORDS], RECORDS
    lost = LogTruncated(P, RECORDS, recreated=False)
    monkeypatch.setattr(
        bench.log, "loss", lambda _, known: lost if known.offset > RECORDS else None
    )
    codec = make_codec("tensor", [Field("id", "int64")])
    bench.produce(*codec.encode({"id": np.arange(8)}))
    known = {P: LogPosition(RECORDS, topic_id, 0)}
    claimed = {P: RECORDS + 1}
    bench.board.put_leader_status(LeaderStatus(0, 0, claimed, 0, 0, 1, claimed, known=known))
    bench.turn()
    bench.clock.advance(LINGER_S)
    bench.turn()
    assert bench.claims() == []


def test_reading_continues_if_a_partition_moves_while_a_partial_batch_is_due() -> None:
    # In one turn, the partial batch is closed, and a status says that others claimed its records.
    bench = Bench()
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    bench.stand(control_position=1, claimed=3)
    bench.clock.advance(LINGER_S)
    bench.turn()
    first, *_ = bench.claims()
    # The ledger will refuse this claim.
    assert (first.address[0].start, first.samples) == (0, RECORDS)
    bench.stand(control_position=2, claimed=3)
    bench.clock.advance(LINGER_S)
    bench.turn()
    bench.clock.advance(LINGER_S)
    bench.turn()
    last = bench.claims()[-1]
    assert (last.address[0].start, last.address[0].end, last.samples) == (3, RECORDS, 2)


def test_smaller_batch_size_closes_an_open_batch_of_that_size() -> None:
    bench = Bench()
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    bench.stream.resize(batch_size=RECORDS, bound=2, group_size=1)
    bench.turn()
    [claim] = bench.claims()
    assert claim.samples == RECORDS
    assert bench.cache.get(claim.address) is not None


def test_full_redis_is_reported_once_and_its_recovery_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    bench.board.full = True
    bench.turn(60, step_s=0.1)
    bench.board.full = False
    bench.turn(60, step_s=0.1)
    said = [record.getMessage() for record in caplog.records]
    assert [each for each in said if each.startswith("redis_")] == [
        "redis_unavailable",
        "redis_recovered",
    ]


def test_announced_records_are_counted_once_by_stream() -> None:
    # offset   0 1 2 3 4   5        6 7
    #          a batch     garbage  batch
    bench = Bench()
    assert bench.sample("doll_worker_reading") == 0
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    bench.stream.resize(batch_size=RECORDS, bound=4, group_size=1)
    assert bench.sample("doll_worker_reading") == 1
    bench.produce(b"garbage", *make_codec("tensor", [Field("id", "int64")]).encode(TWO))
    bench.turn()
    bench.clock.advance(LINGER_S)
    bench.turn()

    assert [claim.samples for claim in bench.claims()] == [RECORDS, 2]
    assert bench.sample("doll_records_read_total", stream="s") == RECORDS + 2
    assert bench.sample("doll_records_skipped_total", stream="s") == 1
    assert bench.sample("doll_batches_announced_total") == 2
    assert bench.sample("doll_worker_stage_seconds_count", stage="indicator") == 2
    assert bench.sample("doll_records_expired_total", stream="s") == 0
    bench.stream.leave()
    assert bench.sample("doll_worker_reading") == 0


def test_records_deleted_by_retention_are_counted_when_claimed() -> None:
    bench = Bench()
    bench.log.expire(P, 3)
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    bench.clock.advance(LINGER_S)
    bench.turn()

    assert bench.sample("doll_records_expired_total", stream="s") == 3
    assert bench.sample("doll_records_read_total", stream="s") == RECORDS - 3
    assert bench.sample("doll_batches_announced_total") == 1


def test_batch_trace_starts_at_its_first_record_and_ends_at_its_claim() -> None:
    bench = Bench()
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    bench.clock.advance(LINGER_S)
    bench.turn()

    [claim] = bench.claims()
    [read], [announced] = bench.tracer.named("batch.read"), bench.tracer.named("batch.announce")
    assert read.trace == announced.trace == trace_of(JOB, claim.address)
    assert (read.start_s, read.end_s) == (claim.first_arrival_s, WALL_S)
    assert (announced.start_s, announced.end_s) == (WALL_S, WALL_S)
    assert read.attributes == {"worker": W, "records": RECORDS, "skipped": 0}


def test_record_passes_the_functions_listed_in_contributing_md() -> None:
    bench = Bench()
    bench.stand(control_position=0, claimed=0)
    bench.turn()
    bench.produce(*make_codec("tensor", [Field("id", "int64")]).encode({"id": np.arange(3)}))
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    _, _, section = page.partition("## The walk of a record")
    listed = re.findall(r"^\| `([\w.]+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    stops = list[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        stop = frame.f_code.co_qualname
        shell = stop.startswith(("Stream.", "SchemaGate.", "ClaimSender.")) and "<" not in stop
        if event == "call" and (shell or stop in listed):
            stops.append(stop)

    sys.setprofile(note)
    try:
        bench.stream.turn()
    finally:
        sys.setprofile(None)
    walked = list(dict.fromkeys(stops[stops.index("Stream._poll") :]))
    assert walked[: walked.index("ClaimSender.send") + 1] == listed
