"""Kafka inside one machine, with nothing installed: the mock broker in the client's own wheel.

What it can not do, measured with librdkafka 2.16: it keeps nothing on disk and `KEPT_BYTES` (and
100,000 batches) of each partition, oldest dropped first, whatever `kept_forever` says, so writers
must be throttled by what readers have read; it does not compact, so `compacted` does nothing; it
shows the records of aborted transactions; it knows no static members (`hold`); it cannot look up an
offset by time, so `position_at` searches through the records. `bounds` tells the truth.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from common.embedded import mock_broker
from common.embedded.process import Child, short_folder
from common.errors import DollError, OutsideError, UnavailableError
from common.kafka.settings import KafkaSettings

KEPT_BYTES = 5 << 20  # of each partition: what comes beyond them drops the oldest batch of records
_FETCH_WAIT_MS = 10  # the broker does not wake a waiting fetch: this is the latency of a record
_CONTROL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class EmbeddedControl:
    """The broker's control socket: usable from any process of this machine that knows its path."""

    path: str

    def __call__(self, topic: str, partitions: int) -> None:
        """Create a topic; do nothing if it is there.

        Raises:
            UnavailableError: If the broker is gone.
        """
        self._ask(f"create {topic} {partitions}")

    def address(self) -> str:
        """The bootstrap address.

        Raises:
            UnavailableError: If the broker is gone.
        """
        return self._ask("address")

    def expire(self, topic: str, partition: int, below: int) -> None:
        """Do what retention does: the log of a partition starts at `below` from now on."""
        self._ask(f"expire {topic} {partition} {below}")

    def refuse(self, request: int, code: int) -> None:
        """Let the broker answer the next request of a kind, by its number, with an error."""
        self._ask(f"refuse {request} {code}")

    def set_up(self, *, up: bool) -> None:
        """Let the broker be away (`up=False`) or be back; it keeps its logs."""
        self._ask("up" if up else "down")

    def _ask(self, command: str) -> str:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_CONTROL_TIMEOUT_S)
                connection.connect(self.path)
                connection.sendall(f"{command}\n".encode())
                answer = connection.makefile().readline().strip()
        except OSError as error:
            raise UnavailableError(f"the embedded Kafka at {self.path} is gone: {error}") from error
        if answer.startswith("error"):
            raise OutsideError(f"the embedded Kafka refuses {command!r}: {answer}")
        return answer


def embedded_settings(control: str) -> KafkaSettings:
    """Settings for the embedded broker whose control socket is at this path.

    Raises:
        UnavailableError: If there is none.
    """
    maker = EmbeddedControl(control)
    return KafkaSettings(
        bootstrap=maker.address(),
        group_protocol="consumer",
        fetch_wait_ms=_FETCH_WAIT_MS,
        topic_maker=maker,
        time_index=False,
        topic_ids=False,
    )


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
