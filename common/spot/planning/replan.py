"""What people do with a job's plans topic: read it whole, and ask for another plan."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from common.errors import ConflictError, UnavailableError, UnknownTopicError
from common.kafka import names as topics
from common.kafka.port import Log, NewTopic
from common.kafka.read import read_decoded
from common.spot.plans import decode_plan, encode_plan
from common.spot.provisioning.ledger import FleetLedger

if TYPE_CHECKING:
    from common.jobs.store import JobRecord
    from common.spot.provisioning.records import ReplanAsked

_PATIENCE_S = 15.0  # as long as for a change of a job


def read_ledger(log: Log, job: str) -> FleetLedger:
    """Fold a job's plans topic as it stands; an empty fold where nobody has provisioned yet.

    Raises:
        FutureFormatError: If a newer program wrote one of its records.
        UnavailableError: If Kafka is unavailable.
    """
    ledger = FleetLedger()
    try:
        records = read_decoded(log, topics.plans_topic(job), decode_plan)
    except UnknownTopicError:
        return ledger
    for offset, record in records:
        ledger.feed(offset, record)
    return ledger


def check_replan(record: JobRecord, ledger: FleetLedger) -> None:
    """See that asking for another plan makes sense.

    Raises:
        ConflictError: If the job's machines are not rented, or it is over.
    """
    name = record.spec.name
    if record.spec.provisioning is None:
        raise ConflictError(not_provisioned(name))
    if record.wanted == "stopped":
        raise ConflictError(f'the job "{name}" is stopped: resume it first')
    if ledger.settled is not None:
        raise ConflictError(f'the machines of "{name}" are given back: {ledger.settled.why}')


def check_given_back(record: JobRecord, log: Log) -> None:
    """See that nothing of a job runs any more that is paid for: who deletes it forgets it.

    Raises:
        ConflictError: If a machine runs, or may come to run.
        FutureFormatError: If a newer program wrote one of its plans.
        UnavailableError: If Kafka is unavailable.
    """
    ledger = read_ledger(log, record.id)
    if ledger.open and ledger.settled is None:
        raise ConflictError(
            f'{len(ledger.open)} machines of the job "{record.spec.name}" are not given back yet:'
            " delete it when its provisioner has done so (is one running?)"
        )


def ask_to_replan(log: Log, job: str, asked: ReplanAsked) -> None:
    """Ask whoever provisions a job for another plan; twice is no harm.

    Raises:
        UnavailableError: If Kafka does not answer; the question may have arrived.
    """
    topic = topics.plans_topic(job)
    log.create_topics([NewTopic(topic, kept_forever=True)])  # the provisioner may not have come yet
    with closing(log.writer()) as writer:
        writer.append(topic, encode_plan(asked))
        if not writer.flush(_PATIENCE_S):
            raise UnavailableError("Kafka did not answer; whether it took the question is unknown")


def not_provisioned(job: str) -> str:
    """Say that a job has no provisioning, and what to do."""
    return (
        f'the job "{job}" rents no machines: its specification has no `provisioning`, and workers'
        " are started by hand"
    )
