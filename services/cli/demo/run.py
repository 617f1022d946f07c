"""A demo from its submission to its last checkpoint: one loop that streams, watches and kills."""

from __future__ import annotations

import contextlib
import time
from itertools import cycle, islice
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from common.core.spans import Partition
from common.embedded.services import stop_all
from common.errors import DollError, UnavailableError
from common.jobs.operations import JobOperations
from common.jobs.progress import JobProgress
from common.jobs.watching import READ_RECORDS, HistoryReader, Poller, decoded, read_history
from common.kafka.names import plans_topic
from common.kafka.opening import open_log
from common.kafka.port import Log, NewTopic
from common.redis.board import open_board
from common.spot.plans import decode_plan
from common.spot.provisioning.fleet_ledger import FleetLedger
from common.spot.provisioning.records import Ended, Planned, PlanRecord, Started
from common.storage.port import open_blobs
from common.storage.store import CheckpointStore
from common.telemetry.logging import event_logger
from services.cli.commands import sources
from services.cli.commands.producing import ArrivalSchedule, send_all
from services.cli.demo.plan import DemoPlan, Preemption
from services.cli.demo.screen import DemoStatus, Screen
from services.cli.local import open_page, start_services

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.config.settings import Settings
    from common.core.messages import Positions
    from common.data.records import Records
    from services.cli.system.ending import Ending

# All processes load torch at once, perhaps on one busy core.
_START_S = 90.0
# Time after the last record until all records must be settled. A dead worker's partitions move
# within ten seconds.
_DRAIN_S = 60.0
# Workers finish their current gradient before they leave.
_RELEASE_S = 60.0
# Time past its deadline until a job must have ended.
_LATE_S = 30.0
_CHECKPOINT_S = 30.0
_FLUSH_S = 30.0
# Records are sent in bursts of this length.
_TURN_S = 0.02

# Maximum number of records sent and not yet in a checkpoint. It is far below the 5 MB that a
# partition of the embedded Kafka keeps (72 bytes per record), and far above the number sent between
# two checkpoints.
_MOST_UNSETTLED = 40_000

_log = event_logger(__name__)


class DemoFleetView:
    """Machines of a demo: reads the plans topic, which must exist, and describes its records."""

    def __init__(self, log: Log, job: str) -> None:
        self.ledger = FleetLedger()
        self.most_at_once = 0
        self._tail = log.tail(Partition(plans_topic(job), 0), 0)

    def look(self) -> list[tuple[str, str]]:
        """Read new records without waiting; return sentences, each with its style.

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
            # A refused machine is ordered again.
            case Ended() if record.cause != "refused":
                machine = self.ledger.machines[record.launch]
                style = "red" if record.cause in ("preempted", "failed", "lost") else "dim"
                return [(f"{machine.worker} {record.cause} ({machine.pool})", style)]
            case _:
                return []


class Demo:
    """A job and its processes on running servers; ends everything that it starts.

    Args:
        plan: Plan of the demo.
        logs: Folder for the processes' logs.
        ending: Its `asked` becomes True if the demo should end early.
    """

    def __init__(
        self, plan: DemoPlan, settings: Settings, logs: Path, screen: Screen, ending: Ending
    ) -> None:
        self.plan = plan
        # Reason why the job ended, with a market.
        self.ended_by = ""
        # Seconds from the kill to the next update.
        self.pause_s: float | None = None
        self.fleet: DemoFleetView | None = None
        self.log = open_log(settings, "demo")
        self._screen = screen
        self._ending = ending
        self._phase = "starting"
        self._sent = 0
        self._preemption = Preemption(plan.records // 2, plan.away_s)
        # Start of the stream in seconds since 1970.
        self._began_s = 0.0
        self._job_store = JobOperations(self.log)
        spec = plan.job()
        for stream in spec.streams:
            self.log.create_topics([NewTopic(stream, plan.partitions)])
        workers = 0 if plan.provision else plan.workers
        self._services = start_services(settings, logs, workers, job=plan.name)
        self._workers = {each.name for each in self._services[1:]} if workers else set[str]()
        if plan.provision:
            self._page = open_page(settings, logs, plan.name, "viewer")
            self._services.append(self._page.service)
        self.record = self._job_store.submit(spec)
        job = self.record.id
        self.store = CheckpointStore(open_blobs(settings), job)
        # Positions after the last record produced.
        self.ends: Positions = dict(self.record.first)
        if plan.provision:
            self.log.create_topics([NewTopic(plans_topic(job), kept_forever=True)])
            self.fleet = DemoFleetView(self.log, job)
        self._board = open_board(settings, job)
        self._history = HistoryReader(job, self.log)
        self._poller = Poller(self.record, lambda: self.log, lambda _: self._board, _log)
        self.progress = JobProgress(self.record)

    def close(self) -> None:
        """Stop the processes, and delete everything on the servers except the topics."""
        stop_all(self._services)
        self._history.close()
        if self.fleet is not None:
            self.fleet.close()
        self._job_store.close()
        with contextlib.suppress(UnavailableError):
            # The server may keep running.
            self._board.wipe()
        self._board.close()

    @property
    def preemptions(self) -> int:
        """Number of killed workers, or of preempted machines."""
        if self.fleet is None:
            return int(self._preemption.killed_at is not None)
        return self.fleet.ledger.ended["preempted"]

    @property
    def streaming_s(self) -> float:
        """Seconds from the first record to the last update."""
        return (self.progress.updates.last_at_s or 0.0) - self._began_s

    def run(self, data: Records) -> None:
        """Stream until every record is settled or the job ends; wait for the last checkpoint.

        Raises:
            typer.Exit: If this process should end early.
            DollError: If a process ended by itself, or a time limit was exceeded.
        """
        if self.plan.provision:
            self._run_to_deadline(data)
        else:
            self._run_to_end(data)
        if not self._until(self._checkpointed, _CHECKPOINT_S):
            raise UnavailableError(f"the last checkpoint is missing after {_CHECKPOINT_S:g} s")

    def _run_to_end(self, data: Records) -> None:
        """Stream all records while a worker is killed and restarted."""
        if not self._until(self._ready, _START_S):
            raise UnavailableError(f"the processes did not start work within {_START_S:g} s")
        self._enter("streaming", f"{self.plan.workers} workers are ready; streaming starts")
        self._stream(data, self.plan.records)
        self._enter("draining", "all records were sent")
        whole = self._until(self._at_rest, _DRAIN_S)
        # If some are not settled, the audit shows what is missing.
        self._enter(
            "checking", "every record is settled" if whole else "some records are not settled"
        )
        self._job_store.patch(self.plan.name, "the demo is over", wanted="stopped")

    def _run_to_deadline(self, data: Records) -> None:
        """Stream until the job ends, and wait until its machines are released."""
        theta = f"{self.plan.updates:,} updates within {self.plan.deadline_s:.0f} s"
        self._enter("streaming", f"job submitted: {theta}, on up to {self.plan.workers} machines")
        self._screen.happened(f"live page: {self._page}", monotonic(), "bold")
        self._stream(data, None)
        self._enter("releasing", f"the job ended: {self.ended_by}")
        if not self._until(self._given_back, _RELEASE_S):
            raise UnavailableError(f"the machines were not released within {_RELEASE_S:g} s")
        self._enter("checking", "all machines are released")

    def _stream(self, data: Records, records: int | None) -> None:
        """Send a given number of records. Without a number, send until the job ends."""
        plan, spec, writer = self.plan, self.record.spec, self.log.writer()
        values = sources.stream(
            data, spec.records.codec, np.random.default_rng(plan.seed), repeat=True, warp=True
        )
        places = cycle(self.record.first)
        self._began_s = time.time()

        def send(value: bytes) -> None:
            place = next(places)
            writer.append(place.topic, value, partition=place.index)
            self.ends[place] += 1

        try:
            for sent, _ in send_all(
                islice(values, records),
                send,
                schedule=ArrivalSchedule(plan.rate_per_s),
                room=lambda sent: _MOST_UNSETTLED - (sent - self._settled()),
                clock=monotonic,
                wait=lambda wait_s: self._turn(max(wait_s, _TURN_S)),
            ):
                self._sent = sent
                writer.poll()
                self._turn(0.0)
                if records is None and self._over():
                    return
            if not writer.flush(_FLUSH_S):
                raise UnavailableError(f"Kafka did not accept all records within {_FLUSH_S:g} s")
        finally:
            writer.close()

    def _turn(self, wait_s: float) -> None:
        self._ending.check()
        now, now_s = monotonic(), time.time()
        self._check_services()
        with contextlib.suppress(UnavailableError):
            read_history(self._history, self.progress, now_s, wait_s)
        look = self._poller.look(now_s, now)
        # During an outage of Redis, the last known values stay.
        if look is not None and not look.board_away:
            self.progress.look(look)
        now = monotonic()
        if self.fleet is not None:
            for what, style in self.fleet.look():
                self._screen.happened(what, now, style)
        else:
            self._preempt(now)
        self._screen.show(self._status, now)

    def _check_services(self) -> None:
        for service in self._services:
            code = service.exit_code
            if code is None or (self._preemption.away and service is self._services[-1]):
                continue
            self._screen.quote(service.last_words())
            raise DollError(
                f"{service.name} ended unexpectedly with status {code}; its log is {service.log}"
            )

    def _preempt(self, now: float) -> None:
        """Kill and restart the last worker when due; measure the pause until the next update."""
        victim = self._services[-1]
        match self._preemption.due(self._sent, time.time()):
            case "kill":
                victim.kill()
                self._screen.happened(f"{victim.name} killed without notice", now, "red")
            case "restart":
                victim.restart()
                self._screen.happened(f"{victim.name} restarted", now, "green")
            case None:
                pass
        killed_s, last_s = self._preemption.killed_at, self.progress.updates.last_at_s or 0.0
        if self.pause_s is None and killed_s is not None and last_s > killed_s:
            self.pause_s = last_s - killed_s
            self._screen.happened(f"next update {self.pause_s:.2f} s after the kill", now)

    def _until(self, condition: Callable[[], bool], patience_s: float) -> bool:
        deadline = monotonic() + patience_s
        while True:
            # This precedes the condition, because this process may be stopped for long in between.
            is_late = monotonic() > deadline
            if condition():
                return True
            if is_late:
                return False
            self._turn(_TURN_S)

    def _enter(self, phase: str, what: str) -> None:
        self._phase = phase
        self._screen.happened(what, monotonic())

    # --- state -----------------------------------------------------------------------------------

    def _alive(self) -> set[str]:
        statuses = self.progress.seen.statuses or {}
        return {worker for worker, status in statuses.items() if status == "alive"}

    def _ready(self) -> bool:
        return self.progress.seen.leader_status is not None and self._workers <= self._alive()

    def _settled(self) -> int:
        """Return the number of records that a checkpoint covers."""
        leader_status = self.progress.seen.leader_status
        settled = leader_status.settled if leader_status else {}
        return sum(settled.get(place, at) - at for place, at in self.record.first.items())

    def _at_rest(self) -> bool:
        """Return True if everything sent is settled and the killed worker works again."""
        claimed = self.progress.claims.claimed
        drained = self.progress.waiting == 0 and all(
            claimed.get(place, 0) >= end for place, end in self.ends.items()
        )
        return drained and self._preemption.over and self._ready()

    def _over(self) -> bool:
        """Return True if the job ended by itself.

        Raises:
            UnavailableError: If the job is `_LATE_S` past its deadline.
        """
        record = self._job_store.refresh(0.0).get(self.plan.name)
        if record is not None and record.wanted == "stopped":
            self.ended_by = record.reason
            return True
        if time.time() > self.record.submitted_s + self.plan.deadline_s + _LATE_S:
            raise UnavailableError(f"the job did not end within {_LATE_S:g} s after its deadline")
        return False

    def _given_back(self) -> bool:
        return self.fleet is not None and self.fleet.ledger.settled is not None

    def _checkpointed(self) -> bool:
        latest = self.store.latest()
        return latest is not None and latest.version >= self.progress.version

    def _status(self) -> DemoStatus:
        now_s = time.time()
        numbers = self.progress.numbers(now_s)
        shown = {
            "updates": f"{numbers.version:,}",
            "loss": _number(numbers.loss),
            "accuracy": _number(numbers.metrics.get("accuracy")),
            "records/s": f"{numbers.samples_per_s or 0.0:,.0f}",
            "workers": f"{len(self._alive())}/{self.plan.workers}",
            # Records sent and not yet trained.
            "lag": f"{self._sent - numbers.samples:,}",
        }
        if self.fleet is not None:
            shown["spent"] = f"${self.fleet.ledger.spent_usd(now_s):.5f}"
        return DemoStatus(self._phase, self._sent, self.plan.records, shown)


def _number(value: float | None) -> str:
    """Format a number for people; None is unknown."""
    return "-" if value is None else f"{value:.3f}"
