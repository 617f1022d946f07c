"""Properties of the Kafka client that DOLL_KAFKA_ variables may set, and why others may not be set.

DOLL_SCHEMA_REGISTRY_ variables set properties of the schema registry's client in the same way.
"""

from __future__ import annotations

import re

from doll.secret_files import SUFFIX

_PREFIX = "DOLL_KAFKA_"
# Well-known properties of the families below.
_COMMON = (
    *("security.protocol", "sasl.mechanism", "sasl.username", "sasl.password"),
    *("sasl.oauthbearer.method", "sasl.oauthbearer.client.id", "sasl.oauthbearer.client.secret"),
    *("sasl.oauthbearer.token.endpoint.url", "sasl.oauthbearer.scope"),
    *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location"),
)
# Authentication and encryption. The client itself refuses unknown properties of these families.
_FAMILIES = ("security.", "sasl.", "ssl.")
_ALLOWED = frozenset(
    {
        # Connections between zones and regions.
        *("client.dns.lookup", "broker.address.family", "broker.address.ttl"),
        *("connections.max.idle.ms", "metadata.max.age.ms", "metadata.recovery.strategy"),
        *("metadata.recovery.rebootstrap.trigger.ms", "reconnect.backoff.ms"),
        *("reconnect.backoff.max.ms", "retry.backoff.ms", "retry.backoff.max.ms"),
        *("socket.connection.setup.timeout.ms", "socket.keepalive.enable", "socket.timeout.ms"),
        *("socket.receive.buffer.bytes", "socket.send.buffer.bytes"),
        # Size of records in transit and on the brokers' disks.
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
    "exactly-once training depends on it": (
        *("acks", "request.required.acks", "enable.idempotence", "enable.gapless.guarantee"),
        *("isolation.level", "auto.offset.reset", "enable.auto.commit", "auto.commit.enable"),
        *("auto.commit.interval.ms", "enable.auto.offset.store", "enable.partition.eof"),
        *("check.crcs", "retries", "message.send.max.retries", "message.timeout.ms"),
        *("delivery.timeout.ms", "max.in.flight", "max.in.flight.requests.per.connection"),
        *("partitioner", "transactional.id", "transaction.timeout.ms", "allow.auto.create.topics"),
    ),
    "consumer groups and their members are named after the job": (
        *("client.id", "group.id", "group.instance.id", "group.remote.assignor"),
        *("partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms"),
        "max.poll.interval.ms",
    ),
    "it limits a process's memory and the waiting time of an update": (
        *("fetch.error.backoff.ms", "fetch.max.bytes", "fetch.message.max.bytes"),
        *("fetch.min.bytes", "fetch.queue.backoff.ms", "fetch.wait.max.ms"),
        *("max.partition.fetch.bytes", "queued.max.messages.kbytes", "queued.min.messages"),
        *("queue.buffering.max.kbytes", "queue.buffering.max.messages", "queue.buffering.max.ms"),
    ),
    "the brokers' addresses are set in DOLL_KAFKA": (
        *("bootstrap.servers", "metadata.broker.list", "servers", "brokers", "hosts"),
    ),
    "it could load code": ("plugin.library.paths", "interceptors"),
}
# Properties whose value is the name of a file that the client reads, as with all `_LOCATION`s.
_FILES_OF_THE_CLIENT = re.compile(
    r"sasl\.oauthbearer\.assertion\.(file|jwt\.template\.file|private\.key\.file)"
)


def property_of(variable: str) -> str:
    """Return the property that a variable sets; empty if it sets none.

    A variable that ends with `_FILE` names a file with another variable's value, unless the client
    reads that file itself.
    """
    name = _name(variable)
    if name.endswith(".file") and not _FILES_OF_THE_CLIENT.fullmatch(name):
        return ""
    in_family = name.startswith(_FAMILIES) and not name.endswith(".")
    return name if in_family or name in _ALLOWED else ""


def variable_of(name: str) -> str:
    """Return the variable that sets a property."""
    return _PREFIX + name.upper().replace(".", "_")


def registry_property_of(variable: str) -> str:
    """Return the property of the registry's client that a variable sets; empty if it sets none."""
    name = variable.removeprefix(_REGISTRY_PREFIX).lower().replace("_", ".")
    return name if variable.startswith(_REGISTRY_PREFIX) and name in _OF_REGISTRY else ""


def registry_variable_of(name: str) -> str:
    """Return the variable that sets a property of the registry's client."""
    return _REGISTRY_PREFIX + name.upper().replace(".", "_")


def variables() -> list[str]:
    """Return all variables known by name, for suggestions after a typo."""
    of_registry = map(registry_variable_of, _OF_REGISTRY)
    return sorted([*map(variable_of, (*_COMMON, *_ALLOWED)), *of_registry])


def refusal_of(variable: str) -> str:
    """Return why a variable may not be set; empty if the client has no such property."""
    name = _name(variable.removesuffix(SUFFIX))
    reasons = (reason for reason, names in _REFUSED.items() if name in names)
    return next((f"cannot be set: {reason}" for reason in reasons), "")


def _name(variable: str) -> str:
    if not variable.startswith(_PREFIX):
        return ""
    return variable.removeprefix(_PREFIX).lower().replace("_", ".")
