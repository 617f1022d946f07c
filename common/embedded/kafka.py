"""Kafka inside one machine, with nothing installed: the mock broker in the client's own wheel.

What it can not do, measured with librdkafka 2.16: it keeps nothing on disk and `KEPT_BYTES` (and
100,000 batches) of each partition, oldest dropped first, whatever `kept_forever` says, so writers
must be throttled by what readers have read; it does not compact, so `compacted` does nothing; it
shows the records of aborted transactions; it knows no static members (`hold`); it cannot look up an
offset by time, so `position_at` searches through the records. `bounds` tells the truth.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Self

from common.embedded import mock_broker
from common.embedded.process import Child, short_folder
from common.errors import DollError, UnavailableError
from common.kafka.embedded import EmbeddedControl, embedded_settings

KEPT_BYTES = 5 << 20  # of each partition: what comes beyond them drops the oldest batch of records


class EmbeddedKafka:
    """A mock broker in a process of its own that ends with its parent.

    Raises:
        UnavailableError: If it does not start; the message quotes what it said.
    """

    name = "Kafka"

    def __init__(self) -> None:
        # a socket's path has at most about 100 bytes: not under whatever folder a caller has
        self._folder = tempfile.TemporaryDirectory(prefix="doll-kafka-", dir=short_folder())
        self.control = EmbeddedControl(str(Path(self._folder.name, "control.sock")))
        self._child = Child(
            [
                *(sys.executable, "-I", "-X", "faulthandler", mock_broker.__file__),
                *(self.control.path, str(os.getpid())),
            ],
            log=Path(self._folder.name, "kafka.log"),
        )
        try:
            self._child.await_ready(self._answers)
        except UnavailableError:
            self.close()
            raise
        self.settings = embedded_settings(self.control.path)

    @property
    def pid(self) -> int:
        """The broker's process id, to freeze it in a test."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the broker, minus the number of a signal, or None while it runs."""
        return self._child.exit_code

    def last_words(self) -> str:
        """Return the end of the broker's log."""
        return self._child.last_words()

    def restart(self) -> None:
        """Refuse to start the broker again, since a new one would know no topic.

        Raises:
            DollError: Always.
        """
        raise DollError("the built-in Kafka ended, and all records with it")

    def close(self) -> None:
        """Stop it and leave nothing behind."""
        self._child.stop()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self) -> bool:
        try:
            self.control.address()
        except UnavailableError:
            return False
        return True
