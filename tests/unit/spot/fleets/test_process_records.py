"""Records of a fleet: one process creates an order's record, and no reader sees a partial one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.errors import CorruptError, UnavailableError
from common.spot.fleets.local.records import OrderRecord, OrderRecords

if TYPE_CHECKING:
    from pathlib import Path

RECORD = OrderRecord(launch=3, slot=1, pool="spot", worker="w1-3", at_s=100.0)
ENDED = replace(RECORD, leaving="released", ended_s=120.0, cause="released", detail="exit code 0")
REFUSED = replace(RECORD, refused="none", capacity=True)


def test_records_written_by_one_process_are_read_by_another(tmp_path: Path) -> None:
    one, other = OrderRecords(tmp_path / "a" / "b"), OrderRecords(tmp_path / "a" / "b")
    assert other.read() == {}
    assert one.claim("t", RECORD)
    assert one.claim("u", RECORD)
    for records in (one, other):
        assert records.read() == {"t": RECORD, "u": RECORD}
    one.change("t", ENDED)
    one.change("u", REFUSED)
    for records in (one, other):
        assert records.read() == {"t": ENDED, "u": REFUSED}
    assert ENDED.over
    assert REFUSED.over
    assert not replace(RECORD, leaving="preempted").over


def test_second_claim_of_a_record_is_rejected(tmp_path: Path) -> None:
    records = OrderRecords(tmp_path)
    assert records.claim("t", RECORD)
    assert not records.claim("t", replace(RECORD, launch=4, at_s=200.0))
    assert records.read() == {"t": RECORD}
    records.change("t", ENDED)
    assert not records.claim("t", RECORD)
    assert records.read() == {"t": ENDED}


def test_exactly_one_of_many_concurrent_claims_succeeds(tmp_path: Path) -> None:
    many = [OrderRecords(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for token in map(str, range(20)):
            won = list(threads.map(OrderRecords.claim, many, [token] * 8, [RECORD] * 8))
            assert won.count(True) == 1
    assert len(many[0].read()) == 20


def test_read_during_a_change_returns_the_old_or_the_new_record(tmp_path: Path) -> None:
    writer, reader = OrderRecords(tmp_path), OrderRecords(tmp_path)
    writer.claim("t", RECORD)
    leaving = replace(RECORD, leaving="preempted")
    with ThreadPoolExecutor(1) as threads:
        changes = threads.map(lambda n: writer.change("t", (RECORD, leaving)[n % 2]), range(200))
        for _ in range(200):
            assert reader.read()["t"] in (RECORD, leaving)
        assert len(list(changes)) == 200
    assert {path.name for path in tmp_path.iterdir()} == {"t.order"}  # and nothing is left over


def test_start_time_of_a_fleet_is_set_once(tmp_path: Path) -> None:
    assert OrderRecords(tmp_path).born_s(100.5) == 100.5
    assert OrderRecords(tmp_path).born_s(200.0) == 100.5


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(token=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_records_accept_any_token(tmp_path: Path, token: str) -> None:
    records = OrderRecords(tmp_path)
    records.claim(token, RECORD)
    assert records.read()[token] == RECORD
    assert {path.parent for path in tmp_path.rglob("*.order")} == {tmp_path}


def test_invalid_record_file_is_reported(tmp_path: Path) -> None:
    records = OrderRecords(tmp_path)
    (tmp_path / "notes.txt").write_text("not ours")
    assert records.read() == {}
    (tmp_path / "t.order").write_text("{}")
    with pytest.raises(CorruptError, match=r"t\.order"):
        records.read()


def test_unusable_folder_raises_unavailable_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="file"):
        OrderRecords(tmp_path / "file" / "folder")
    records = OrderRecords(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    with pytest.raises(UnavailableError, match="folder"):
        records.read()
    with pytest.raises(UnavailableError, match="folder"):
        records.claim("t", RECORD)
