"""Observes a job's rounds from outside: the orders to each worker, and when updates are applied.

A trigger is seen once a reader of the board has it, an update once a reader of the updates topic
has it: about one and two milliseconds later. All times are `monotonic`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from common.core.messages import AttemptId, Batch, ModelId, TriggerId, UpdateApplied, UpdateTrigger
from common.core.spans import Partition
from common.errors import DollError
from common.kafka.names import updates_topic
from load.harness.stack import NotMeasuredError
from load.harness.updates import read_audit

if TYPE_CHECKING:
    from common.kafka.port import Log
    from common.redis.port import Board

# Timeout of one read, and so the time that a thread needs to notice its end.
_WAIT_S = 0.2


@dataclass(slots=True)
class SeenRound:
    """One update in flight: the triggers for its model, and its update once there is one."""

    model: ModelId
    # Triggers that order gradients, with the time they were seen.
    triggers: list[tuple[float, UpdateTrigger]] = field(default_factory=list)
    # If members add up among themselves: the time when each attempt was first ordered.
    attempts: dict[AttemptId, float] = field(default_factory=dict)
    applied_at: float | None = None

    @property
    def began_at(self) -> float:
        """Time when the first trigger was seen."""
        return self.triggers[0][0]

    @property
    def seconds(self) -> float:
        """Time from the first trigger to the update.

        Raises:
            ValueError: If the round was not applied.
        """
        if self.applied_at is None:
            raise ValueError(f"the round of {tuple(self.model)} was not applied")
        return self.applied_at - self.began_at

    def asked_of(self, worker: str) -> tuple[Batch, ...]:
        """Batches that the first trigger assigned to a worker."""
        orders = self.triggers[0][1].orders
        return tuple(b for order in orders if order.worker == worker for b in order.batches)

    def most_asked(self) -> int:
        """Largest number of batches assigned to one worker, which computes them in sequence."""
        asked = Counter[str]()
        for _, trigger in self.triggers:
            for order in trigger.orders:
                asked[order.worker] += len(order.batches)
        return max(asked.values())

    def given_again_at(self, batches: tuple[Batch, ...], away_from: str) -> float | None:
        """Time when one of these batches was assigned to another worker, or None."""
        offsets = {batch.offset for batch in batches}
        for at, trigger in self.triggers[1:]:
            for order in trigger.orders:
                if order.worker != away_from and any(b.offset in offsets for b in order.batches):
                    return at
        return None


class Witness:
    """Follows a job's board and updates topic in its own threads, from the start of the job."""

    def __init__(self, board: Board, log: Log, job: str) -> None:
        self._board = board
        self._tail = log.tail(Partition(updates_topic(job), 0), 0)
        self._rounds = list[SeenRound]()
        self._by_model = dict[ModelId, SeenRound]()
        self._news = threading.Condition()
        self._over = False
        self._fault: Exception | None = None
        self._last_trigger = TriggerId(-1, 0)
        self._threads = [
            threading.Thread(target=self._follow, args=(read,), daemon=True)
            for read in (self._read_triggers, self._read_updates)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads."""
        self._over = True
        for thread in self._threads:
            thread.join()
        self._tail.close()

    def rounds(self) -> list[SeenRound]:
        """Return all rounds so far, by their beginning."""
        with self._news:
            return list(self._rounds)

    def await_begun(
        self, fits: Callable[[SeenRound], bool], timeout_s: float, what: str
    ) -> SeenRound:
        """Wait for a round that begins from now on and fits.

        Raises:
            NotMeasuredError: If no such round begins in time.
        """
        found = list[SeenRound]()
        with self._news:
            looked_at = len(self._rounds)

            def begun() -> bool:
                nonlocal looked_at
                found.extend(filter(fits, self._rounds[looked_at:]))
                looked_at = len(self._rounds)
                return bool(found)

            self._wait_for(begun, timeout_s, what)
        return found[0]

    def await_attempt(self, timeout_s: float) -> SeenRound:
        """Wait until members receive an order for a new attempt.

        Raises:
            NotMeasuredError: If that does not happen in time.
        """
        with self._news:
            known = {attempt for each in self._rounds[-2:] for attempt in each.attempts}
            self._wait_for(
                lambda: not known.issuperset(self._rounds[-1].attempts), timeout_s, "an attempt"
            )
            return self._rounds[-1]

    def await_applied(self, rounds: list[SeenRound], timeout_s: float) -> None:
        """Wait until these rounds are over.

        Raises:
            NotMeasuredError: If they are not over in time.
        """
        with self._news:
            self._wait_for(
                lambda: all(each.applied_at is not None for each in rounds),
                timeout_s,
                "the update in flight",
            )

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        came = self._news.wait_for(lambda: self._fault is not None or condition(), timeout_s)
        if self._fault is not None:
            raise NotMeasuredError(f"the rounds cannot be followed: {self._fault}") from self._fault
        if not came:
            raise NotMeasuredError(f"timed out after {timeout_s:g} s: {what}")

    def _follow(self, read: Callable[[], None]) -> None:
        try:
            while not self._over:
                read()
        except DollError as fault:
            with self._news:
                self._fault = fault
                self._news.notify_all()

    def _read_triggers(self) -> None:
        triggers = self._board.triggers(self._last_trigger, _WAIT_S)
        at = monotonic()
        with self._news:
            for trigger in triggers:
                self._last_trigger = trigger.id
                if trigger.orders and trigger.model not in self._by_model:
                    self._by_model[trigger.model] = SeenRound(trigger.model)
                    self._rounds.append(self._by_model[trigger.model])
                round_ = self._by_model.get(trigger.model)
                if round_ is not None and trigger.orders:
                    round_.triggers.append((at, trigger))
                if round_ is not None and trigger.group and trigger.group.reduce is not None:
                    round_.attempts.setdefault(trigger.group.reduce.attempt, at)
            self._news.notify_all()

    def _read_updates(self) -> None:
        records = read_audit(self._tail, _WAIT_S)
        at = monotonic()
        with self._news:
            for _, audit in records:
                if isinstance(audit, UpdateApplied):
                    round_ = self._by_model.get(ModelId(audit.epoch, audit.version - 1))
                    if round_ is not None and round_.applied_at is None:
                        round_.applied_at = at
            self._news.notify_all()
