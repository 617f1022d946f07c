"""Settings of our Kafka clients, and their translation to the client library's properties."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from common.errors import OutsideError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# The embedded broker does not wake a waiting fetch, so this is the latency of a record.
_EMBEDDED_WAIT_MS = 10
_CONTROL_TIMEOUT_S = 5.0
# Receives `sasl.oauthbearer.config`, and returns a token and its expiry in seconds since 1970.
MakeToken: TypeAlias = "Callable[[str], tuple[str, float]]"


@dataclass(frozen=True, slots=True)
class EmbeddedControl:
    """The embedded broker's control socket, for processes of this machine that know its path.

    It also creates topics, which that broker's admin API cannot do.
    """

    path: str

    def __call__(self, topic: str, partitions: int) -> None:
        """Create a topic unless it exists.

        Raises:
            UnavailableError: If the broker has ended.
        """
        self._ask(f"create {topic} {partitions}")

    def address(self) -> str:
        """Return the bootstrap address.

        Raises:
            UnavailableError: If the broker has ended.
        """
        return self._ask("address")

    def expire(self, topic: str, partition: int, below: int) -> None:
        """Expire records as retention does: from now on, a partition's log starts at `below`."""
        self._ask(f"expire {topic} {partition} {below}")

    def refuse(self, request: int, code: int) -> None:
        """Make the broker answer the next request of this number with an error."""
        self._ask(f"refuse {request} {code}")

    def set_up(self, *, up: bool) -> None:
        """Make the broker unavailable (`up=False`) or available again. It keeps its logs."""
        self._ask("up" if up else "down")

    def _ask(self, command: str) -> str:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_CONTROL_TIMEOUT_S)
                connection.connect(self.path)
                connection.sendall(f"{command}\n".encode())
                answer = connection.makefile().readline().strip()
        except OSError as error:
            raise UnavailableError(
                f"the embedded Kafka at {self.path} has ended: {error}"
            ) from error
        if answer.startswith("error"):
            raise OutsideError(f"the embedded Kafka refuses {command!r}: {answer}")
        return answer


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """The address of Kafka, and our clients' timeouts and limits."""

    bootstrap: str
    # False if the address is the default, because the settings name none.
    named: bool = True
    client_id: str = "doll"
    group_protocol: Literal["classic", "consumer"] = "classic"
    # Used in classic groups. With "consumer", the broker decides.
    session_timeout_ms: int = 10_000
    # How long partitions wait for a static member; the broker's maximum.
    hold_timeout_ms: int = 1_800_000
    # How long a fetch waits for new records. A placed or resumed partition waits for it. Kafka's
    # default is 500. The embedded broker needs 10, because it does not wake a waiting fetch.
    fetch_wait_ms: int = 100
    # Limits the memory of each consumer.
    prefetch_kb: int = 16_384
    linger_ms: float = 1.0
    # How long a closing writer waits for the broker.
    close_timeout_s: float = 5.0
    # Limit of requests for metadata and bounds, and of topic creation.
    request_timeout_s: float = 10.0
    # -1 means the broker's default.
    replication_factor: int = -1
    # Set for the embedded broker, which cannot look up offsets by time (we search instead) and has
    # no topic ids or descriptions. If None, the admin API is used.
    topic_maker: EmbeddedControl | None = None
    # Our location, as in the brokers' `broker.rack`. Empty if unknown.
    rack: str = ""
    # More properties of the client library, by its names.
    properties: Mapping[str, str] = field(default_factory=dict)
    # Used for SASL/OAUTHBEARER if `properties` cannot express it.
    token: MakeToken | None = None

    def right(self, operation: str, resource: str) -> str:
        """Return a right in words, with its owner if the settings name a user."""
        user = self.properties.get("sasl.username")
        return f"{operation} on {resource}" + (f" (principal User:{user})" if user else "")


def embedded_settings(control: str) -> KafkaSettings:
    """Return settings for the embedded broker with this control socket.

    Raises:
        UnavailableError: If there is no such broker.
    """
    maker = EmbeddedControl(control)
    return KafkaSettings(
        bootstrap=maker.address(),
        group_protocol="consumer",
        fetch_wait_ms=_EMBEDDED_WAIT_MS,
        topic_maker=maker,
    )


# Group of every reader outside a job's group. It commits nothing, but Kafka requires a group of
# every consumer, and the right to read as that group.
ALONE = "doll.alone"
_TAIL_FETCH_WAIT_MS = 100
# Pause between a failed fetch and the next one.
FETCH_BACKOFF_MS = 50
# Time for which the client treats a missing topic as one that is being created. The default is 30
# s.
_PROPAGATION = {"topic.metadata.propagation.max.ms": 10_000}


def client_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Return properties of every client."""
    return {
        "bootstrap.servers": settings.bootstrap,
        "client.id": settings.client_id,
        "socket.nagle.disable": True,
        # Important log messages also arrive as exceptions or at the error callback. An unavailable
        # broker would be logged ten times a second.
        "log_level": 2,
        # Longest delay before a process's half dozen clients find a broker again; the default
        # grows to 10 s. An attempt at a closed port costs both sides less than a heartbeat.
        "reconnect.backoff.max.ms": 250,
        # The same for requests that a broker refuses while it loads a group or elects a leader.
        "retry.backoff.max.ms": 250,
        # An unreachable host sends no answer, and the kernel repeats the request after 1, 3, 7 and
        # 15 s. A new attempt is faster than the last two. The default is 30 s; TLS and SASL take
        # less than 1 s.
        "socket.connection.setup.timeout.ms": 5_000,
        # A host that loses power does not close its connections. Pending requests go to the
        # partition's new leader after this time. The default is 60 s. A live broker answers within
        # milliseconds, or `fetch.wait.max.ms` later for a fetch.
        "socket.timeout.ms": 10_000,
        **settings.properties,
        **({"oauth_cb": settings.token} if settings.token else {}),
    }


def reader_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Return properties of every consumer, in a group or not."""
    return {
        **client_properties(settings),
        "client.rack": settings.rack,
        "group.id": ALONE,
        "allow.auto.create.topics": False,
        # Positions come from the ledger only.
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "fetch.wait.max.ms": settings.fetch_wait_ms,
        "fetch.error.backoff.ms": FETCH_BACKOFF_MS,
        # Retry of a full queue after 10 ms instead of a second, because it drains in less.
        "fetch.queue.backoff.ms": 10,
        "queued.max.messages.kbytes": settings.prefetch_kb,
    }


def tail_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Return properties of the consumer that all tails share."""
    return {
        **reader_properties(settings),
        # A new tail waits for the current fetch, which waits for other tails' records.
        "fetch.wait.max.ms": min(settings.fetch_wait_ms, _TAIL_FETCH_WAIT_MS),
        # Reports of missing topics are checked.
        **_PROPAGATION,
        # A nearby replica has a record some milliseconds after the leader, and updates wait for
        # tails. Tails read so little that the traffic between zones costs nearly nothing.
        "client.rack": "",
        # The last offsets of a log may hold no record: aborted transactions, and transaction
        # markers.
        "enable.partition.eof": True,
    }


def member_properties(
    settings: KafkaSettings, group: str, member: str, *, hold: bool
) -> dict[str, Any]:
    """Return properties of a member of a consumer group.

    A static member is always classic: only there may a client set its own session timeout.
    """
    properties = {
        **reader_properties(settings),
        "group.id": group,
        # How late a member notices partitions that were added to a stream; the default is 5 min.
        "topic.metadata.refresh.interval.ms": 5_000,
    }
    if settings.group_protocol == "consumer" and not hold:
        # If a member's answer to a revocation is lost, it keeps its partitions from others this
        # long. This was seen once in hours of faults, with the default of 5 min. A short limit is
        # safe, because we poll all the time.
        return {**properties, "group.protocol": "consumer", "max.poll.interval.ms": 30_000}
    session_timeout_ms = settings.hold_timeout_ms if hold else settings.session_timeout_ms
    properties |= {
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": session_timeout_ms,
        # 5 min is the default, and the session timeout must not be longer.
        "max.poll.interval.ms": max(session_timeout_ms, 300_000),
        "heartbeat.interval.ms": min(session_timeout_ms // 3, 3_000),
    }
    return {**properties, "group.instance.id": member} if hold else properties


def writer_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Return properties of a producer that loses nothing and repeats nothing."""
    return {
        **client_properties(settings),
        "enable.idempotence": True,
        "acks": "all",
        **_PROPAGATION,
        # 0 means no timeout: a claim of unknown outcome is never abandoned.
        "message.timeout.ms": 0,
        "linger.ms": settings.linger_ms,
        # Each writer has its own limit. A full writer must not stop the others.
        "queue.buffering.max.kbytes": 2_147_483_647,
        "queue.buffering.max.messages": 0,
        # Java clients treat a key in the same way.
        "partitioner": "murmur2_random",
        # Without a key, records are spread one by one.
        "sticky.partitioning.linger.ms": 0,
        **settings.properties,
    }
