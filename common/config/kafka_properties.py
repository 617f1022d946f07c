"""Which properties of the Kafka client a DOLL_KAFKA_ variable sets, and why it sets no others.

DOLL_SCHEMA_REGISTRY_ variables set those of the client of a schema registry, likewise.
"""

from __future__ import annotations

import re

from doll.secret_files import SUFFIX

_PREFIX = "DOLL_KAFKA_"
_COMMON = (  # of the families below
    *("security.protocol", "sasl.mechanism", "sasl.username", "sasl.password"),
    *("sasl.oauthbearer.method", "sasl.oauthbearer.client.id", "sasl.oauthbearer.client.secret"),
    *("sasl.oauthbearer.token.endpoint.url", "sasl.oauthbearer.scope"),
    *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location"),
)
_FAMILIES = ("security.", "sasl.", "ssl.")  # who gets in; the client refuses what it does not know
_ALLOWED = frozenset(
    {
        # What goes between the zones and regions that brokers and clients are in.
        *("client.dns.lookup", "broker.address.family", "broker.address.ttl"),
        *("connections.max.idle.ms", "metadata.max.age.ms", "metadata.recovery.strategy"),
        *("metadata.recovery.rebootstrap.trigger.ms", "reconnect.backoff.ms"),
        *("reconnect.backoff.max.ms", "retry.backoff.ms", "retry.backoff.max.ms"),
        *("socket.connection.setup.timeout.ms", "socket.keepalive.enable", "socket.timeout.ms"),
        *("socket.receive.buffer.bytes", "socket.send.buffer.bytes"),
        # What is written: its size on the way and on the brokers' disks.
        *("batch.size", "compression.level", "compression.type", "linger.ms", "message.max.bytes"),
        "receive.message.max.bytes",
        *("enable.metrics.push", "enable.ssl.certificate.verification"),
        *("https.ca.location", "https.ca.pem"),
    }
)
_REGISTRY_PREFIX = "DOLL_SCHEMA_REGISTRY_"
_OF_REGISTRY = (
    *("url", "proxy", "basic.auth.user.info"),
    *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.key.password"),
    *("bearer.auth.credentials.source", "bearer.auth.token", "bearer.auth.client.id"),
    *("bearer.auth.client.secret", "bearer.auth.scope", "bearer.auth.issuer.endpoint.url"),
    *("bearer.auth.logical.cluster", "bearer.auth.identity.pool.id"),
)
_REFUSED = {
    "that each record counts once rests on it": (
        *("acks", "request.required.acks", "enable.idempotence", "enable.gapless.guarantee"),
        *("isolation.level", "auto.offset.reset", "enable.auto.commit", "auto.commit.enable"),
        *("auto.commit.interval.ms", "enable.auto.offset.store", "enable.partition.eof"),
        *("check.crcs", "retries", "message.send.max.retries", "message.timeout.ms"),
        *("delivery.timeout.ms", "max.in.flight", "max.in.flight.requests.per.connection"),
        *("partitioner", "transactional.id", "transaction.timeout.ms", "allow.auto.create.topics"),
    ),
    "members and their names come from the job": (
        *("client.id", "group.id", "group.instance.id", "group.remote.assignor"),
        *("partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms"),
        "max.poll.interval.ms",
    ),
    "it bounds how much memory a process takes, and how long an update waits": (
        *("fetch.error.backoff.ms", "fetch.max.bytes", "fetch.message.max.bytes"),
        *("fetch.min.bytes", "fetch.queue.backoff.ms", "fetch.wait.max.ms"),
        *("max.partition.fetch.bytes", "queued.max.messages.kbytes", "queued.min.messages"),
        *("queue.buffering.max.kbytes", "queue.buffering.max.messages", "queue.buffering.max.ms"),
    ),
    "DOLL_KAFKA says where the brokers are": (
        *("bootstrap.servers", "metadata.broker.list", "servers", "brokers", "hosts"),
    ),
    "it loads code": ("plugin.library.paths", "interceptors"),
}
# Properties of the client that name files themselves, as all its `_LOCATION`s do.
_FILES_OF_THE_CLIENT = re.compile(
    r"sasl\.oauthbearer\.assertion\.(file|jwt\.template\.file|private\.key\.file)"
)


def property_of(variable: str) -> str:
    """The property that a variable sets, empty if none.

    One that ends with `_FILE` names the file of another variable's value, unless the client reads
    that file itself.
    """
    name = _name(variable)
    if name.endswith(".file") and not _FILES_OF_THE_CLIENT.fullmatch(name):
        return ""
    in_family = name.startswith(_FAMILIES) and not name.endswith(".")
    return name if in_family or name in _ALLOWED else ""


def variable_of(name: str) -> str:
    """The variable that sets a property."""
    return _PREFIX + name.upper().replace(".", "_")


def registry_property_of(variable: str) -> str:
    """The property of the registry's client that a variable sets, empty if none."""
    name = variable.removeprefix(_REGISTRY_PREFIX).lower().replace("_", ".")
    return name if variable.startswith(_REGISTRY_PREFIX) and name in _OF_REGISTRY else ""


def registry_variable_of(name: str) -> str:
    """The variable that sets a property of the registry's client."""
    return _REGISTRY_PREFIX + name.upper().replace(".", "_")


def variables() -> list[str]:
    """All that are known by name, for who misspelt one."""
    of_registry = map(registry_variable_of, _OF_REGISTRY)
    return sorted([*map(variable_of, (*_COMMON, *_ALLOWED)), *of_registry])


def refusal_of(variable: str) -> str:
    """Why a variable sets no property, empty if the client has none of that name."""
    name = _name(variable.removesuffix(SUFFIX))
    reasons = (reason for reason, names in _REFUSED.items() if name in names)
    return next((f"cannot be set: {reason}" for reason in reasons), "")


def _name(variable: str) -> str:
    if not variable.startswith(_PREFIX):
        return ""
    return variable.removeprefix(_PREFIX).lower().replace("_", ".")
