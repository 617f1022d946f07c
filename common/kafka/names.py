"""Names of everything a job has in Kafka, and what is wrong with the settings of its topics.

All that a job owns, in Kafka, Redis, object storage and at a provider, is named by its id. The
first job of a name has the name as its id; one that is submitted after a purge has another, so that
whatever is left of the first, processes included, finds nothing of the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.kafka.port import NewTopic

# Tables, see `common.kafka.table`: key is a name, value its entry.
JOBS = "doll.jobs"
KEYS = "doll.keys"
PRODUCED = "doll.produced"  # compacted: key is topic and source, value how much of it was sent
RESERVED_PREFIX = "doll."  # no datastream may be called so
# Topics take letters, digits, dots, underscores and hyphens, names of jobs no capital letter: so no
# name is another one's id.
_ID = re.compile(r"(?P<name>.+)\.I[0-9]+")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")  # of a job, or an API key
STREAM = re.compile(r"[A-Za-z0-9._-]{1,245}")  # Kafka's 249, less ".dlq"


def check_name(value: str) -> str:
    """Return a name that a person may give to a job or an API key as it is.

    It becomes part of topics and addresses.

    Raises:
        ValueError: If it is none; says what one is made of.
    """
    if not _NAME.fullmatch(value):
        raise ValueError(
            "must be 1 to 100 lower case letters, digits, '.', '_' or '-' and begin with a letter"
            f" or digit, got {value!r}"
        )
    return value


def check_stream(name: str) -> None:
    """Refuse what no datastream can be called.

    Raises:
        ValueError: If no datastream can be called so.
    """
    if not STREAM.fullmatch(name) or name in {".", ".."}:
        raise ValueError(
            f"{name!r} cannot be a Kafka topic: up to 245 letters, digits, dots, underscores and"
            " hyphens can"
        )
    if name.startswith(RESERVED_PREFIX):
        raise ValueError(f"{name!r}: names with {RESERVED_PREFIX} are reserved")


def job_id(name: str, incarnation: int) -> str:
    """By what everything that a job owns is named.

    Args:
        name: The job's.
        incarnation: From 1; it counts up when a job of this name is purged.
    """
    return name if incarnation == 1 else f"{name}.I{incarnation}"


def job_name(job: str) -> str:
    """What people call the job of an id."""
    found = _ID.fullmatch(job)
    return job if found is None else found["name"]


# Below, `job` is a job's id.


def control_topic(job: str) -> str:
    """Where workers claim batches; one partition, kept for ever."""
    return f"doll.{job}.control"


def updates_topic(job: str) -> str:
    """Where leaders decide, the audit trail; one partition, kept for ever."""
    return f"doll.{job}.updates"


def schemas_topic(job: str) -> str:
    """What its records' schemas are, as workers first met them; one partition, kept for ever."""
    return f"doll.{job}.schemas"


def plans_topic(job: str) -> str:
    """Where provisioners decide: plans, machines, prices; one partition, kept for ever."""
    return f"doll.{job}.plans"


def dead_letter_topic(stream: str) -> str:
    """Where records of a datastream go that nobody can use."""
    return f"{stream}.dlq"


def positions_topic(job: str, source: str, to: str) -> str:
    """Where a model server keeps how far it has answered a topic to another one; its group, too."""
    return f"{_positions(job)}{source}.{to}"


def own_topics(job: str, topics: Iterable[str]) -> list[str]:
    """Those of some topics that a job owns.

    A topic of a model server that reads like one of a job "JOB.served.SOURCE" is left alone.
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
    """The consumer group of a job's workers."""
    return f"doll.{job}"


def provisioning_board(job: str) -> str:
    """The board of a job's provisioners: no job's id has a ~, so it is nobody else's."""
    return f"{job}~provisioning"


# --- settings that somebody else chose ------------------------------------------------------------

# A record of ours, with what Kafka adds: what clients write is a megabyte at most.
LEAST_MESSAGE_BYTES = 1_000_012


class Difference(NamedTuple):
    """A setting of a topic that is not as whoever uses it needs it."""

    topic: str
    setting: str
    found: str
    wanted: str
    loses: bool  # records are deleted, or refused, with it

    def __str__(self) -> str:
        return f"{self.topic} has {self.setting}={self.found}, not {self.wanted}"


def differences(
    wanted: Iterable[NewTopic], found: Mapping[str, Mapping[str, str]]
) -> tuple[Difference, ...]:
    """What differs from how we would have made topics, as far as it matters.

    Args:
        wanted: Topics that nobody but us writes to.
        found: Their settings; of one that is missing, nothing is known to differ.
    """
    return tuple(
        Difference(topic.name, name, found[topic.name][name], topic.settings[name], loses)
        for topic in wanted
        if topic.name in found
        for name, loses in _differing(topic, found[topic.name])
    )


def _differing(topic: NewTopic, found: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Names of settings that differ, and whether records are lost with each."""
    policies = {policy.strip() for policy in found.get("cleanup.policy", "").split(",")} - {""}
    for name, wanted in topic.settings.items():
        if name not in found or found[name] == wanted:
            continue
        if name == "cleanup.policy":
            # Records without a key are refused where it compacts, and of each key all but one go.
            # A topic that only the newest of each key is read of merely grows where it does not.
            loses = "compact" in policies and not topic.compacted
            if loses or "compact" not in policies:
                yield name, loses
        elif name == "max.message.bytes":
            if int(found[name]) < LEAST_MESSAGE_BYTES:
                yield name, True
        elif name == "min.compaction.lag.ms":
            # Compaction that comes within seconds of a lost race could undo a change.
            if int(found[name]) < int(wanted):
                yield name, False
        elif "delete" in policies:
            yield name, True


def remedy(differing: Iterable[Difference]) -> str:
    """The commands that set right what differs."""
    by_topic = dict[str, list[str]]()
    for each in differing:
        by_topic.setdefault(each.topic, []).append(f"{each.setting}={each.wanted}")
    return "; ".join(
        "kafka-configs.sh --bootstrap-server $DOLL_KAFKA --alter --entity-type topics"
        f" --entity-name {topic} --add-config {','.join(settings)}"
        for topic, settings in by_topic.items()
    )
