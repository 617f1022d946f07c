"""One member of a consumer group: rebalances become events, positions come from outside."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException, TopicPartition

from common.adapters.kafka_log.client import (
    OUT_OF_RANGE,
    Complaints,
    arrival_s,
    as_ours,
    cause_of,
    consume,
    made,
)
from common.adapters.kafka_log.cursor import Cursor
from common.adapters.kafka_log.lull import Lull
from common.adapters.kafka_log.settings import member_properties
from common.core.events import Assigned, Revoked
from common.core.spans import Partition
from common.ports import Bounds, Fetched, OutOfRange, StreamEvent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.adapters.kafka_log.client import Record
    from common.adapters.kafka_log.settings import KafkaSettings

_LOGGER = logging.getLogger(__name__)

# The client starts an assigned partition in its own time and refuses to seek before that.
_SEAT_RETRY_S = 0.005
_MEASURE_TIMEOUT_S = 1.0  # inside `poll`, so not for long


def _place_of(record: Record) -> tuple[str, int]:
    return record.topic(), record.partition()


class KafkaStreamReader:
    """The `StreamReader` port on a consumer that is paused except where it has been placed.

    A partition of this member is in one of three states: silent (no cursor), placed but not yet
    sought at the client (`_unsought`), or flowing. Messages count only of partitions that flow.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        topics: Sequence[str],
        member: str,
        *,
        hold: bool,
    ) -> None:
        self._name = f"member {member} of group {group}"
        self._events: list[StreamEvent] = []  # what callbacks told during the current poll
        self._owned: set[Partition] = set()
        self._cursors: dict[Partition, Cursor] = {}
        self._unsought: set[Partition] = set()
        self._unmeasured: set[Partition] = set()  # out of range, bounds not yet known
        self._halted: set[Partition] = set()  # out of range: the client will not seek there again
        self._paused = False  # asked for by the caller
        self._lull = Lull()
        self._stopped = False  # in effect at the client, after a lull that lasted
        self._complaints = Complaints()
        properties = member_properties(settings, group, member, hold=hold)
        self._client = made(Consumer, properties | {"error_cb": self._complaints})
        self._client.subscribe(
            list(topics),
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_revoke,
        )

    def poll(self, max_records: int, timeout_s: float) -> tuple[StreamEvent, ...]:
        """See the port.

        Raises:
            UnavailableError: If the broker is away; call again.
            OutsideError: If this member cannot go on (fenced by another of its name, refused).
        """
        self._complaints.raise_fatal(self._name)
        wanted = 0 if self._paused else max_records
        self._stop(stop=self._lull.lasts(wanted))
        self._seek_unsought()
        if self._unsought:
            timeout_s = min(timeout_s, _SEAT_RETRY_S)
        messages = self._messages(wanted, timeout_s)
        self._revive_halted()
        runs = self._runs(messages)
        self._measure_unmeasured()
        events, self._events = (*self._events, *runs), []
        if not events:
            self._complaints.raise_away(self._name)
        return events

    def place(self, positions: Mapping[Partition, int]) -> None:
        """See the port; partitions that are not this member's (any more) are left out."""
        for partition in self._owned & positions.keys():
            self._cursors[partition] = Cursor(partition, positions[partition])
            self._unmeasured.discard(partition)
            self._unsought.add(partition)
        self._lull.forget(positions.keys())
        self._seek_unsought()

    def pause(self) -> None:
        """See the port."""
        self._paused = True

    def resume(self) -> None:
        """See the port."""
        self._paused = False

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """See the port."""
        offsets = [TopicPartition(*partition, at) for partition, at in positions.items()]
        if not offsets:
            return
        try:
            self._client.commit(offsets=offsets, asynchronous=True)
        except KafkaException as raised:
            _LOGGER.info("commit_refused group_member=%r reason=%r", self._name, str(raised))

    def lag(self) -> dict[Partition, int]:
        """See the port; a partition appears with its first fetch, and stands still while paused."""
        lags = {}
        for partition, cursor in self._cursors.items():
            _, end = self._client.get_watermark_offsets(TopicPartition(*partition), cached=True)
            if end >= 0:
                lags[partition] = max(0, end - cursor.position)
        return lags

    def close(self) -> None:
        """See the port."""
        self._client.close()

    # --- rebalances: called by the client inside `consume` ---------------------------------------

    def _on_assign(self, client: Consumer, assigned: list[TopicPartition]) -> None:
        partitions = tuple(Partition(each.topic, each.partition) for each in assigned)
        # Any number will do, none is read before `place` says which; a number spares the client the
        # look-up of committed offsets.
        silent = [TopicPartition(*partition, 0) for partition in partitions]
        client.incremental_assign(silent)
        client.pause(silent)
        self._owned.update(partitions)
        if partitions:
            self._events.append(Assigned(partitions))

    def _on_revoke(self, _client: Consumer, revoked: list[TopicPartition]) -> None:
        partitions = tuple(Partition(each.topic, each.partition) for each in revoked)
        for partition in partitions:
            self._owned.discard(partition)
            self._silence(partition)
            self._unmeasured.discard(partition)
            self._halted.discard(partition)
        if partitions:
            self._events.append(Revoked(partitions))

    # --- positions -------------------------------------------------------------------------------

    def _silence(self, partition: Partition) -> None:
        self._cursors.pop(partition, None)
        self._unsought.discard(partition)

    def _stop(self, *, stop: bool) -> None:
        """Stop or restart the flow at the client; what it had fetched, it fetches again."""
        if stop == self._stopped:
            return
        self._stopped = stop
        if stop:
            self._client.pause([TopicPartition(*partition) for partition in self._cursors])
            self._runs(self._lull.take_all())  # for the errors among them
        else:
            self._unsought.update(self._cursors)

    def _seek_unsought(self) -> None:
        if self._stopped:
            return
        for partition in self._unsought - self._halted:
            target = TopicPartition(*partition, self._cursors[partition].position)
            try:
                self._client.seek(target)
            except KafkaException:
                continue  # not started yet: tried again by the next poll
            # After the seek, or the client would fetch from where it stood.
            self._client.resume([target])
            self._wake(target)
            self._unsought.discard(partition)

    def _wake(self, target: TopicPartition) -> None:
        """Make the client fetch at once what was resumed; by itself it may sleep for a second.

        Its thread wakes where a seek changes the partition's state, which one to 0 does not, and
        for every request.
        """
        with suppress(KafkaException):  # then it wakes later
            if target.offset > 0:
                self._client.seek(target)
            else:
                self._client.get_watermark_offsets(target, timeout=_MEASURE_TIMEOUT_S)

    def _revive_halted(self) -> None:
        """Start again at their new positions those that the client has stopped for good.

        Only right after `consume`, when no rebalance waits for its callback: the client would take
        these calls for the answer to it.
        """
        if self._stopped:
            return
        for partition in self._unsought & self._halted:
            target = TopicPartition(*partition, self._cursors[partition].position)
            try:
                self._client.incremental_unassign([target])
                self._client.incremental_assign([target])
                self._client.resume([target])
            except KafkaException as raised:
                raise as_ours(cause_of(raised), f"{self._name}, {partition}") from raised
            self._halted.discard(partition)
            self._unsought.discard(partition)

    def _measure_unmeasured(self) -> None:
        """Tell the bounds of partitions that are out of range, or seek again where they are not."""
        for partition in tuple(self._unmeasured):
            try:
                low, high = self._client.get_watermark_offsets(
                    TopicPartition(*partition), timeout=_MEASURE_TIMEOUT_S
                )
            except KafkaException:
                continue  # the broker is away: tried again by the next poll
            self._unmeasured.discard(partition)
            cursor = self._cursors.get(partition)
            if cursor is None:
                continue
            if low <= cursor.position <= high:
                self._unsought.add(partition)  # the verdict on an earlier position came late
                continue
            self._silence(partition)
            self._events.append(OutOfRange(partition, Bounds(low, high)))

    # --- records ---------------------------------------------------------------------------------

    def _messages(self, wanted: int, timeout_s: float) -> list[Record]:
        """Run callbacks and return records that are wanted, those put aside first."""
        if wanted < 1 and not self._stopped:
            self._lull.put(consume(self._client, 1, 0.0))
            if not self._events:
                time.sleep(timeout_s)
            return []
        count = max(wanted, 1)  # to ask for none would run no callbacks; `_runs` drops what comes
        aside = self._lull.take(count)
        if len(aside) == count:
            return aside
        wait_s = 0.0 if aside else timeout_s
        return aside + consume(self._client, count - len(aside), wait_s, lambda: bool(self._events))

    def _runs(self, messages: list[Record]) -> list[Fetched]:
        """Runs of one partition each; after callbacks, so that only what flows now counts."""
        runs = []
        for place, group in groupby(messages, key=_place_of):
            run = list(group)
            if any(record.error() is not None for record in run):
                run = self._without_errors(run)
            cursor = self._cursors.get(Partition(*place))
            if self._stopped or cursor is None or cursor.partition in self._unsought or not run:
                continue
            first, last, again = cursor.take([record.offset() for record in run])
            if again:
                self._unsought.add(cursor.partition)
            if first < last:
                runs.append(_fetched(cursor.partition, run[first:last]))
        return runs

    def _without_errors(self, run: list[Record]) -> list[Record]:
        good = []
        for message in run:
            error = message.error()
            if error is None:
                good.append(message)
            elif error.code() in OUT_OF_RANGE and message.topic() is not None:
                partition = Partition(message.topic(), message.partition())
                if partition in self._owned:
                    self._halted.add(partition)
                    self._unmeasured.add(partition)
            else:
                self._complaints(error)
                _LOGGER.warning("consumer_error group_member=%r error=%s", self._name, error)
        return good


def _fetched(partition: Partition, run: list[Record]) -> Fetched:
    return Fetched(
        partition,
        [record.offset() for record in run],
        [record.value() for record in run],
        arrival_s(run[0]),
        arrival_s(run[-1]),
    )
