"""The command line on a log, a board and storage in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from common.config.servers import Outside
from common.kafka.memory import MemoryLog
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from services.cli.app import app
from services.cli.system.outside import Ways

if TYPE_CHECKING:
    from typer.testing import Result

    from common.config.settings import Settings


@dataclass
class World:
    """What the commands see, and how to run one."""

    log: MemoryLog = field(default_factory=MemoryLog)
    redis: MemoryRedis = field(default_factory=MemoryRedis)
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)

    def run(
        self, *arguments: str, code: int = 0, typed: str | bytes = "", blobs: str = "s3://memory"
    ) -> Result:
        """Run a command line and check how it ends."""
        result = CliRunner().invoke(
            app,
            list(arguments),
            input=typed,
            obj=Ways(self._connect),
            env={"COLUMNS": "200", "DOLL_BLOBS": blobs},
            catch_exceptions=False,
        )
        assert result.exit_code == code, result.output
        return result

    def board(self, job: str) -> MemoryBoard:
        """A job's notice board."""
        return MemoryBoard(self.redis, job)

    def write(self, topic: str, *values: bytes) -> None:
        """Append records to the first partition of a topic."""
        writer = self.log.writer()
        for value in values:
            writer.append(topic, value)
        assert writer.flush(1.0)

    def _connect(self, settings: Settings) -> Outside:
        return Outside(settings, lambda: self.log, self.board, lambda: self.blobs)


@pytest.fixture
def world() -> World:
    """An empty one."""
    return World()
