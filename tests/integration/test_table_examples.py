"""Three tables become topics, and the job files in docs/examples train on them unchanged.

tests/unit/data/test_table_examples.py compares their results with scikit-learn.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from common.config.settings import Settings
from common.embedded.services import EmbeddedService, stop_all
from common.embedded.stack import EmbeddedStack
from common.runtime.connect import connect
from services.cli import exits
from services.cli.app import app
from services.cli.system.outside import Ways
from tests.integration.cluster import await_condition, served
from tests.tables import job_file, needs_tables, table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs_tables

ROWS = 1_400  # rows of each table
OPTIONS = {"prices": (), "connections": (), "clicks": ("--text", "C*", "--leave-out", "Id")}
# The loss without any knowledge is 0.69.
LOSS = {"prices": 0.65, "connections": 0.55, "clicks": 0.65}


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    with EmbeddedStack(Settings(threads=1), blobs=tmp_path / "blobs") as stack:
        services = [
            EmbeddedService("coordinator", "coordinator-1", stack.settings, tmp_path, forks=True),
            EmbeddedService("worker", "worker-1", stack.settings, tmp_path, forks=True),
        ]
        try:
            with served(stack.settings, tmp_path) as settings:
                yield settings
        finally:
            stop_all(services)


def test_table_examples_train_from_topics_by_job_files_alone(
    settings: Settings, tmp_path: Path
) -> None:
    ways = Ways(connect)

    def doll(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments, obj=ways, env=settings.environ())
        assert result.exit_code == exits.OK, result.output
        return result.stdout

    for example, options in OPTIONS.items():
        source = tmp_path / f"{example}.csv"
        source.write_bytes(table(example, ROWS))
        to = ("--topic", example, "--create-partitions", "1")
        doll("produce", str(source), "--rows", "--in-order", *to, *options)
        doll("job", "submit", str(job_file(example)))

    for example, loss in LOSS.items():
        found = dict[str, Any]()

        def trained(example: str = example, found: dict[str, Any] = found) -> bool:
            found |= json.loads(doll("audit", example, "--json"))
            return bool(found["trained"] + found["skipped"] >= ROWS)

        await_condition(trained, f"all rows of {example} are trained", 90.0)
        assert found["whole"]
        assert found["skipped"] == 0
        late = [each["loss"] for each in found["versions"]][-5:]
        assert sum(late) / len(late) < loss, (example, late)
