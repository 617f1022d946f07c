"""`doll audit` lists the records of each version. Its exit status says if all is well."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.core.messages import (
    GENESIS,
    AuditRecord,
    Batch,
    BatchReady,
    Claim,
    Lead,
    Opened,
    Quarantined,
    SpanExpired,
    Synchrony,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Partition, Span
from common.wire.messages import encode_audit, encode_claim
from services.cli import exits
from services.cli.commands.audit import merged
from tests.unit.cli.test_job import submitted

if TYPE_CHECKING:
    from tests.unit.cli.conftest import World

W = WorkerId("w1")


def span(start: int, end: int) -> Span:
    return Span("clinic-a", 0, start, end)


def claim(start: int, end: int) -> BatchReady:
    return BatchReady(W, (span(start, end),), end - start)


def batch(offset: int, start: int, end: int) -> Batch:
    return Batch(offset, W, (span(start, end),), end - start)


def update(version: int, *batches: Batch, epoch: int = 0) -> UpdateApplied:
    samples = sum(each.samples for each in batches)
    return UpdateApplied(epoch, version, batches, samples, 0.5)


LEAD = Lead(-1, GENESIS, "c1", 0)
CLAIMS = (claim(0, 2), claim(2, 4), claim(4, 6))


def happened(world: World, claims: tuple[Claim, ...], audit: tuple[AuditRecord, ...]) -> None:
    submitted(world)
    world.write("doll.digits.control", *map(encode_claim, claims))
    world.write("doll.digits.updates", *map(encode_audit, audit))


def test_audit_lists_a_complete_history_by_version(world: World) -> None:
    happened(
        world,
        CLAIMS,
        (LEAD, update(1, batch(0, 0, 2), batch(1, 2, 4)), Quarantined(0, batch(2, 4, 6), "poison")),
    )
    result = world.run("audit", "digits")
    assert "clinic-a[0]@0:4" in result.stdout
    assert "quarantined: batch 2, poison" in result.stdout
    assert "digits: complete: 4 records built 1 versions, each used once" in result.stdout


def test_audit_json_contains_everything(world: World) -> None:
    happened(world, CLAIMS, (LEAD, update(1, batch(0, 0, 2)), update(2, batch(1, 2, 4))))
    data = json.loads(world.run("audit", "digits", "--json").stdout)
    assert data["whole"] is True
    assert [version["spans"] for version in data["versions"]] == [
        ["clinic-a[0]@0:2"],
        ["clinic-a[0]@2:4"],
    ]
    assert data["unsettled"] == 2
    assert data["settled"] == {"clinic-a[0]": 4}


@pytest.mark.parametrize(
    ("updates", "flaw"),
    [
        (
            (update(1, batch(0, 0, 2)), update(2, batch(0, 0, 2))),
            "used twice: batch 0 is used again in",
        ),
        ((update(1, batch(9, 0, 2)),), "never claimed: batch 9 of version 1"),
        ((update(1, batch(0, 0, 2)), update(2, batch(1, 2, 5))), "overlap: clinic-a[0]@2:5"),
    ],
)
def test_audit_names_a_flaw_and_returns_its_own_status(
    world: World, updates: tuple[UpdateApplied, ...], flaw: str
) -> None:
    happened(world, CLAIMS, (LEAD, *updates))
    result = world.run("audit", "digits", code=exits.AUDIT_BROKEN)
    assert flaw in result.stdout
    assert "digits: BROKEN" in result.stdout
    data = json.loads(world.run("audit", "digits", "--json", code=exits.AUDIT_BROKEN).stdout)
    assert data["whole"] is False


def test_audit_with_expired_records_reports_them_and_is_not_whole(
    world: World,
) -> None:
    #  0     2          4               5
    #  | J=1 | expired  | not claimed   | there
    gone = SpanExpired(W, (span(2, 4),))
    happened(world, (claim(0, 2), gone), (LEAD, update(1, batch(0, 0, 2))))
    world.write("clinic-a", *[b"a record"] * 6)
    world.log.expire(Partition("clinic-a", 0), 5)

    shown = world.run("audit", "digits").stdout
    assert "records expired: 3\n" in shown
    assert "expired: clinic-a[0]@2:5" in shown
    sentence = (
        "incomplete: 3 records expired (deleted from Kafka before they were trained);"
        " 2 records built"
    )
    assert f"digits: {sentence} 1 versions, each used once" in shown
    data = json.loads(world.run("audit", "digits", "--json").stdout)
    assert (data["whole"], data["expired_records"]) == (False, 3)
    assert data["expired"] == ["clinic-a[0]@2:4", "clinic-a[0]@4:5"]


def test_audit_reports_expired_records_of_an_added_partition(world: World) -> None:
    submitted(world)
    world.log.add_partitions("clinic-a", 2)
    added = Partition("clinic-a", 1)
    world.write("doll.digits.control", encode_claim(Opened(added, None, 7, "", 0, -1)))
    world.write("doll.digits.updates", encode_audit(LEAD))
    writer = world.log.writer()
    for _ in range(3):
        writer.append("clinic-a", b"a record", partition=1)
    assert writer.flush(1.0)
    world.log.expire(added, 2)
    data = json.loads(world.run("audit", "digits", "--json").stdout)
    assert (data["expired"], data["expired_records"]) == (["clinic-a[1]@0:2"], 2)


def test_audit_does_not_count_updates_that_a_takeover_reverted(world: World) -> None:
    happened(
        world,
        CLAIMS,
        (
            LEAD,
            update(1, batch(0, 0, 2)),
            Lead(0, GENESIS, "c2", 2),
            update(1, batch(0, 0, 2), epoch=2),
        ),
    )
    result = world.run("audit", "digits")
    assert "takeovers: 1" in result.stdout
    assert "updates rolled back: 1" in result.stdout


def test_audit_of_an_asynchronous_job_shows_staleness_of_each_update(world: World) -> None:
    synchrony = Synchrony(1, staleness=2)
    stale = replace(update(2, batch(1, 2, 4)), synchrony=synchrony, base=0, scale=0.5, rate=0.05)
    happened(world, CLAIMS, (LEAD, replace(update(1, batch(0, 0, 2)), synchrony=synchrony), stale))
    shown = world.run("audit", "digits").stdout
    assert "mode" in shown
    assert "stale  0 of 2" in shown
    assert "stale  1 of 2" in shown
    assert "synchronisation switches: 0" in shown
    data = json.loads(world.run("audit", "digits", "--json").stdout)
    fields = ("mode", "stale", "scale", "learning_rate", "synchrony")
    versions = [tuple(each[field] for field in fields) for each in data["versions"]]
    as_json = {"group_size": 1, "staleness": 2}
    assert versions == [("stale", 0, 1.0, None, as_json), ("stale", 1, 0.5, 0.05, as_json)]


def test_audit_skips_records_that_do_not_parse(world: World) -> None:
    submitted(world)
    world.write("doll.digits.control", b"garbage", encode_claim(claim(0, 2)))
    world.write(
        "doll.digits.updates", encode_audit(LEAD), b"{}", encode_audit(update(1, batch(1, 0, 2)))
    )
    assert "complete: 2 records" in world.run("audit", "digits").stdout


def test_audit_fails_on_records_of_a_later_format(world: World) -> None:
    submitted(world)
    world.write("doll.digits.control", b'{"type":"merged","format":2}')
    world.write("doll.digits.updates", encode_audit(LEAD))
    said = world.run("audit", "digits", code=exits.FAILED).stderr
    assert "doll.digits.control, offset 0: claim: 'merged' of format 2, expected at most 1" in said
    assert "run a newer version of doll" in said


def test_audit_of_topics_that_lost_their_beginning_is_incomplete(world: World) -> None:
    happened(world, CLAIMS, (LEAD,))
    world.log.expire(Partition("doll.digits.control", 0), 1)
    result = world.run("audit", "digits", code=exits.AUDIT_INCOMPLETE)
    assert "the records of doll.digits.control before offset 1 were deleted" in result.stderr


def test_audit_with_last_option_shows_only_the_last_versions(world: World) -> None:
    updates = [update(n + 1, batch(n, 2 * n, 2 * n + 2)) for n in range(30)]
    claims = tuple(claim(2 * n, 2 * n + 2) for n in range(30))
    happened(world, claims, (LEAD, *updates))
    shown = world.run("audit", "digits", "--last", "2").stdout
    assert "@56:58" in shown
    assert "@58:60" in shown
    assert "@54:56" not in shown
    assert "clinic-a" not in world.run("audit", "digits", "--last", "0").stdout


@given(st.sets(st.integers(0, 20), min_size=1))
def test_merged_spans_contain_the_same_offsets_and_never_touch(offsets: set[int]) -> None:
    joined = merged([span(offset, offset + 1) for offset in offsets])
    assert {o for each in joined for o in range(each.start, each.end)} == offsets
    assert all(a.end < b.start for a, b in pairwise(joined))
