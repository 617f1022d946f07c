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

from common.embedded import mock_broker
from common.embedded.process import Child, short_folder
from common.errors import DollError, UnavailableError
from common.kafka.settings import EmbeddedControl, embedded_settings

KEPT_BYTES = 5 << 20  # of each partition: what comes beyond them drops the oldest batch of records


class EmbeddedKafka(Child):
    """A mock broker in a process of its own that ends with its parent.

    Raises:
        UnavailableError: If it does not start; the message quotes what it said.
    """

    def __init__(self) -> None:
        # a socket's path has at most about 100 bytes: not under whatever folder a caller has
        self._folder = tempfile.TemporaryDirectory(prefix="doll-kafka-", dir=short_folder())
        self.control = EmbeddedControl(str(Path(self._folder.name, "control.sock")))
        super().__init__(
            [
                *(sys.executable, "-I", "-X", "faulthandler", mock_broker.__file__),
                *(self.control.path, str(os.getpid())),
            ],
            Path(self._folder.name, "kafka.log"),
            name="Kafka",
        )
        self.settings = embedded_settings(self.control.path)

    def restart(self) -> None:
        """Refuse to start the broker again, since a new one would know no topic.

        Raises:
            DollError: Always.
        """
        raise DollError("the built-in Kafka ended, and all records with it")

    def close(self) -> None:
        """Stop it and leave nothing behind."""
        super().close()
        self._folder.cleanup()

    def _is_ready(self) -> bool:
        try:
            self.control.address()
        except UnavailableError:
            return False
        return True
