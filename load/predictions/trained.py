"""A job that trains while its model is served, observed from outside."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from common.core.history import History
from common.data.codecs import codec_of
from common.embedded.services import EmbeddedService, stop_all
from common.errors import UnavailableError
from common.jobs.models import heads_on_board
from common.kafka.names import updates_topic
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded
from common.redis.board import open_board
from common.wire.messages import decode_audit
from load.harness.counting import Aggregation, aggregated
from load.harness.stack import NotMeasuredError, Servers, await_until, check, events
from load.throughput.cases import CASES, find_records

if TYPE_CHECKING:
    from common.core.messages import ModelId

HOT_S = 0.2
_RECORDS_PER_S = 1000
# Interval between writes of records.
_TICK_S = 0.1
# Interval between polls for snapshots.
_LOOK_S = 0.02
# Includes processes that load torch on a busy machine.
_START_S = 120.0
_CASE = CASES["cnn"]


class Seen(NamedTuple):
    """A snapshot on the board."""

    at: float  # first seen, monotonic
    made: ModelId


def stale_s(seen: Sequence[Seen], made: ModelId, at: float) -> float:
    """Return how long a newer snapshot had existed when a version answered.

    Args:
        seen: All snapshots, in order of appearance.
        made: The version. If the observer missed its snapshot, the first snapshot after those of
            older versions counts as the newer one.
        at: Time of the answer. The server may have known a snapshot that the observer had not seen.
    """
    known, coming = seen[: (now := bisect_right(seen, at, key=_at))], seen[now:]
    after: Seen | None = None
    for each in reversed(known):
        if each.made == made:
            return 0.0 if after is None else at - after.at
        after = each
    if any(each.made == made for each in coming):
        return 0.0
    older = [n for n, each in enumerate(known) if each.made < made]
    follows = known[older[-1] + 1 :] if older else known
    return at - follows[0].at if follows else 0.0


def _at(seen: Seen) -> float:
    return seen.at


class Trained:
    """A job with two coordinators, one or two workers, and a steady stream of records.

    Args:
        aggregation: Owner of the weights. If workers hold them, there are two workers.
    """

    def __init__(self, on: Servers, name: str, aggregation: Aggregation = "board") -> None:
        self.job = name
        self._on, self._log = on, on.log
        self.board = open_board(on.settings, name)
        topic = f"{name}-records"
        self._log.create_topics([NewTopic(topic, 4)])
        self._spec = _CASE.job(
            *(name, topic),
            batch_size=32,
            hot_snapshot={"every_s": HOT_S},
            checkpoint={"every_s": 5.0},
            aggregation=aggregated(aggregation),
        )
        on.submit(self._spec)
        self.seen = list[Seen]()
        self._ended = threading.Event()
        self._faults = list[BaseException]()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True)
            for work in (self._write, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        self.coordinators = [on.start("coordinator", f"{name}-c{n}") for n in range(2)]
        self.services = [
            *self.coordinators,
            *(
                on.start("worker", f"{name}-w{n}", "--job", name)
                for n in range(1 if aggregation == "board" else 2)
            ),
        ]
        await_until(lambda: self._check() and len(self.seen) > 1, _START_S, "snapshots")

    def kill_leader(self, before: Callable[[], object] | None = None) -> None:
        """SIGKILL the leader, restart it, and wait for a snapshot of another leader.

        Args:
            before: Called right before the kill.

        Raises:
            NotMeasuredError: If the job has no leader.
        """
        status = self.board.get_leader_status()
        leader = None if status is None else self._led_by(status.epoch)
        if status is None or leader is None:
            raise NotMeasuredError(f"no coordinator leads {self.job}")
        if before is not None:
            before()
        leader.kill()
        leader.restart()
        await_until(lambda: self._newest_epoch() > status.epoch, _START_S, "another leader")

    def counting(self) -> set[ModelId]:
        """Return all versions of the effective history."""
        history = History()
        for offset, record in read_decoded(self._log, updates_topic(self.job), decode_audit):
            history.feed(offset, record)
        return set(history.path)

    def close(self) -> None:
        """Stop everything."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._on.stop_jobs(self.job)
        stop_all(self.services)
        self.board.close()

    def _check(self) -> bool:
        check(self.services)
        if self._faults:
            raise NotMeasuredError(f"{self._faults[0]!r}") from self._faults[0]
        return True

    def _newest_epoch(self) -> int:
        self._check()
        return self.seen[-1].made.epoch

    def _led_by(self, epoch: int) -> EmbeddedService | None:
        for each in self.coordinators:
            if any(e["epoch"] == epoch for e in events(each, "leader_elected", self.job)):
                return each
        return None

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            while not self._ended.is_set():
                work()
        except BaseException as fault:  # noqa: BLE001 -- raised again in the main thread
            self._faults.append(fault)

    def _write(self) -> None:
        """Write records at their rate until the end."""
        values = codec_of(self._spec.records).encode(find_records(_CASE, None, seed=0))
        with closing(self._log.writer()) as writer:
            began, written = time.monotonic(), 0
            while not self._ended.wait(_TICK_S):
                due = int((time.monotonic() - began) * _RECORDS_PER_S)
                for number in range(written, due):
                    value = values[number % len(values)]
                    writer.append(self._spec.streams[0], value, partition=number % 4)
                written = due
                writer.poll()

    def _watch(self) -> None:
        """Record the time when each snapshot first appears."""
        try:
            found = heads_on_board(self.board, lambda _: None)
            heads = [each for each in found if each.has_weights]
        except UnavailableError:
            heads = []
        if heads:
            best = max(heads, key=lambda each: each.snapshot.rank).snapshot.made
            if not self.seen or self.seen[-1].made != best:
                self.seen.append(Seen(time.monotonic(), best))
        self._ended.wait(_LOOK_S)
