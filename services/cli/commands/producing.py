"""Sends a stream of records at the pace of a schedule, and tells how it goes.

The pace is held against due times, not by sleeping between records: after a stall (the broker, this
machine, a full queue) what is due is sent at once, and the rate over time is the one asked for.
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

_BURST = 1000  # records between two reports, so that a bar moves and Ctrl-C is heard
_LONGEST_WAIT_S = 0.05  # likewise
_CHUNK = 4096  # due times drawn at once: a draw costs little, a call much
_SILENCE_S = 5.0  # that a command stands still before it says why: an election takes less
# Most bytes that Kafka's format adds to a record: 61 for its batch and 16 for itself.
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
        self._passed = 0  # arrivals before those in `_due_s`
        self._due_s = self._draw(0.0)  # ascending

    def due(self, elapsed_s: float) -> int:
        """How many records should have been sent by now; `elapsed_s` never goes back."""
        while self._due_s[-1] <= elapsed_s:
            self._passed += len(self._due_s)
            self._due_s = self._draw(float(self._due_s[-1]))
        return self._passed + int(np.searchsorted(self._due_s, elapsed_s, side="right"))

    def next_s(self, elapsed_s: float) -> float:
        """When the next record is due after those that are."""
        return float(self._due_s[self.due(elapsed_s) - self._passed])

    def _draw(self, last_s: float) -> npt.NDArray[np.float64]:
        if self._rng is None:
            gaps_s = np.full(_CHUNK, self._gap_s)
        else:
            gaps_s = self._rng.exponential(self._gap_s, _CHUNK)
        return last_s + gaps_s.cumsum()


class Sent(NamedTuple):
    """How far it is."""

    records: int
    behind: int  # records that are due and not sent


def send_all(
    records: Iterator[bytes],
    send: Callable[[bytes], None],
    *,
    schedule: ArrivalSchedule | None,
    room: Callable[[int], int],
    clock: Callable[[], float],
    wait: Callable[[float], None],
) -> Iterator[Sent]:
    """Send until there are no more records; yields after each burst and each wait.

    Args:
        records: What to send.
        send: Sends one record.
        schedule: When records are due; None: at once.
        room: How many records may go now, after so many sent, whatever is due.
        clock: Seconds that never go back.
        wait: Waits so many seconds.
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


def unbounded(sent: int) -> int:  # noqa: ARG001 -- one of several rules for `room`
    """Room for as many records as are due."""
    return _BURST


class BacklogLimit:
    """Keeps what a job has not settled of a topic below a limit, where Kafka cannot keep it all.

    Args:
        limit: Records.
    """

    def __init__(self, log: Log, board: Board, topic: str, limit: int) -> None:
        self._log = log
        self._board = board
        self._partitions = log.partitions(topic)
        self._limit = limit
        self._first_end = sum(log.bounds(partition).end for partition in self._partitions)

    def room(self, sent: int) -> int:
        """How many records may go now; none while the leader's status cannot be read."""
        try:
            leader_status = self._board.get_leader_status()
            bounds = {partition: self._log.bounds(partition) for partition in self._partitions}
        except UnavailableError:
            return 0
        settled = leader_status.settled if leader_status else {}
        below = sum(settled.get(place, bound.start) for place, bound in bounds.items())
        # Our own records may still be on their way, those of others are counted by the log alone.
        end = max(sum(bound.end for bound in bounds.values()), self._first_end + sent)
        return self._limit - (end - below)


def fitting(
    records: Iterator[bytes], log: Log, topic: str, count: int | None, max_lag: int
) -> Iterator[bytes]:
    """Return the same records, if the built-in Kafka can keep them beside those that are there.

    Args:
        records: Values to send, in the order of the partitions, which take turns.
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
            " more partitions, name a job with --job and a lower --max-lag, or start a real Kafka"
            " with `doll up --kafka-real`"
        )
    return itertools.chain(taken, records)


class RetryingWriter:
    """Writes to one topic, and says once why nothing goes on while Kafka takes nothing.

    Args:
        topic: What is written to; partitions take turns.
        clock: Seconds that never go back.
        say: Shows a line to people.
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
        """Send a record, once there is room for it.

        Raises:
            DeliveryError: If an earlier record can not be delivered.
            UnknownTopicError: If the topic is not there any more.
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
