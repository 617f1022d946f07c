"""What a Kafka client has to be told, and how it becomes the client library's properties."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from common.errors import OutsideError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_EMBEDDED_WAIT_MS = 10  # the broker does not wake a waiting fetch: this is the latency of a record
_CONTROL_TIMEOUT_S = 5.0
# Gets `sasl.oauthbearer.config`; returns a token and until when it is valid, in s since 1970.
MakeToken: TypeAlias = "Callable[[str], tuple[str, float]]"


@dataclass(frozen=True, slots=True)
class EmbeddedControl:
    """The embedded broker's control socket, for any process of this machine that knows its path.

    It also creates topics, which the admin API of that broker cannot.
    """

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


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Where Kafka is and how patient to be with it."""

    bootstrap: str
    named: bool = True  # False: nobody named an address, so it is the default one
    client_id: str = "doll"
    group_protocol: Literal["classic", "consumer"] = "classic"
    session_timeout_ms: int = 10_000  # classic groups; under "consumer" the broker decides
    hold_timeout_ms: int = 1_800_000  # that partitions wait for a static member; broker's maximum
    # A fetch waits so long for new records, and what is placed or resumed meanwhile waits for it;
    # Kafka's default is 500. The embedded broker needs 10: it does not wake a waiting fetch.
    fetch_wait_ms: int = 100
    prefetch_kb: int = 16_384  # bounds the memory of each consumer
    linger_ms: float = 1.0
    close_timeout_s: float = 5.0  # a writer that closes waits so long for the broker
    request_timeout_s: float = 10.0  # metadata, bounds, creation of topics
    replication_factor: int = -1  # the broker's default
    # Of the embedded broker, which cannot look up offsets by time (we search), tells no ids of
    # topics and cannot describe them. None: the admin API.
    topic_maker: EmbeddedControl | None = None
    rack: str = ""  # where we are, as the brokers' `broker.rack` says it; empty: not known
    properties: Mapping[str, str] = field(default_factory=dict)  # passed on by the client's names
    token: MakeToken | None = None  # for SASL/OAUTHBEARER, where `properties` cannot tell

    def right(self, operation: str, resource: str) -> str:
        """Return a right in words, and whose it is where the settings name a user."""
        user = self.properties.get("sasl.username")
        return f"{operation} on {resource}" + (f" (principal User:{user})" if user else "")


def embedded_settings(control: str) -> KafkaSettings:
    """Settings for the embedded broker whose control socket is at this path.

    Raises:
        UnavailableError: If there is none.
    """
    maker = EmbeddedControl(control)
    return KafkaSettings(
        bootstrap=maker.address(),
        group_protocol="consumer",
        fetch_wait_ms=_EMBEDDED_WAIT_MS,
        topic_maker=maker,
    )


# Group of every reader that is no member of a job's group. It commits nothing: Kafka demands a
# group of every consumer, and the right to read as that group.
ALONE = "doll.alone"
_TAIL_FETCH_WAIT_MS = 100
FETCH_BACKOFF_MS = 50  # between a fetch that failed and the next one
# A topic that is gone is taken for one that is about to appear for so long; the default is 30 s.
_PROPAGATION = {"topic.metadata.propagation.max.ms": 10_000}


def client_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Properties of every client."""
    return {
        "bootstrap.servers": settings.bootstrap,
        "client.id": settings.client_id,
        "socket.nagle.disable": True,
        # What matters of its log comes as an exception or to the error callback too; a broker that
        # is away would be logged ten times a second.
        "log_level": 2,
        # How late a broker that is back is found, by each of a process's half dozen clients; the
        # default grows to 10 s. An attempt at a port where nobody listens costs both sides less
        # than a heartbeat does.
        "reconnect.backoff.max.ms": 250,
        # Likewise what a broker refuses for now, as long as it loads a group or elects a leader.
        "retry.backoff.max.ms": 250,
        # A host that is away answers nothing at all, and the kernel asks again after 1, 3, 7 and
        # 15 s: a new attempt is sooner than the last two. The default is 30 s, of which TLS and
        # SASL take less than one.
        "socket.connection.setup.timeout.ms": 5_000,
        # A host that loses power says nothing on connections that there are either: what is on its
        # way is asked of the partition's new leader after this. The default is 60 s; who is alive
        # answers within milliseconds, or, to a fetch, `fetch.wait.max.ms` later.
        "socket.timeout.ms": 10_000,
        **settings.properties,
        **({"oauth_cb": settings.token} if settings.token else {}),
    }


def reader_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Properties of every consumer, in a group or not."""
    return {
        **client_properties(settings),
        "client.rack": settings.rack,
        "group.id": ALONE,
        "allow.auto.create.topics": False,
        "auto.offset.reset": "error",  # a position comes from the ledger or from nowhere
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "fetch.wait.max.ms": settings.fetch_wait_ms,
        "fetch.error.backoff.ms": FETCH_BACKOFF_MS,
        # A full queue is asked again after 10 ms, not after the default second: it drains in less.
        "fetch.queue.backoff.ms": 10,
        "queued.max.messages.kbytes": settings.prefetch_kb,
    }


def tail_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Properties of the consumer that all tails share."""
    return {
        **reader_properties(settings),
        # A tail that is opened beside others waits for the fetch that waits for them.
        "fetch.wait.max.ms": min(settings.fetch_wait_ms, _TAIL_FETCH_WAIT_MS),
        **_PROPAGATION,  # what is said of a topic then is looked into
        # A replica nearby has a record some milliseconds later than the leader, an update waits for
        # what tails read, and that is little: nothing that a bill between zones would show.
        "client.rack": "",
        # Offsets at the end of a log may hold no record: of a transaction that was aborted, and the
        # marker of each.
        "enable.partition.eof": True,
    }


def member_properties(
    settings: KafkaSettings, group: str, member: str, *, hold: bool
) -> dict[str, Any]:
    """Properties of a member of a consumer group.

    A static member is always classic: only there may a client say how long it may be away.
    """
    properties = {
        **reader_properties(settings),
        "group.id": group,
        # How late a member notices partitions that were added to a stream; the default is 5 min.
        "topic.metadata.refresh.interval.ms": 5_000,
    }
    if settings.group_protocol == "consumer" and not hold:
        # Whose answer to the order to give partitions up was lost keeps them from the others so
        # long: seen once in hours of faults, when it was the default of 5 min. We poll always.
        return {**properties, "group.protocol": "consumer", "max.poll.interval.ms": 30_000}
    session_timeout_ms = settings.hold_timeout_ms if hold else settings.session_timeout_ms
    properties |= {
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": session_timeout_ms,
        "max.poll.interval.ms": max(session_timeout_ms, 300_000),  # the default; never the shorter
        "heartbeat.interval.ms": min(session_timeout_ms // 3, 3_000),
    }
    return {**properties, "group.instance.id": member} if hold else properties


def writer_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Properties of a producer that loses nothing and repeats nothing."""
    return {
        **client_properties(settings),
        "enable.idempotence": True,
        "acks": "all",
        **_PROPAGATION,
        "message.timeout.ms": 0,  # for ever: an indicator of unknown fate is never given up
        "linger.ms": settings.linger_ms,
        # Each writer has a bound of its own: one that is full must not stop the others.
        "queue.buffering.max.kbytes": 2_147_483_647,
        "queue.buffering.max.messages": 0,
        "partitioner": "murmur2_random",  # what Java clients do with a key
        "sticky.partitioning.linger.ms": 0,  # without a key: spread record by record
        **settings.properties,
    }
