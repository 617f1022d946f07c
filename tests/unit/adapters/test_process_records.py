"""Records of a fleet: the first of two who write counts, and nobody reads a part."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.adapters.local.records import Claim, Gone, Leaving, Records, Refusal
from common.errors import CorruptError, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

CLAIM = Claim(launch=3, slot=1, pool="spot", worker="w1-3", at_s=100.0)


def test_what_one_writes_another_reads(tmp_path: Path) -> None:
    one, other = Records(tmp_path / "a" / "b"), Records(tmp_path / "a" / "b")
    assert other.read() == {}
    assert one.add("t", CLAIM)
    assert one.add("t", Leaving("released", 130.0))
    assert one.add("t", Gone(120.0, "released", "exit code 0"))
    assert one.add("u", CLAIM)
    assert one.add("u", Refusal(capacity=True, reason="none"))
    for records in (one, other):
        stories = records.read()
        assert stories["t"].claim == stories["u"].claim == CLAIM
        assert stories["t"].leaving == Leaving("released", 130.0)
        assert stories["t"].gone == Gone(120.0, "released", "exit code 0")
        assert stories["u"].refusal == Refusal(capacity=True, reason="none")
        assert stories["t"].over
        assert stories["u"].over


def test_the_first_of_a_kind_counts(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert records.add("t", CLAIM)
    assert not records.add("t", Claim(4, 2, "spot", "w2-4", 200.0))
    assert records.add("t", Leaving("preempted", 100.0))
    assert not records.add("t", Leaving("released", 130.0))
    story = records.read()["t"]
    assert (story.claim, story.leaving) == (CLAIM, Leaving("preempted", 100.0))
    assert not story.over


def test_of_many_who_claim_at_once_one_does(tmp_path: Path) -> None:
    many = [Records(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for token in map(str, range(20)):
            won = list(threads.map(Records.add, many, [token] * 8, [CLAIM] * 8))
            assert won.count(True) == 1
    assert len(many[0].read()) == 20


def test_a_fleet_is_born_once(tmp_path: Path) -> None:
    assert Records(tmp_path).born_s(100.5) == 100.5
    assert Records(tmp_path).born_s(200.0) == 100.5


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(token=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_a_token_may_hold_anything(tmp_path: Path, token: str) -> None:
    records = Records(tmp_path)
    records.add(token, CLAIM)
    assert records.read()[token].claim == CLAIM
    assert {path.parent for path in tmp_path.rglob("*.claim")} == {tmp_path}


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    records = Records(tmp_path)
    (tmp_path / "notes.txt").write_text("not ours")
    assert records.read() == {}
    (tmp_path / "t.claim").write_text("{}")
    with pytest.raises(CorruptError, match=r"t\.claim"):
        records.read()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="file"):
        Records(tmp_path / "file" / "folder")
    records = Records(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    with pytest.raises(UnavailableError, match="folder"):
        records.read()
    with pytest.raises(UnavailableError, match="folder"):
        records.add("t", CLAIM)
