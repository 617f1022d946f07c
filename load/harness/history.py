"""A job with a long past: the state that a leader of a million updates would leave.

Writes both topics with one batch of one record per update, a hot snapshot that is slightly older
than the topics, and a checkpoint that is older still.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from msgspec.structs import replace

from common.core.messages import (
    GENESIS,
    Batch,
    BatchReady,
    Lead,
    ModelId,
    UpdateApplied,
    WorkerId,
    unused_number,
)
from common.core.snapshots import genesis
from common.core.spans import LogPosition, Span
from common.jobs.build import trainer_of
from common.kafka.names import control_topic, updates_topic
from common.redis.exchange import open_leader_boards
from common.storage.port import open_blobs
from common.storage.snapshot_file import SnapshotFile, to_bytes, to_parts
from common.storage.store import CheckpointStore
from common.wire.messages import encode_audit, encode_claim
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.jobs.store import JobRecord
    from common.kafka.port import Log

# Updates after the hot snapshot, and after the checkpoint.
SINCE_HOT, SINCE_CHECKPOINT = 200, 1000
_FLUSH_S = 300.0
# Records between two polls for delivery reports.
_REPORTS_EVERY = 10_000


def write(settings: Settings, log: Log, record: JobRecord, updates: int) -> None:
    """Write `updates` updates of a job that has had no leader yet.

    Args:
        settings: Settings of the servers.
        log: Kafka.
        record: The job. Its stream has at least `updates` records in one partition.
        updates: More than `SINCE_CHECKPOINT`.

    Raises:
        NotMeasuredError: If the broker took too long.
    """
    job = record.spec.name
    control, audit = control_topic(job), updates_topic(job)
    [(place, known)] = record.known.items()
    epoch = unused_number(time.time() - updates, 0)
    batches = [
        Batch(at, WorkerId("worker"), (Span(*place, at, at + 1, 0, 0 if at else -1, at + 1, 0),), 1)
        for at in range(updates)
    ]
    with closing(log.writer()) as writer:
        writer.append(audit, encode_audit(Lead(-1, GENESIS, "coordinator#1", epoch)), partition=0)
        for at, batch in enumerate(batches):
            claim = BatchReady(batch.worker, batch.address, 1)
            update = UpdateApplied(epoch, at + 1, (batch,), 1, 0.5, number=at + 1)
            writer.append(control, encode_claim(claim), partition=0)
            writer.append(audit, encode_audit(update), partition=0)
            if at % _REPORTS_EVERY == 0:
                writer.poll()
        if not writer.flush(_FLUSH_S):
            raise NotMeasuredError(f"Kafka did not accept {updates:,} updates in {_FLUSH_S:g} s")
    found = log.describe([control, audit])
    trainer = trainer_of(record.spec, settings.tasks)().snapshot()

    def saved(version: int) -> SnapshotFile:
        at = ModelId(epoch, version)
        snapshot = replace(
            genesis(record.first, record.known),
            by=epoch,
            made=at,
            updates_position=version + 1,
            control_position=version,
            claimed={place: version},
            known={place: LogPosition(version, known.topic_id, 0)},
            samples=version,
            losses=(0.5,),
            number=version,
            updates_topic_id=found[audit].topic_id,
            updates_epoch=0,
            control_topic_id=found[control].topic_id,
            control_epoch=0,
        )
        return SnapshotFile(snapshot, trainer)

    checkpoint, hot = saved(updates - SINCE_CHECKPOINT), saved(updates - SINCE_HOT)
    store = CheckpointStore(open_blobs(settings), job)
    store.save(checkpoint.name, to_parts(checkpoint), time.time(), samples=updates, loss=0.5)
    with closing(open_leader_boards(settings)) as boards:
        boards.board(job).put_snapshot(epoch, to_bytes(hot, record.seal), "c1")
