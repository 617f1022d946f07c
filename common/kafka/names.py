"""Names of all resources of a job in Kafka, and checks of its topics' settings.

All resources of a job, in Kafka, Redis, object storage and at a provider, are named by its id. The
first job of a name has the name as its id. A job that is submitted after a purge has another id, so
that leftovers of the first job, processes included, find nothing of the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.kafka.port import NewTopic

# Tables (see `common.kafka.table`): the key is a name, the value its entry.
JOBS = "doll.jobs"
KEYS = "doll.keys"
# Compacted. The key names a topic and a source; the value says how much of the source was sent.
PRODUCED = "doll.produced"
# Prefix that no datastream may have.
RESERVED_PREFIX = "doll."
# The id of a job after a purge. It has a capital I, which names of jobs cannot have, so no name
# equals another job's id.
_ID = re.compile(r"(?P<name>.+)\.I[0-9]+")
# Name of a job or an API key.
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
# Kafka's limit of 249, less ".dlq".
STREAM = re.compile(r"[A-Za-z0-9._-]{1,245}")


def check_name(value: str) -> str:
    """Return a valid name of a job or an API key unchanged.

    The name becomes part of topics and addresses.

    Raises:
        ValueError: If the name is invalid; the message has the rules.
    """
    if not _NAME.fullmatch(value):
        raise ValueError(
            "must be 1 to 100 lower case letters, digits, '.', '_' or '-' and begin with a letter"
            f" or digit, got {value!r}"
        )
    return value


def check_stream(name: str) -> None:
    """Reject names that a datastream cannot have.

    Raises:
        ValueError: If a datastream cannot have the name.
    """
    if not STREAM.fullmatch(name) or name in {".", ".."}:
        raise ValueError(
            f"{name!r} cannot be a Kafka topic; use up to 245 letters, digits, dots, underscores"
            " and hyphens"
        )
    if name.startswith(RESERVED_PREFIX):
        raise ValueError(
            f"{name!r} is reserved; use a name that does not begin with {RESERVED_PREFIX}"
        )


def job_id(name: str, incarnation: int) -> str:
    """Return the identifier that names all of a job's resources.

    Args:
        name: Name of the job.
        incarnation: Counts from 1; it increases when a job of this name is purged.
    """
    return name if incarnation == 1 else f"{name}.I{incarnation}"


def job_name(job: str) -> str:
    """Return the name of the job with this id."""
    found = _ID.fullmatch(job)
    return job if found is None else found["name"]


# `job` is a job's id in the functions below.


def control_topic(job: str) -> str:
    """Return the topic for workers' claims; one partition, kept forever."""
    return f"doll.{job}.control"


def updates_topic(job: str) -> str:
    """Return the topic for leaders' decisions, the audit trail; one partition, kept forever."""
    return f"doll.{job}.updates"


def schemas_topic(job: str) -> str:
    """Return the topic for the schemas of the job's records; one partition, kept forever."""
    return f"doll.{job}.schemas"


def plans_topic(job: str) -> str:
    """Return the topic for provisioners' plans, machines, prices; one partition, kept forever."""
    return f"doll.{job}.plans"


def dead_letter_topic(stream: str) -> str:
    """Return the topic for a datastream's records that could not be used."""
    return f"{stream}.dlq"


def positions_topic(job: str, source: str, to: str) -> str:
    """Return the name of the topic, and group, of a model server's position between two topics."""
    return f"{_positions(job)}{source}.{to}"


def own_topics(job: str, topics: Iterable[str]) -> list[str]:
    """Return the topics that a job owns.

    A topic of a model server's position is left out if it may also belong to another job, whose
    name is "JOB.served.SOURCE".
    """
    own = (control_topic(job), updates_topic(job), schemas_topic(job), plans_topic(job))
    kinds = tuple(topic.removeprefix(group_name(job)) for topic in own)
    served = _positions(job)
    return [
        topic
        for topic in topics
        if topic in own or (topic.startswith(served) and not topic.endswith(kinds))
    ]


def _positions(job: str) -> str:
    return f"doll.{job}.served."


def group_name(job: str) -> str:
    """Return the consumer group of a job's workers."""
    return f"doll.{job}"


def provisioning_board(job: str) -> str:
    """Return the board of a job's provisioners. It is unique, because no job's id has a ~."""
    return f"{job}~provisioning"


# --- settings of existing topics ------------------------------------------------------------------

# Size of our largest record with Kafka's overhead. Clients write at most a megabyte.
LEAST_MESSAGE_BYTES = 1_000_012


class Difference(NamedTuple):
    """A setting of a topic that differs from what its users need."""

    topic: str
    setting: str
    found: str
    wanted: str
    # True if the setting makes Kafka delete or refuse records.
    loses: bool

    def __str__(self) -> str:
        return f"{self.topic} has {self.setting}={self.found}, not {self.wanted}"


def differences(
    wanted: Iterable[NewTopic], found: Mapping[str, Mapping[str, str]]
) -> tuple[Difference, ...]:
    """Return the relevant differences between topics and the settings that we would have chosen.

    Args:
        wanted: Topics that only this project writes to.
        found: The topics' settings. A missing topic counts as equal.
    """
    return tuple(
        Difference(topic.name, name, found[topic.name][name], topic.settings[name], loses)
        for topic in wanted
        if topic.name in found
        for name, loses in _differing(topic, found[topic.name])
    )


def _differing(topic: NewTopic, found: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield names of differing settings, each with True if records are lost because of it."""
    policies = {policy.strip() for policy in found.get("cleanup.policy", "").split(",")} - {""}
    for name, wanted in topic.settings.items():
        if name not in found or found[name] == wanted:
            continue
        if name == "cleanup.policy":
            # If a topic compacts that should not, it refuses records without a key, and keeps only
            # one record of each key. If a topic does not compact that should, it merely grows.
            loses = "compact" in policies and not topic.compacted
            if loses or "compact" not in policies:
                yield name, loses
        elif name == "max.message.bytes":
            if int(found[name]) < LEAST_MESSAGE_BYTES:
                yield name, True
        elif name == "min.compaction.lag.ms":
            # Compaction of a lost record, before its repair, could undo a change: see
            # `common.kafka.table`.
            if int(found[name]) < int(wanted):
                yield name, False
        elif "delete" in policies:
            yield name, True


def remedy(differing: Iterable[Difference]) -> str:
    """Return the commands that correct the differences."""
    by_topic = dict[str, list[str]]()
    for each in differing:
        by_topic.setdefault(each.topic, []).append(f"{each.setting}={each.wanted}")
    return "; ".join(
        "kafka-configs.sh --bootstrap-server $DOLL_KAFKA --alter --entity-type topics"
        f" --entity-name {topic} --add-config {','.join(settings)}"
        for topic, settings in by_topic.items()
    )
