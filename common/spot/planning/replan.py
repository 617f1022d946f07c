"""A user's access to a job's plans topic: read all of it, and request another plan."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from common.errors import ConflictError, UnavailableError, UnknownTopicError
from common.kafka import names as topics
from common.kafka.port import Log, NewTopic
from common.kafka.read import read_decoded
from common.spot.plans import decode_plan, encode_plan
from common.spot.provisioning.fleet_ledger import FleetLedger

if TYPE_CHECKING:
    from common.jobs.store import JobRecord
    from common.spot.provisioning.records import ReplanAsked

# Maximum time to wait for Kafka, as for a job change.
_PATIENCE_S = 15.0


def read_ledger(log: Log, job: str) -> FleetLedger:
    """Fold a job's current plans topic; an empty fold before it was provisioned.

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
    """Check that a request for another plan makes sense.

    Raises:
        ConflictError: If the job's machines are not rented, or it is over.
    """
    name = record.spec.name
    if record.spec.provisioning is None:
        raise ConflictError(not_provisioned(name))
    if record.wanted == "stopped":
        raise ConflictError(f'the job "{name}" is stopped; resume it first')
    if ledger.settled is not None:
        raise ConflictError(f'the machines of "{name}" are released: {ledger.settled.why}')


def check_given_back(record: JobRecord, log: Log) -> None:
    """Check that no paid machine of a job runs, because its deletion drops all records of them.

    Raises:
        ConflictError: If a machine runs or may start.
        FutureFormatError: If a newer program wrote one of its plans.
        UnavailableError: If Kafka is unavailable.
    """
    ledger = read_ledger(log, record.id)
    if ledger.open and ledger.settled is None:
        raise ConflictError(
            f'{len(ledger.open)} machines of the job "{record.spec.name}" are not released yet;'
            " check that a provisioner is running, and delete the job afterwards"
        )


def ask_to_replan(log: Log, job: str, asked: ReplanAsked) -> None:
    """Request another plan from the job's provisioner. Repeated requests do no harm.

    Raises:
        UnavailableError: If Kafka does not answer. The request may have arrived.
    """
    topic = topics.plans_topic(job)
    # The provisioner may not have started yet.
    log.create_topics([NewTopic(topic, kept_forever=True)])
    with closing(log.writer()) as writer:
        writer.append(topic, encode_plan(asked))
        if not writer.flush(_PATIENCE_S):
            raise UnavailableError(
                "Kafka did not answer; it may or may not have stored the request"
            )


def not_provisioned(job: str) -> str:
    """Return the error for a job without provisioning."""
    return (
        f'the job "{job}" rents no machines: its job file has no `provisioning`, so its workers'
        " are started by hand"
    )
