"""What a demo sees of its job's machines: the plans topic as it grows, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.spans import Partition
from common.errors import UnavailableError
from common.jobs.watching import READ_RECORDS, decoded
from common.provisioning.ledger import FleetLedger
from common.provisioning.records import Ended, Planned, Started
from common.topics.names import plans_topic
from common.wire.plans import decode_plan

if TYPE_CHECKING:
    from common.ports.servers import Log
    from common.provisioning.records import PlanRecord


class FleetWatch:
    """Follows one job's plans topic, which must be there."""

    def __init__(self, log: Log, job: str) -> None:
        self.ledger = FleetLedger()
        self.most_at_once = 0
        self._tail = log.tail(Partition(plans_topic(job), 0), 0)

    def look(self) -> list[tuple[str, str]]:
        """Read what is new, without waiting: sentences, each with its style.

        Raises:
            OutsideError: If a newer program wrote to the topic.
        """
        try:
            records = self._tail.read(READ_RECORDS, 0.0)
        except UnavailableError:
            return []
        news = list[tuple[str, str]]()
        for each in records:
            record = decoded(decode_plan, each)
            if self.ledger.feed(each.offset, record):
                news += self._sentences(record)
        self.most_at_once = max(self.most_at_once, len(self.ledger.running))
        return news

    def close(self) -> None:
        """Close the connection."""
        self._tail.close()

    def _sentences(self, record: PlanRecord | None) -> list[tuple[str, str]]:
        match record:
            case Planned():
                spot_usd = min(
                    (record.usd_per_hour.get(pool, 0.0) for pool in record.pools[1:]), default=0.0
                )
                what = (
                    f"plan {record.number}: {record.spot} on spot at ${spot_usd:.3f},"
                    f" {record.on_demand} on demand, {record.why}"
                )
                warning = [(f"warning: {record.warning}", "yellow")] if record.warning else []
                return [(what, "cyan"), *warning]
            case Started():
                machine = self.ledger.machines[record.launch]
                return [(f"{machine.worker} started ({machine.pool})", "green")]
            case Ended() if record.cause != "refused":  # else it is asked for again
                machine = self.ledger.machines[record.launch]
                style = "red" if record.cause in ("preempted", "failed", "lost") else "dim"
                return [(f"{machine.worker} {record.cause} ({machine.pool})", style)]
            case _:
                return []
