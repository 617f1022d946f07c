"""`doll produce` of Parquet sends each row once, in order, as JSON, from files and from S3."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import boto3
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import parquet as pq

from common.errors import UnavailableError
from common.kafka.memory import MemoryLog, MemoryTransactions
from services.cli import exits
from services.cli.commands import parquet
from tests.unit.cli.conftest import World
from tests.unit.cli.test_produce import values

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from common.kafka.port import NewRecord

TO = ("--topic", "a", "--create-partitions", "2")


def write(folder: Path, name: str, first: int, count: int, groups: int = 7) -> None:
    """Write a file of this many rows, in small row groups."""
    ids = list(range(first, first + count))
    table = pa.table({"id": ids, "site": [f"s{each}" for each in ids], "cost": [None, *ids[1:]]})
    pq.write_table(table, folder / name, row_group_size=groups)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Write 30 rows into two files."""
    folder = tmp_path / "history"
    (folder / "day=2").mkdir(parents=True)
    write(folder, "day=1.parquet", 0, 20)
    write(folder / "day=2", "part-0.parquet", 20, 10)
    (folder / "README").write_text("no rows")
    return folder


@pytest.mark.parametrize("log", ["_delta_log/0.json", "metadata/v1.metadata.json"])
def test_produce_of_a_delta_or_iceberg_table_is_rejected(
    world: World, history: Path, log: str
) -> None:
    (history / log).parent.mkdir()
    (history / log).write_text("{}")
    refused = world.run("produce", str(history), *TO, code=exits.REFUSED)
    assert (
        "is a Delta or Iceberg table, whose folder may also have outdated files" in refused.stderr
    )


def ids(world: World, topic: str = "a") -> list[int]:
    return sorted(json.loads(value or b"")["id"] for value in values(world, topic))


def test_produce_sends_rows_of_all_files_in_order_and_once(world: World, history: Path) -> None:
    output = world.run("produce", str(history), "--topic", "a", "--create-partitions", "1").stderr

    sent = [json.loads(value or b"") for value in values(world, "a")]
    assert sent[:2] == [{"id": 0, "site": "s0", "cost": None}, {"id": 1, "site": "s1", "cost": 1}]
    assert [each["id"] for each in sent] == list(range(30))
    assert "sent 30 records to a" in output
    assert "run `doll topic describe a`" in output
    again = world.run("produce", str(history), "--topic", "a").stderr
    assert "30 of 30 rows were sent by earlier runs" in again
    assert len(ids(world)) == 30
    world.run("produce", str(history), "--topic", "b", "--create-partitions", "1")
    assert ids(world, "b") == list(range(30))


def test_produce_of_some_rows_can_be_continued_with_the_same_columns(
    world: World, history: Path
) -> None:
    path = str(history / "day=1.parquet")
    for last in (8, 16, 20):
        world.run("produce", path, *TO, "--records", "8", "--leave-out", "site")
        assert ids(world) == list(range(last))
    assert json.loads(values(world, "a")[0] or b"").keys() == {"id", "cost"}
    refused = world.run("produce", path, *TO, code=exits.REFUSED)
    assert "has other files, rows or columns than when 20 of its rows" in refused.stderr


class MortalLog(MemoryLog):
    """A log whose writer dies after a fixed number of transactions."""

    left = 2

    def transactions(self, name: str) -> MemoryTransactions:
        """Return transactions that fail after `left` of them."""
        log = self

        class Mortal(MemoryTransactions):
            def write(self, records: Sequence[NewRecord]) -> None:
                if log.left == 0:
                    raise UnavailableError("killed")
                log.left -= 1
                super().write(records)

        super().transactions(name)
        mortal = self._names[name] = Mortal(self, name)
        return mortal


def test_interrupted_produce_continues_where_it_stopped(
    history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_ROWS", 4)
    log = MortalLog()
    world = World(log)
    for survived in (8, 16, 24):
        log.left = 2
        world.run("produce", str(history), *TO, code=exits.UNAVAILABLE)
        assert ids(world) == list(range(survived))
    log.left = 2
    assert (
        "24 of 30 rows were sent by earlier runs" in world.run("produce", str(history), *TO).stderr
    )
    assert ids(world) == list(range(30))


def test_parquet_types_become_json(world: World, tmp_path: Path) -> None:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    row: dict[str, Any] = {
        "at": pa.array([at], pa.timestamp("ns", "UTC")),
        "price": [Decimal("1.50")],
        "tags": [["a", "b"]],
        "user": [{"id": 7}],
        "raw": [b"\x00"],
        "nan": [float("nan")],
        "day": [at.date()],
        "big": [2**60],
    }
    pq.write_table(pa.table(row), tmp_path / "rows.parquet")
    world.run("produce", str(tmp_path / "rows.parquet"), *TO)
    (value,) = values(world, "a")
    assert json.loads(value or b"") == {
        "at": "2026-01-31T12:00:00Z",
        "price": "1.50",
        "tags": ["a", "b"],
        "user": {"id": 7},
        "raw": "AA==",
        "nan": None,
        "day": "2026-01-31",
        "big": 2**60,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--repeat",), "as JSON, unchanged and once"),
        (("--codec", "tensor"), "as JSON, unchanged and once"),
        (("--leave-out", "colour"), "has no column 'colour'"),
    ],
)
def test_produce_of_parquet_with_invalid_options_is_rejected(
    world: World, history: Path, options: tuple[str, ...], message: str
) -> None:
    refused = world.run("produce", str(history), *TO, *options, code=exits.REFUSED)
    assert message in refused.stderr


def test_produce_of_a_file_that_is_no_parquet_is_rejected(world: World, tmp_path: Path) -> None:
    output = world.run("produce", str(tmp_path), *TO, code=exits.REFUSED).stderr
    assert "has no files that end with .parquet" in output
    (tmp_path / "no.parquet").write_text("no,parquet\n")
    for source in (tmp_path, tmp_path / "no.parquet", tmp_path / "none.parquet"):
        output = world.run("produce", str(source), *TO, code=exits.REFUSED).stderr
        assert "cannot be read as Parquet" in output


def test_produce_reads_parquet_from_s3(
    world: World, history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    try:
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="lake")
        client.upload_file(str(history / "day=1.parquet"), "lake", "clicks/day=1.parquet")
        world.run("produce", "s3://lake/clicks/", *TO)
    finally:
        server.stop()
    assert ids(world) == list(range(20))
