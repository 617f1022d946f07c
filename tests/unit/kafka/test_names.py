"""Names of a job's resources are its own, and settings that lose records are found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kafka.names import (
    STREAM,
    Difference,
    check_name,
    control_topic,
    differences,
    job_id,
    job_name,
    own_topics,
    plans_topic,
    positions_topic,
    remedy,
    schemas_topic,
    updates_topic,
)
from common.kafka.port import NewTopic
from common.kafka.table import table_topic

CONTROL = NewTopic("doll.digits.control", kept_forever=True)
JOBS = table_topic("doll.jobs")
DEFAULTS = {
    "cleanup.policy": "delete",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "max.message.bytes": "1048588",
    "min.compaction.lag.ms": "0",
}


def found(topic: NewTopic, **settings: str) -> tuple[Difference, ...]:
    """Return the differences if Kafka has these settings instead of ours."""
    changed = {name.replace("_", "."): value for name, value in settings.items()}
    return differences([topic], {topic.name: topic.settings | changed})


@pytest.mark.parametrize("topic", [CONTROL, JOBS])
def test_topic_as_created_or_unknown_has_no_differences(topic: NewTopic) -> None:
    assert found(topic) == ()
    assert differences([topic], {}) == ()
    assert differences([NewTopic("clicks")], {"clicks": DEFAULTS}) == ()


def test_log_with_compaction_or_retention_loses_records() -> None:
    assert found(CONTROL, cleanup_policy="compact") == (
        Difference(CONTROL.name, "cleanup.policy", "compact", "delete", loses=True),
    )
    assert found(CONTROL, cleanup_policy="compact, delete", retention_bytes="1000") == (
        Difference(CONTROL.name, "cleanup.policy", "compact, delete", "delete", loses=True),
        Difference(CONTROL.name, "retention.bytes", "1000", "-1", loses=True),
    )
    assert found(CONTROL, retention_ms="5000") == (
        Difference(CONTROL.name, "retention.ms", "5000", "-1", loses=True),
    )


def test_compacted_topic_loses_records_only_with_retention() -> None:
    # The retention time has no effect if nothing is deleted.
    assert found(JOBS, retention_ms="5000") == ()
    assert found(JOBS, cleanup_policy="delete") == (
        Difference(JOBS.name, "cleanup.policy", "delete", "compact", loses=False),
    )
    assert found(JOBS, cleanup_policy="compact,delete") == ()
    assert found(JOBS, cleanup_policy="compact,delete", retention_ms="5000") == (
        Difference(JOBS.name, "retention.ms", "5000", "-1", loses=True),
    )


def test_table_with_early_compaction_differs() -> None:
    assert found(JOBS, min_compaction_lag_ms="3599999") == (
        Difference(JOBS.name, "min.compaction.lag.ms", "3599999", "3600000", loses=False),
    )
    assert found(JOBS, min_compaction_lag_ms="3600001") == ()


def test_topic_with_too_small_max_message_bytes_differs() -> None:
    assert found(CONTROL, max_message_bytes="1000012") == ()
    assert found(CONTROL, max_message_bytes="5000000") == ()
    assert found(CONTROL, max_message_bytes="1000011") == (
        Difference(CONTROL.name, "max.message.bytes", "1000011", "1048588", loses=True),
    )


def test_one_command_corrects_each_topic() -> None:
    differing = differences([CONTROL, JOBS], {CONTROL.name: DEFAULTS, JOBS.name: DEFAULTS})
    command = "kafka-configs.sh --bootstrap-server $DOLL_KAFKA --alter --entity-type topics"
    assert remedy(differing) == (
        f"{command} --entity-name doll.digits.control --add-config retention.ms=-1; {command}"
        " --entity-name doll.jobs --add-config cleanup.policy=compact,retention.ms=-1,"
        "min.compaction.lag.ms=3600000"
    )


NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,99}", fullmatch=True).map(check_name)
STREAMS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
JOBS_OF_A_NAME = st.integers(1, 10_000)


@given(NAMES, JOBS_OF_A_NAME, NAMES, JOBS_OF_A_NAME)
def test_job_ids_are_unique_and_contain_the_name(
    name: str, incarnation: int, other: str, later: int
) -> None:
    job = job_id(name, incarnation)
    assert job_name(job) == name
    assert (job == job_id(other, later)) == ((name, incarnation) == (other, later))
    assert (job == name) == (incarnation == 1), "jobs of older programs keep their topics"
    assert STREAM.fullmatch(control_topic(job))
    if incarnation > 1:
        with pytest.raises(ValueError, match="lower case"):
            check_name(job)


@given(NAMES, JOBS_OF_A_NAME, JOBS_OF_A_NAME, STREAMS, STREAMS)
def test_own_topics_of_a_job_exclude_those_of_other_jobs(
    name: str, incarnation: int, later: int, source: str, to: str
) -> None:
    first, second = job_id(name, incarnation), job_id(name, incarnation + later)

    def all_of(job: str) -> list[str]:
        kinds = control_topic, updates_topic, schemas_topic, plans_topic
        return [*(kind(job) for kind in kinds), positions_topic(job, source, to)]

    both = [*all_of(first), *all_of(second), source, "doll.jobs"]
    served = positions_topic(first, source, to)
    mistaken = served.endswith((".control", ".updates", ".schemas", ".plans"))
    assert set(own_topics(first, both)) == {*all_of(first)} - ({served} if mistaken else set())
    assert not {*own_topics(second, both)} & {*all_of(first)}
