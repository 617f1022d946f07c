"""The control socket of the embedded Kafka, and the settings of the clients that find it there."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from common.errors import OutsideError, UnavailableError
from common.kafka.settings import KafkaSettings

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
    )
