"""Names of everything a job has in Kafka."""

from __future__ import annotations

JOBS = "doll.jobs"  # compacted: key is the job's name, value its newest record
KEYS = "doll.keys"  # compacted: key is an API key's name, value its newest record
RESERVED_PREFIX = "doll."  # no datastream may be called so


def control_topic(job: str) -> str:
    """Where workers claim batches; one partition, kept for ever."""
    return f"doll.{job}.control"


def updates_topic(job: str) -> str:
    """Where leaders decide, the audit trail; one partition, kept for ever."""
    return f"doll.{job}.updates"


def plans_topic(job: str) -> str:
    """Where provisioners decide: plans, machines, prices; one partition, kept for ever."""
    return f"doll.{job}.plans"


def dead_letter_topic(stream: str) -> str:
    """Where records of a datastream go that nobody can use."""
    return f"{stream}.dlq"


def group_name(job: str) -> str:
    """The consumer group of a job's workers."""
    return f"doll.{job}"
