"""What a demo sees of its job's provisioning: the plans topic as it comes, told in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from common.core.spans import Partition
from common.errors import UnavailableError, WireError
from common.provisioning.ledger import FleetLedger
from common.provisioning.records import Ended, Planned, Started
from common.topics.names import plans_topic
from common.wire.plans import decode_plan

if TYPE_CHECKING:
    from common.ports.servers import Log
    from common.provisioning.records import PlanRecord

_READ_RECORDS = 1000


class Happened(NamedTuple):
    """Something that a person wants to know at once."""

    what: str
    style: str = ""


class FleetWatch:
    """Follows one job's plans topic, which must be there."""

    def __init__(self, log: Log, job: str) -> None:
        self.ledger = FleetLedger()
        self.most_at_once = 0
        self._tail = log.tail(Partition(plans_topic(job), 0), 0)

    @property
    def preemptions(self) -> int:
        """Machines that the lender took back so far."""
        return sum(each.cause == "preempted" for each in self.ledger.machines.values())

    def look(self) -> list[Happened]:
        """Read what is new, without waiting; Kafka may be away."""
        try:
            records = self._tail.read(_READ_RECORDS, 0.0)
        except UnavailableError:
            return []
        told = list[Happened]()
        for each in records:
            record = _plan(each.value)
            if self.ledger.feed(each.offset, record):
                told += self._told(record)
        self.most_at_once = max(self.most_at_once, len(self.ledger.running))
        return told

    def close(self) -> None:
        """Let go of the connection."""
        self._tail.close()

    def _told(self, record: PlanRecord | None) -> list[Happened]:
        match record:
            case Planned():
                spot_usd = min(
                    (record.usd_per_hour.get(pool, 0.0) for pool in record.pools[1:]), default=0.0
                )
                what = (
                    f"plan {record.number}: {record.spot} on spot at ${spot_usd:.3f},"
                    f" {record.on_demand} on demand, {record.why}"
                )
                warned = [Happened(f"warning: {record.warning}", "yellow")] * bool(record.warning)
                return [Happened(what, "cyan"), *warned]
            case Started():
                rented = self.ledger.machines[record.launch]
                return [Happened(f"{rented.worker} begins ({rented.pool})", "green")]
            case Ended():
                rented = self.ledger.machines[record.launch]
                style = "red" if record.cause in ("preempted", "failed", "lost") else "dim"
                if record.cause == "refused":
                    return []  # there is none just now: it is asked for again
                return [Happened(f"{rented.worker} is {record.cause} ({rented.pool})", style)]
            case _:
                return []


def _plan(value: bytes | None) -> PlanRecord | None:
    try:
        return None if value is None else decode_plan(value)
    except WireError:
        return None
