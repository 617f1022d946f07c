"""`doll job requeue` and `doll job replay`: a batch counts if the audit read back says so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from common.core.history import History
from common.core.messages import (
    GENESIS,
    Batch,
    Lead,
    Quarantined,
    Replayed,
    Requeued,
    Skipped,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Partition, Span
from common.jobs.changes import local_user
from common.jobs.store import JobStore
from common.wire import messages as wire
from services.cli import exits
from tests.unit.cli.conftest import World
from tests.unit.cli.test_job import submitted
from tests.unit.jobs.test_store import RacingLog

if TYPE_CHECKING:
    from common.core.messages import AuditRecord

UPDATES = "doll.digits.updates"
LEAD = Lead(-1, GENESIS, "c1", 0)


def batch(offset: int, start: int, end: int, *skipped: Skipped) -> Batch:
    bad = sum(each.records for each in skipped)
    spans = (Span("clinic-a", 0, start, end),)
    return Batch(offset, WorkerId("w1"), spans, end - start - bad, skipped)


POISON, GONE = batch(0, 0, 2), batch(2, 7, 9)
BAD = batch(1, 2, 7, Skipped("clinic-a", 0, 3, "no label", (2,)))  # 3 and 5
QUARANTINE = (
    LEAD,
    Quarantined(0, POISON, "poison: raised: KeyError"),
    Quarantined(0, BAD, "poison: its workers died while they computed it"),
    Quarantined(0, GONE, "expired"),
)


def happened(world: World, *audit: AuditRecord) -> None:
    """Create a job with ten records in its stream, and this audit."""
    submitted(world)
    writer = world.log.writer()
    for number in range(10):
        writer.append("clinic-a", f"r{number}".encode(), key=b"k%d" % number)
    writer.flush(1.0)
    world.write(UPDATES, *map(wire.encode_audit, audit))


def written(world: World) -> list[AuditRecord]:
    """Return all records of the updates topic."""
    records = world.log.tail(Partition(UPDATES, 0), 0).read(100, 0.0)
    return [wire.decode_audit(record.value or b"") for record in records]


def history(world: World) -> History:
    fold = History()
    for offset, record in enumerate(written(world)):
        fold.feed(offset, record)
    return fold


def stream(world: World) -> list[tuple[bytes | None, bytes | None]]:
    records = world.log.tail(Partition("clinic-a", 0), 0).read(100, 0.0)
    return [(record.key, record.value) for record in records]


def test_requeue_without_batches_lists_the_quarantine(world: World) -> None:
    happened(world, *QUARANTINE)

    output = world.run("job", "requeue", "digits").stdout

    assert "poison: raised: KeyError" in output
    assert "clinic-a[0]@2:7" in output
    assert "nothing: expired" in output
    assert "--batch OFFSET" in output
    refused = world.run("job", "replay", "digits", code=exits.REFUSED).stderr
    assert "`doll job requeue digits` lists the batches" in refused
    assert written(world) == list(QUARANTINE)


def test_requeue_without_reported_offset_is_confirmed_by_its_content(
    world: World,
) -> None:
    happened(world, *QUARANTINE)
    world.log.reports_no_offsets = True

    output = world.run("job", "requeue", "digits", "--batch", "0").stdout

    assert "batch 0: requeued" in output
    assert POISON in history(world).requeued.values()


def test_replay_of_a_batch_with_compacted_records_writes_nothing(world: World) -> None:
    happened(world, *QUARANTINE)
    world.log.punch(Partition("clinic-a", 0), 1)

    output = world.run("job", "replay", "digits", "--batch", "0").stdout

    assert "batch 0: not written, because Kafka deleted some of its records" in output
    assert written(world) == list(QUARANTINE)


def test_requeue_and_replay_of_an_empty_quarantine_do_nothing(world: World) -> None:
    happened(world, LEAD)

    output = world.run("job", "requeue", "digits", "--all").stdout
    assert output == "digits has no quarantined batches\n"
    output = world.run("job", "replay", "digits", "--all").stdout
    assert output == "written: 0 records of digits\n"


def test_requeue_all_releases_every_batch_once(world: World) -> None:
    happened(world, *QUARANTINE)

    output = world.run("job", "requeue", "digits", "--all").stdout

    assert output.endswith("2 of 2 batches of digits were requeued\n")
    assert history(world).requeued == {0: POISON, 1: BAD}
    assert set(history(world).quarantined) == {2}
    again = world.run("job", "requeue", "digits", "--batch", "1").stdout
    assert again.startswith("batch 1: not changed, because it was requeued before\n0 of 1 batches")
    refused = world.run("job", "replay", "digits", "--batch", "1", code=exits.REFUSED)
    assert "batch 1 of digits is not quarantined" in refused.stderr
    assert len(written(world)) == len(QUARANTINE) + 2


def test_replay_of_one_batch_omits_its_bad_records(
    world: World,
) -> None:
    happened(world, *QUARANTINE)
    world.run("job", "requeue", "digits", "--batch", "0")

    output = world.run("job", "replay", "digits", "--batch", "1").stdout

    assert output == ("batch 1: 3 records were written\nwritten: 3 records of digits\n")
    assert stream(world)[10:] == [(b"k2", b"r2"), (b"k4", b"r4"), (b"k6", b"r6")]
    assert isinstance(written(world)[-1], Replayed)
    for command, words in (("requeue", "was replayed"), ("replay", "was replayed")):
        refused = world.run("job", command, "digits", "--batch", "1", code=exits.REFUSED)
        assert words in refused.stderr
    assert len(stream(world)) == 13


@pytest.mark.parametrize("offset", ["2", "7"])
def test_requeue_or_replay_of_an_expired_or_unknown_batch_is_rejected(
    world: World, offset: str
) -> None:
    happened(world, *QUARANTINE)

    for command in ("requeue", "replay"):
        refused = world.run("job", command, "digits", "--batch", offset, code=exits.REFUSED)
        assert ("expired" if offset == "2" else "is not quarantined") in refused.stderr
    assert written(world) == list(QUARANTINE)


def test_requeue_reports_that_the_job_is_held(world: World) -> None:
    happened(world, *QUARANTINE)
    job_store = JobStore(world.log)
    job_store.hold(job_store.get("digits"), "3 batches in a row are poison")

    output = world.run("job", "requeue", "digits", "--all").stdout

    assert output.endswith("digits is held; run `doll job resume digits` to continue\n")


def test_requeue_and_replay_are_recorded_in_the_changes_of_the_job(world: World) -> None:
    happened(world, *QUARANTINE)
    world.run("job", "requeue", "digits", "--batch", "0")
    world.run("job", "requeue", "digits", "--batch", "0")
    world.run("job", "replay", "digits", "--batch", "1")
    changes = JobStore(world.log).get("digits").changes
    me = local_user()
    assert [(each.by, each.role, each.action, each.reason) for each in changes[1:]] == [
        ("operator", "operator", "requeued", "1 batches: 0"),
        (me.name, me.role, "replayed", "1 batches: 1"),
    ]


def test_requeue_or_replay_of_an_unknown_job_is_rejected(world: World) -> None:
    for command in ("requeue", "replay"):
        assert "digits" in world.run("job", command, "digits", code=exits.REFUSED).stderr


@pytest.mark.parametrize(
    ("command", "first"),
    [("requeue", Replayed(POISON, "ada", 1.0)), ("replay", Requeued(POISON, "ada", 1.0))],
)
def test_requeue_or_replay_after_a_concurrent_one_does_nothing(
    command: str, first: AuditRecord
) -> None:
    log = RacingLog(UPDATES)
    world = World(log)
    happened(world, *QUARANTINE)
    log.meanwhile = lambda: world.write(UPDATES, wire.encode_audit(first))

    output = world.run("job", command, "digits", "--batch", "0").stdout

    assert "another user requeued or replayed it meanwhile" in output
    assert len(stream(world)) == 10


def test_job_logs_print_only_effective_decisions(world: World) -> None:
    # This Lead does not follow the leader in office, so it does not count.
    late = Lead(7, GENESIS, "c3", 8)
    made = UpdateApplied(0, 1, (batch(3, 9, 10),), 1, 0.5)
    happened(world, *QUARANTINE, late, made, Lead(0, GENESIS, "c2", 6))
    lines = world.run("job", "logs", "digits").stdout.splitlines()
    kinds = [line.split()[2] for line in lines]
    assert kinds == ["change", "lead", *["quarantined"] * 3, "lead"]
    assert lines[0].endswith("change      action=submitted  by=operator  role=operator")
    assert "candidate=c1" in lines[1]
    assert "reason=poison: raised: KeyError" in lines[2]
    assert "candidate=c2" in lines[-1]
    logged = world.run("job", "logs", "digits", "--json").stdout.splitlines()
    assert [json.loads(each)["event"] for each in logged] == kinds
    world.run("job", "logs", "nobody", code=exits.REFUSED)
