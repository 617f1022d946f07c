"""Finds the name under which a worker works: that of its machine's slot.

A machine that was ordered for no slot is a spare. Its worker waits until the job's provisioner
assigns it a slot in the plans topic, and only then joins the consumer group. It checks again
whenever it starts on the job. If the provisioner took its machine for lost and gave the slot to
another machine, the worker learns here that it has no slot any more.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from common.core.messages import WorkerId
from common.core.spans import Partition
from common.errors import UnknownTopicError
from common.kafka.names import plans_topic
from common.kafka.read import decoded
from common.wire.messages import MessageCodec

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.jobs.store import JobRecord
    from common.kafka.port import Log

READ_RECORDS = 1000
# Longest read, and so the longest delay before a worker notices that it must leave.
READ_S = 0.2


class SlotRecord(msgspec.Struct, frozen=True):
    """The fields of a plans record that a worker needs."""

    # Tag of the record in `common.spot.provisioning.records`.
    type: str
    term: Annotated[int, msgspec.Meta(ge=0)] = 0
    after: int | None = None
    launch: int = 0
    slot: int | None = None
    worker: str = ""


SLOT_RECORD = MessageCodec("plan", msgspec.json.Decoder(SlotRecord), lambda _: None)


@dataclass(slots=True)
class _Machine:
    """A machine that was ordered."""

    # The ordered name, replaced by the slot's name once the machine has a slot.
    worker: str
    slot: int | None
    ordered_for_slot: bool
    runs: bool = False
    # True once the worker has left or the machine has ended.
    left: bool = False

    @property
    def has_slot(self) -> bool:
        return self.slot is not None and not self.left


class SlotLedger:
    """Tracks which machine has which slot; `common.spot.provisioning.fleet_ledger` has the rules.

    Attributes:
        own: The machine that was ordered with this worker; None if none was.
    """

    def __init__(self, worker: str) -> None:
        self.own: _Machine | None = None
        self._worker = worker
        # Machines by launch.
        self._open = dict[int, _Machine]()
        self._term = self._head = -1
        self._settled = False
        self._launches = 0

    def feed(self, offset: int, record: SlotRecord | None) -> None:
        """Apply the record at `offset`; None if it does not parse."""
        if record is None:
            return
        if record.type == "provisioner-lead" and record.after == self._head:
            self._term = self._head = offset
            self._settled = False
        elif record.term == self._term and not self._settled:
            self._decided(offset, record)

    def _decided(self, offset: int, record: SlotRecord) -> None:
        machine = self._open.get(record.launch)
        match record.type:
            case "settled":
                self._settled, self._head = True, offset
            case "launch-requested" if record.launch == self._launches + 1:
                self._launches = record.launch
                ordered = _Machine(record.worker, record.slot, record.slot is not None)
                self._open[record.launch] = ordered
                if record.worker == self._worker:
                    self.own = ordered
            case "started" if machine:
                machine.runs = True
            case "slot-assigned" if machine and machine.runs and machine.slot is None:
                if record.slot not in [each.slot for each in self._open.values() if each.has_slot]:
                    machine.slot, machine.worker = record.slot, record.worker
            case "left" if machine and machine.has_slot and not machine.ordered_for_slot:
                machine.left = True
            case "ended" if machine:
                machine.left = True
                del self._open[record.launch]


def await_member_name(
    job: JobRecord, name: str, log: Log, stays: Callable[[], bool]
) -> WorkerId | None:
    """Return the worker's name, waiting for a slot if its machine is a spare.

    Args:
        job: The job.
        name: Name that the worker was started with.
        log: Has the job's plans topic.
        stays: Called repeatedly; returns False if the worker must leave. Then there is no name.

    Raises:
        UnavailableError: If Kafka is unavailable.
        FutureFormatError: If a newer program wrote one of the plans.
    """
    spec = job.spec
    # Other workers were started for a slot, or by hand.
    spare = name.startswith(f"{job.id}-m")
    if spec.provisioning is None or spec.on_preemption != "hold" or not spare:
        return WorkerId(name)
    plans = Partition(plans_topic(job.id), 0)
    try:
        bounds = log.bounds(plans)
    # No provisioner rents machines for this job.
    except UnknownTopicError:
        return WorkerId(name)
    ledger = SlotLedger(name)
    with closing(log.tail(plans, bounds.start)) as tail:
        while stays():
            for record in tail.read(READ_RECORDS, READ_S):
                ledger.feed(record.offset, decoded(SLOT_RECORD.decode, record))
            machine = ledger.own
            if machine is None and tail.position() >= bounds.end:
                # An order is written before its machine is requested, so this worker has no slot.
                return WorkerId(name)
            if machine is not None and machine.has_slot:
                return WorkerId(machine.worker)
    return None
