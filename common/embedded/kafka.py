"""Kafka as a child process without an installation: the mock broker in the client's own wheel.

Its limits, measured with librdkafka 2.16:

- It stores nothing on disk. Of each partition it keeps `KEPT_BYTES` and 100,000 batches, and drops
  the oldest first, even if `kept_forever` is set. So writers must wait for readers. `bounds` is
  correct.
- It does not compact: `compacted` does nothing.
- Readers get the records of aborted transactions.
- It has no static members (`hold`).
- It cannot look up an offset by time, so `position_at` searches the records.
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

# A partition keeps this many bytes of records, and drops its oldest batches beyond that.
KEPT_BYTES = 5 << 20


class EmbeddedKafka(Child):
    """A mock broker in a child process that ends with its parent.

    Raises:
        UnavailableError: If the broker does not start. The message quotes its output.
    """

    def __init__(self) -> None:
        # The path of a socket has at most about 100 bytes, so it needs a short folder.
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
        """Stop the broker and delete its files."""
        super().close()
        self._folder.cleanup()

    def _is_ready(self) -> bool:
        try:
            self.control.address()
        except UnavailableError:
            return False
        return True
