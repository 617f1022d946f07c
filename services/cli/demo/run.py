"""A demo from its first record to its last checkpoint: one loop that streams, watches and kills."""

from __future__ import annotations

import contextlib
from itertools import cycle, islice
from time import monotonic
from typing import TYPE_CHECKING, Self

import numpy as np

from common.checkpoints.store import CheckpointStore
from common.errors import CorruptError, UnavailableError
from common.jobs.store import JobBook
from common.ports.servers import NewTopic
from common.runtime.connect import open_blobs, open_board, open_log
from services.cli.commands import sources
from services.cli.commands.producing import send_all
from services.cli.commands.schedule import Schedule
from services.cli.demo.cast import Cast
from services.cli.demo.course import mean_accuracy, mean_loss
from services.cli.demo.observer import Observer
from services.cli.demo.screen import Glance

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from common.checkpoints.store import Checkpoint
    from common.config.settings import Settings
    from common.core.messages import Positions
    from common.datasets.records import Records
    from services.cli.demo.plan import Plan
    from services.cli.demo.screen import Screen
    from services.cli.system.ending import Ending

_START_S = 90.0  # all processes load torch at once, perhaps on one busy core
_DRAIN_S = 60.0  # after the last record; a dead worker's partitions move within ten seconds
_CHECKPOINT_S = 30.0
_FLUSH_S = 30.0
_TURN_S = 0.02  # records go out in bursts of this length

# What is sent and not yet under a checkpoint: far below the 5 MB that a partition of the embedded
# Kafka keeps (72 bytes a record), far above what is sent between two checkpoints.
_MOST_UNSETTLED = 40_000


class Demo:
    """A job and its processes on servers that are there; what it starts, it ends.

    Args:
        plan: What is to happen.
        settings: Of the servers.
        logs: Folder for what the processes say.
        screen: Where it is shown.
        ending: Whether it is to end early.
    """

    def __init__(
        self, plan: Plan, settings: Settings, logs: Path, screen: Screen, ending: Ending
    ) -> None:
        self.plan = plan
        self.spec = plan.job()
        self.log = open_log(settings, "demo")
        for stream in self.spec.streams:
            self.log.create_topics([NewTopic(stream, plan.partitions)])
        self._book = JobBook(self.log)
        self.first = self._book.submit(self.spec).first
        self.ends: Positions = dict(self.first)  # after the last record produced
        self.streaming_s = 0.0  # from the first record to the last update
        self.pause_s: float | None = None  # from the kill to the next update
        self._board = open_board(settings, plan.name)
        self._store = CheckpointStore(open_blobs(settings), plan.name)
        self._observer = Observer(plan.name, self.log, self._board)
        self.course = self._observer.course
        self._screen = screen
        self._ending = ending
        self._phase = "starting"
        self._sent = 0
        self.cast = Cast(plan, settings, logs, screen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cast.stop()
        self._observer.close()
        self._book.close()
        with contextlib.suppress(UnavailableError):
            self._board.wipe()  # of a server that goes on

    def run(self, data: Records) -> Checkpoint:
        """Stream the data, preempt a worker, see everything settled; returns the last checkpoint.

        Raises:
            typer.Exit: If this process was asked to end.
            DollError: If a process ended by itself, or something did not happen in time.
        """
        if not self._until(lambda: self._observer.led and self._everybody_alive(), _START_S):
            raise UnavailableError(f"the processes are not at work after {_START_S:g} s")
        self._enter("streaming", f"{self.plan.workers} workers are there: the stream begins")
        began = monotonic()
        self._stream(data)
        self._enter("draining", "all records are sent")
        whole = self._until(self._at_rest, _DRAIN_S)
        self.streaming_s = self.course.last_at - began
        # If not whole, the audit will tell what is missing.
        self._enter("judging", "every record is settled" if whole else "something is missing")
        self._book.want(self.plan.name, "stopped", "the demo is over")
        if not self._until(self._checkpointed, _CHECKPOINT_S):
            raise UnavailableError(f"there is no last checkpoint after {_CHECKPOINT_S:g} s")
        latest = self._store.latest()
        if latest is None:
            raise CorruptError("the last checkpoint is gone")
        return self._store.open(latest)

    def _stream(self, data: Records) -> None:
        plan, writer = self.plan, self.log.writer()
        values = sources.stream(
            data, self.spec.records.codec, np.random.default_rng(plan.seed), repeat=True, warp=True
        )
        places = cycle(self.first)

        def send(value: bytes) -> None:
            place = next(places)
            writer.append(place.topic, value, partition=place.index)
            self.ends[place] += 1

        try:
            for sent, _ in send_all(
                islice(values, plan.records),
                send,
                schedule=Schedule(plan.rate_per_s) if plan.rate_per_s else None,
                room=lambda sent: _MOST_UNSETTLED - (sent - self._observer.settled(self.first)),
                clock=monotonic,
                wait=lambda wait_s: self._turn(max(wait_s, _TURN_S)),
            ):
                self._sent = sent
                writer.poll()
                self._turn(0.0)
            if not writer.flush(_FLUSH_S):
                raise UnavailableError(f"Kafka has not taken all records within {_FLUSH_S:g} s")
        finally:
            writer.close()

    def _turn(self, wait_s: float) -> None:
        self._ending.check()
        updated = self._observer.look(wait_s, monotonic())
        now = monotonic()
        killed_at = self.cast.killed_at
        if updated and killed_at is not None and self.pause_s is None:
            self.pause_s = now - killed_at
            self._screen.happened(f"next update {self.pause_s:.2f} s after the kill", now)
        self.cast.turn(self._sent, now)
        self._screen.show(self._glance(now), now)

    def _until(self, condition: Callable[[], bool], patience_s: float) -> bool:
        deadline = monotonic() + patience_s
        while not condition():
            if monotonic() > deadline:
                return False
            self._turn(_TURN_S)
        return True

    def _enter(self, phase: str, what: str) -> None:
        self._phase = phase
        self._screen.happened(what, monotonic())

    def _everybody_alive(self) -> bool:
        return self.cast.workers <= self._observer.alive

    def _at_rest(self) -> bool:
        """Everything sent is settled, and the worker that was preempted is back."""
        drained = self._observer.drained(self.ends)
        return drained and self.cast.complete and self._everybody_alive()

    def _checkpointed(self) -> bool:
        latest = self._store.latest()
        return latest is not None and latest.version >= len(self.course.updates)

    def _glance(self, now: float) -> Glance:
        recent = self.course.recent()
        return Glance(
            phase=self._phase,
            sent=self._sent,
            total=self.plan.records,
            updates=len(self.course.updates),
            loss=mean_loss(recent),
            accuracy=mean_accuracy(recent),
            records_per_s=self.course.samples_per_s(now),
            alive=len(self._observer.alive),
            workers=self.plan.workers,
            lag=self._sent - self.course.trained,
        )
