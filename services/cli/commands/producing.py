"""Sends a stream of records at the pace of a schedule, and reports progress.

Records follow due times instead of pauses between records. So after a stall (of the broker, this
machine, or a full queue) all due records are sent at once, and the average rate is the requested
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.embedded.kafka import KEPT_BYTES
from common.errors import UnavailableError, UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.kafka.port import Log, Writer
    from common.redis.port import Board

# Maximum number of records between two reports, so that the progress bar moves and Ctrl-C works.
_BURST = 1000
# Maximum wait between two reports, for the same reason.
_LONGEST_WAIT_S = 0.05
# Due times drawn at once, because a call costs much more than a draw.
_CHUNK = 4096
# Silence after which a command prints why it waits; an election takes less.
_SILENCE_S = 5.0
# Maximum overhead of Kafka's format per record in bytes: 61 for its batch and 16 for itself.
_FORMAT_BYTES = 80


class ArrivalSchedule:
    """Arrivals at a rate, steady or Poisson (lambda_A of the paper), counted from a start at 0 s.

    Args:
        rate_per_s: Records per second, above 0.
        rng: Draws the times between arrivals; None for a steady stream.
    """

    def __init__(self, rate_per_s: float, rng: np.random.Generator | None = None) -> None:
        self._gap_s = 1 / rate_per_s
        self._rng = rng
        # Number of arrivals before those in `_due_s`.
        self._passed = 0
        self._due_s = self._draw(0.0)  # ascending

    def due(self, elapsed_s: float) -> int:
        """Return the number of records due by now; `elapsed_s` must not decrease."""
        while self._due_s[-1] <= elapsed_s:
            self._passed += len(self._due_s)
            self._due_s = self._draw(float(self._due_s[-1]))
        return self._passed + int(np.searchsorted(self._due_s, elapsed_s, side="right"))

    def next_s(self, elapsed_s: float) -> float:
        """Return the time at which the next record is due."""
        return float(self._due_s[self.due(elapsed_s) - self._passed])

    def _draw(self, last_s: float) -> npt.NDArray[np.float64]:
        if self._rng is None:
            gaps_s = np.full(_CHUNK, self._gap_s)
        else:
            gaps_s = self._rng.exponential(self._gap_s, _CHUNK)
        return last_s + gaps_s.cumsum()


class Sent(NamedTuple):
    """Progress of a run."""

    records: int
    # Records that are due and not sent.
    behind: int


def send_all(
    records: Iterator[bytes],
    send: Callable[[bytes], None],
    *,
    schedule: ArrivalSchedule | None,
    room: Callable[[int], int],
    clock: Callable[[], float],
    wait: Callable[[float], None],
) -> Iterator[Sent]:
    """Send until there are no more records; yield after each burst and each wait.

    Args:
        records: Records to send.
        send: Sends one record.
        schedule: Due times of records; None sends them at once.
        room: Returns the maximum number of records to send now, given the number sent so far.
        clock: Monotonic clock in seconds.
        wait: Waits for a number of seconds.
    """
    start_s, sent, due = clock(), 0, 0
    while True:
        elapsed_s = clock() - start_s
        due = sent + _BURST if schedule is None else schedule.due(elapsed_s)
        wanted = min(due - sent, _BURST)
        burst = min(wanted, room(sent)) if wanted else 0
        if burst > 0:
            before = sent
            for record in itertools.islice(records, burst):
                send(record)
                sent += 1
            yield Sent(sent, due - sent if schedule else 0)
            if sent - before < burst:
                return
        else:
            yield Sent(sent, due - sent if schedule else 0)
            soon_s = schedule.next_s(elapsed_s) - elapsed_s if schedule and not wanted else 1.0
            wait(min(soon_s, _LONGEST_WAIT_S))


def unbounded(sent: int) -> int:  # noqa: ARG001 -- one of several functions for `room`
    """Return no limit for the records that are due."""
    return _BURST


class BacklogLimit:
    """Limits the unsettled records of a job in a topic, for a Kafka that cannot keep all of them.

    Args:
        limit: Maximum number of unsettled records.
    """

    def __init__(self, log: Log, board: Board, topic: str, limit: int) -> None:
        self._log = log
        self._board = board
        self._partitions = log.partitions(topic)
        self._limit = limit
        self._first_end = sum(log.bounds(partition).end for partition in self._partitions)

    def room(self, sent: int) -> int:
        """Return how many records may be sent now; 0 if the leader's status cannot be read."""
        try:
            leader_status = self._board.get_leader_status()
            bounds = {partition: self._log.bounds(partition) for partition in self._partitions}
        except UnavailableError:
            return 0
        settled = leader_status.settled if leader_status else {}
        below = sum(settled.get(place, bound.start) for place, bound in bounds.items())
        # This producer's records may still be under way; others' records count once they are in the
        # log.
        end = max(sum(bound.end for bound in bounds.values()), self._first_end + sent)
        return self._limit - (end - below)


def fitting(
    records: Iterator[bytes], log: Log, topic: str, count: int | None, max_lag: int
) -> Iterator[bytes]:
    """Return the same records if the built-in Kafka can keep them besides those it has.

    Args:
        records: Values to send; the partitions take turns.
        log: The built-in Kafka.
        topic: Topic that is written to.
        count: Number of records to send; None if the stream has no end.
        max_lag: Number of records that a job may be behind, perhaps all in one partition; 0 if the
            producer waits for no job.

    Raises:
        UserError: If the oldest records would be dropped.
    """
    places, taken, used = log.partitions(topic), list[bytes](), 0
    starts, ends = log.starts(places), log.ends(places)
    fullest = max(ends[place] - starts[place] for place in places)
    most = min((each for each in (max_lag or None, count) if each is not None), default=None)
    fits = most is not None
    for record in itertools.islice(records, most) if fits else ():
        taken.append(record)
        used += len(record) + _FORMAT_BYTES
        kept = len(taken) if max_lag else fullest - (-len(taken) // len(places))
        fits = kept * used <= KEPT_BYTES * len(taken)
        if not fits:
            break
    if not fits:
        raise UserError(
            f"{topic}: these records do not fit into the built-in Kafka, which keeps"
            f" {KEPT_BYTES >> 20} MB of each partition; send fewer with --records, use a topic with"
            " more partitions, wait for a job with --job and a lower --max-lag, or start Apache"
            " Kafka with `doll up --kafka-real`"
        )
    return itertools.chain(taken, records)


class RetryingWriter:
    """Writes to one topic, and prints once why it waits while Kafka accepts nothing.

    Args:
        topic: Topic to write to; partitions take turns.
        clock: Monotonic clock in seconds.
        say: Prints a line.
    """

    def __init__(
        self,
        writer: Writer,
        topic: str,
        clock: Callable[[], float],
        wait: Callable[[float], None],
        say: Callable[[str], None],
    ) -> None:
        self._writer = writer
        self._topic = topic
        self._clock = clock
        self._wait = wait
        self._say = say

    def send(self, value: bytes) -> None:
        """Send a record once there is room for it.

        Raises:
            DeliveryError: If an earlier record cannot be delivered.
            UnknownTopicError: If the topic was deleted.
        """
        due_s = self._clock() + _SILENCE_S
        while True:
            try:
                self._writer.append(self._topic, value, partition=None)
            except UnavailableError as error:
                if self._clock() >= due_s:
                    self._say(f"waiting: {error}")
                    due_s = inf
                self._wait(_LONGEST_WAIT_S)
                self._writer.poll()
            else:
                return
