"""Program of the embedded broker: librdkafka's mock cluster and a control socket.

It is run by path, so that it can import nothing but confluent_kafka:
`python -I mock_broker.py SOCKET PARENT_PID`. `_Control` answers each line with a line.
"""

from __future__ import annotations

import ctypes
import os
import socketserver
import sys
import threading
from pathlib import Path
from typing import ClassVar

from confluent_kafka import cimpl

# RD_KAFKA_PRODUCER, the kind of the client that has the mock cluster. Any kind would do.
_PRODUCER = 0
# Id of the only broker.
_BROKER_ID = 1
# RD_KAFKA_RESP_ERR_TOPIC_ALREADY_EXISTS
_TOPIC_EXISTS = 36

_INITIAL_REBALANCE_DELAY_MS = 0
# Other members get a dead member's partitions after the session timeout and a few heartbeats.
_SESSION_TIMEOUT_MS = 2_000
_HEARTBEAT_INTERVAL_MS = 250


class MockCluster:
    """Mock cluster of one broker, in the librdkafka that confluent_kafka uses."""

    def __init__(self) -> None:
        # A lookup in the module also finds the functions of librdkafka.
        self._library = ctypes.CDLL(cimpl.__file__)
        self._error_name = self._function("rd_kafka_err2name", ctypes.c_char_p)
        properties = self._function("rd_kafka_conf_new", ctypes.c_void_p)()
        said = ctypes.create_string_buffer(512)
        client = self._function("rd_kafka_new", ctypes.c_void_p)(
            _PRODUCER, ctypes.c_void_p(properties), said, ctypes.c_size_t(len(said))
        )
        if not client:
            raise SystemExit(f"the client library gives no client: {said.value.decode()}")
        new_cluster = self._function("rd_kafka_mock_cluster_new", ctypes.c_void_p)
        self._cluster = ctypes.c_void_p(new_cluster(ctypes.c_void_p(client), 1))
        for setting, value in (
            ("rd_kafka_mock_group_initial_rebalance_delay_ms", _INITIAL_REBALANCE_DELAY_MS),
            ("rd_kafka_mock_set_group_consumer_session_timeout_ms", _SESSION_TIMEOUT_MS),
            ("rd_kafka_mock_set_group_consumer_heartbeat_interval_ms", _HEARTBEAT_INTERVAL_MS),
        ):
            # Older libraries lack some settings and keep their defaults.
            if hasattr(self._library, setting):
                self._function(setting, None)(self._cluster, ctypes.c_int32(value))

    def address(self) -> str:
        """Return the bootstrap address."""
        address: bytes = self._function("rd_kafka_mock_cluster_bootstraps", ctypes.c_char_p)(
            self._cluster
        )
        return address.decode()

    def create_topic(self, topic: str, partitions: int) -> str:
        """Create a topic; do nothing if it exists."""
        create = self._function("rd_kafka_mock_topic_create", ctypes.c_int)
        code = create(self._cluster, topic.encode(), ctypes.c_int(partitions), ctypes.c_int(1))
        return "ok" if code == _TOPIC_EXISTS else self._said(code)

    def delete_records(self, topic: str, partition: int, below: int) -> str:
        """Delete the records of a partition below an offset, as retention does."""
        delete = self._function("rd_kafka_mock_partition_delete_records", ctypes.c_int)
        return self._said(
            delete(self._cluster, topic.encode(), ctypes.c_int32(partition), ctypes.c_int64(below))
        )

    def set_up(self, *, up: bool) -> str:
        """Accept connections, or close all and refuse new ones. The logs stay."""
        direction = "up" if up else "down"
        change = self._function(f"rd_kafka_mock_broker_set_{direction}", ctypes.c_int)
        return self._said(change(self._cluster, ctypes.c_int32(_BROKER_ID)))

    def refuse(self, request: int, code: int) -> str:
        """Answer the next request of a kind, its number in Kafka's protocol, with an error code."""
        refuse = self._function("rd_kafka_mock_push_request_errors_array", None)
        errors = (ctypes.c_int * 1)(code)
        refuse(self._cluster, ctypes.c_int16(request), ctypes.c_size_t(1), errors)
        return "ok"

    def _function(self, name: str, result: type | None) -> ctypes._NamedFuncPointer:
        # Each lookup returns a new object, so its result type can be set.
        function = self._library[name]
        function.restype = result
        return function

    def _said(self, code: int) -> str:
        return "ok" if code == 0 else f"error {self._error_name(code).decode()}"


class _Control(socketserver.StreamRequestHandler):
    """Reads commands, one per line, and answers each with a line."""

    cluster: ClassVar[MockCluster]

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(f"{self._answer(line.decode().split())}\n".encode())

    def _answer(self, words: list[str]) -> str:
        match words:
            case ["address"]:
                return self.cluster.address()
            case ["create", topic, partitions]:
                return self.cluster.create_topic(topic, int(partitions))
            case ["expire", topic, partition, below]:
                return self.cluster.delete_records(topic, int(partition), int(below))
            case ["refuse", request, code]:
                return self.cluster.refuse(int(request), int(code))
            case ["up" | "down" as direction]:
                return self.cluster.set_up(up=direction == "up")
            case _:
                return f"error unknown command {words}"


def main(path: Path, parent: int) -> None:
    """Serve until the parent ends, which also works on macOS without a parent-death signal."""
    _Control.cluster = MockCluster()
    with socketserver.ThreadingUnixStreamServer(os.fspath(path), _Control) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while os.getppid() == parent:
            threading.Event().wait(0.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
