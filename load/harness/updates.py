"""Measures what a job has learned from its updates topic, the public audit trail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from common.core.history import History
from common.core.messages import AuditRecord, Lead, ModelId, UpdateApplied, WorkerId
from common.core.spans import Partition
from common.errors import TruncatedError, UnavailableError
from common.kafka.names import updates_topic
from common.wire import messages as wire
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    from common.kafka.port import Log, Tail

_READ_RECORDS = 1000
_READ_S = 0.1


def read_audit(tail: Tail, wait_s: float) -> list[tuple[int, AuditRecord]]:
    """Return new records of an updates topic with their offsets. Waits up to `wait_s`.

    Raises:
        OutsideError: If Kafka is unavailable, or the topic was cut.
    """
    records = tail.read(_READ_RECORDS, wait_s)
    return [(record.offset, wire.decode_audit(record.value or b"")) for record in records]


class Pace(NamedTuple):
    """Updates applied between the first and the last update of a measurement."""

    updates: int
    samples: int
    seconds: float

    @property
    def updates_per_s(self) -> float:
        """Rate of updates."""
        return self.updates / self.seconds

    @property
    def samples_per_s(self) -> float:
        """Rate of records that became part of an update."""
        return self.samples / self.seconds


class UpdatesMeter:
    """Reads a job's updates as they are applied. Belongs to one thread."""

    def __init__(self, log: Log, job: str) -> None:
        self._job = job
        self._tail = log.tail(Partition(updates_topic(job), 0), 0)

    def close(self) -> None:
        """Close the connection."""
        self._tail.close()

    def await_quiet(self, quiet_s: float, timeout_s: float) -> None:
        """Read until no update has come for `quiet_s`.

        Raises:
            NotMeasuredError: If that does not happen within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        quiet_until = time.monotonic() + quiet_s
        while time.monotonic() < quiet_until:
            if self._read():
                quiet_until = time.monotonic() + quiet_s
            if time.monotonic() > deadline:
                raise NotMeasuredError(f"{self._job} still made updates after {timeout_s:g} s")

    def await_workers(self, names: Iterable[str], decided: int, timeout_s: float) -> None:
        """Read until updates have used a recent batch of every worker.

        Args:
            names: The workers.
            decided: Control offset. Earlier batches do not count.
            timeout_s: Maximum time to wait.

        Raises:
            NotMeasuredError: If it took longer. Names the workers.
        """
        deadline = time.monotonic() + timeout_s
        still = set(names)
        while still:
            for update in self._read():
                still.difference_update(b.worker for b in update.batches if b.offset >= decided)
            if still and time.monotonic() > deadline:
                missing = ", ".join(sorted(still))
                raise NotMeasuredError(f"{self._job}: no batch of {missing} within {timeout_s:g} s")

    def measure(self, seconds: float) -> Pace:
        """Count updates for `seconds`. The next update only starts the clock.

        Raises:
            NotMeasuredError: If fewer than two updates came.
        """
        started = ended = time.monotonic()
        deadline = started + seconds
        updates, samples, begun = 0, 0, False
        while time.monotonic() < deadline:
            read = self._read()
            if not read:
                continue
            ended = time.monotonic()
            if begun:
                updates += len(read)
                samples += sum(update.samples for update in read)
            else:
                started, begun, deadline = ended, True, ended + seconds
        if not updates:
            raise NotMeasuredError(f"{self._job} made fewer than two updates in {seconds:g} s")
        return Pace(updates, samples, ended - started)

    def _read(self) -> list[UpdateApplied]:
        audit = [record for _, record in read_audit(self._tail, _READ_S)]
        if any(isinstance(record, Lead) and record.after >= 0 for record in audit):
            raise NotMeasuredError(
                f"the leader of {self._job} changed, so its updates do not count"
            )
        return [record for record in audit if isinstance(record, UpdateApplied)]


class SeenUpdate(NamedTuple):
    """An update that counted when it was read."""

    seen_at: float  # monotonic
    # Time when the leader wrote it, since 1970.
    applied_s: float
    model: ModelId
    samples: int


class Fallback(NamedTuple):
    """A Lead that rolled updates back."""

    seen_at: float  # monotonic
    base: ModelId
    head: ModelId  # newest update before it


class UpdatesWatch(threading.Thread):
    """Follows a job's updates topic and records each update that counts when it arrives.

    It waits for an unavailable broker, so that outages are part of the pauses. If the topic loses
    records, it reads the topic again from the beginning, and records no update twice.
    """

    def __init__(self, log: Log, job: str) -> None:
        super().__init__(name="updates", daemon=True)
        self.updates = list[SeenUpdate]()
        # Workers whose batches were in an update.
        self.workers = set[WorkerId]()
        self.samples = 0  # all updates
        self.leads = 0
        self.fallbacks = list[Fallback]()
        self._fault: BaseException | None = None
        self._log = log
        self._place = Partition(updates_topic(job), 0)
        self._tail = log.tail(self._place, 0)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Read until stopped."""
        # `noted` is the offset below which records have been counted.
        history, noted = History(), 0
        try:
            while not self._stopped.is_set():
                try:
                    records = self._tail.read(_READ_RECORDS, _READ_S)
                except UnavailableError:
                    continue
                except TruncatedError as lost:
                    self._tail.close()
                    self._tail = self._log.tail(self._place, 0)
                    history, noted = History(), min(noted, lost.divergent_offset or 0)
                    continue
                now = time.monotonic()
                for offset, _key, value, applied_s, *_ in records:
                    record, head = wire.decode_audit(value or b""), history.head
                    counts = history.feed(offset, record) and offset >= noted
                    if counts and isinstance(record, UpdateApplied):
                        model = ModelId(record.epoch, record.version)
                        self.updates.append(SeenUpdate(now, applied_s, model, record.samples))
                        self.workers.update(batch.worker for batch in record.batches)
                        self.samples += record.samples
                    if counts and isinstance(record, Lead):
                        self.leads += 1
                        if record.base != head:
                            self.fallbacks.append(Fallback(now, record.base, head))
                    noted = max(noted, offset + 1)
        except BaseException as fault:  # noqa: BLE001 -- raised again by `check`, in the main thread
            self._fault = fault
        finally:
            self._tail.close()

    def check(self) -> None:
        """Make sure that the thread still reads.

        Raises:
            NotMeasuredError: If it failed.
        """
        if self._fault is not None:
            raise NotMeasuredError(f"the updates cannot be read: {self._fault}") from self._fault

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self.join()
