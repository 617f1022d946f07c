"""A demo on rented machines from its submission to its last machine: streams, watches, judges."""

from __future__ import annotations

import contextlib
import time
from itertools import cycle
from time import monotonic
from typing import TYPE_CHECKING, Self

import numpy as np

from common.checkpoints.store import CheckpointStore
from common.core.audit import audit
from common.embedded.services import Service, stop_all
from common.errors import CorruptError, DollError, UnavailableError
from common.jobs.store import JobBook
from common.ports.servers import NewTopic
from common.runtime.connect import open_blobs, open_board, open_log
from common.topics import names as topics
from common.topics.read import read_decoded
from common.wire.messages import decode_audit, decode_claim
from services.cli.commands import sources
from services.cli.commands.producing import send_all
from services.cli.commands.schedule import Schedule
from services.cli.demo.account import account
from services.cli.demo.course import mean_accuracy, mean_loss
from services.cli.demo.judge import test_model
from services.cli.demo.observer import Observer
from services.cli.demo.rented.plan import ON_DEMAND_USD_PER_HOUR
from services.cli.demo.rented.summary import RentedSummary
from services.cli.demo.rented.watching import FleetWatch
from services.cli.demo.screen import Glance
from services.cli.page import open_page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from common.config.settings import Settings
    from common.core.messages import Positions
    from common.datasets.records import Records
    from services.cli.demo.rented.plan import RentedPlan
    from services.cli.demo.screen import Screen
    from services.cli.system.ending import Ending

_CHECKPOINT_S = 30.0
_RELEASE_S = 60.0  # workers leave well, which takes as long as the gradient under way
_LATE_S = 30.0  # past its deadline a job ends by itself
_TURN_S = 0.02  # records go out in bursts of this length
_MOST_UNSETTLED = 40_000  # as in the demo without a market


class RentedDemo:
    """A job, and the services that rent its machines; what it starts, it ends.

    Args:
        plan: What is to happen.
        settings: Of the servers; the market file is named there.
        logs: Folder for what the processes say.
        screen: Where it is shown.
        ending: Whether it is to end early.
    """

    def __init__(
        self, plan: RentedPlan, settings: Settings, logs: Path, screen: Screen, ending: Ending
    ) -> None:
        self.plan = plan
        self.spec = plan.job()
        self.log = open_log(settings, "demo")
        for stream in self.spec.streams:
            self.log.create_topics([NewTopic(stream, plan.partitions)])
        self._screen = screen
        self._ending = ending
        self._settings = settings
        self._book = JobBook(self.log)
        self._store = CheckpointStore(open_blobs(settings), plan.name)
        self._services = [
            Service(kind, f"{kind}-1", settings.model_copy(update={"threads": 1}), logs)
            for kind in ("coordinator", "provisioner")
        ]
        self._page = open_page(settings, logs, plan.name, "viewer")
        self._services.append(self._page.service)
        self._sent = 0
        self._phase = "starting"
        self._record = self._book.submit(self.spec)
        self.ends: Positions = dict(self._record.first)
        self.log.create_topics([NewTopic(topics.plans_topic(plan.name), kept_forever=True)])
        self._board = open_board(settings, plan.name)
        self._observer = Observer(plan.name, self.log, self._board)
        self._fleet = FleetWatch(self.log, plan.name)
        self._ended_by = ""
        self._ran_s = 0.0  # from the submission to the last update

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stop_all(self._services)
        self._observer.close()
        self._fleet.close()
        self._book.close()
        with contextlib.suppress(UnavailableError):
            self._board.wipe()

    def run(self, data: Records) -> None:
        """Stream until the job is over, and see its machines given back.

        Raises:
            typer.Exit: If this process was asked to end.
            DollError: If a service ended by itself, or something did not happen in time.
        """
        theta = f"{self.plan.updates:,} updates within {self.plan.deadline_s:.0f} s"
        self._enter("streaming", f"job submitted: {theta}, on {self.plan.workers} machines")
        self._screen.happened(f"live page: {self._page}", monotonic(), "bold")
        self._stream(data)
        self._enter("releasing", f"the job is over: {self._ended_by}")
        if not self._until(lambda: self._fleet.ledger.settled is not None, _RELEASE_S):
            raise UnavailableError(f"the machines are not given back after {_RELEASE_S:g} s")
        self._enter("judging", "all machines are given back")
        if not self._until(self._checkpointed, _CHECKPOINT_S):
            raise UnavailableError(f"there is no last checkpoint after {_CHECKPOINT_S:g} s")

    def judge(self, held_out: Records, model: Path) -> RentedSummary:
        """Fold what Kafka holds, test the model, sum it all up.

        Raises:
            UnavailableError: If Kafka stops answering.
            CorruptError: If the last checkpoint cannot be read.
        """
        latest = self._store.latest()
        if latest is None:
            raise CorruptError("the last checkpoint is gone")
        tested = test_model(self.spec, self._store.open(latest), held_out, model)
        job, first = self.plan.name, self._record.first
        decided = read_decoded(self.log, topics.updates_topic(job), decode_audit)
        claimed = read_decoded(self.log, topics.control_topic(job), decode_claim)
        proof = audit(first, claimed, decided)
        ledger = self._fleet.ledger
        settled = ledger.settled
        if settled is None:
            raise DollError("the provisioner has not settled the job")
        seen = [each.usd_per_hour.get("spot", 0.0) for each in ledger.plans]
        return RentedSummary(
            job=job,
            ended=self._ended_by,
            updates=len(proof.updates),
            updates_asked=self.plan.updates,
            runtime_s=self._ran_s,
            deadline_s=self.plan.deadline_s,
            spent_usd=settled.spent_usd,
            on_demand_only_usd=self.plan.workers * self._undisturbed_h * ON_DEMAND_USD_PER_HOUR,
            predicted_usd=settled.predicted_usd or 0.0,
            plans=len(ledger.plans),
            reasons=tuple(each.why for each in ledger.plans),
            machines=sum(each.started_s is not None for each in ledger.machines.values()),
            most_at_once=self._fleet.most_at_once,
            preemptions=self._fleet.preemptions,
            lowest_usd_per_hour=min(seen, default=0.0),
            highest_usd_per_hour=max(seen, default=0.0),
            records_trained=proof.trained,
            records_duplicated=account(proof, first, proof.settled).duplicated,
            flaws=tuple(f"{flaw.kind}: {flaw.where}" for flaw in proof.flaws),
            test_accuracy=tested["accuracy"],
            curve=tuple(mean_accuracy([update]) or 0.0 for update in proof.updates),
        )

    @property
    def _undisturbed_h(self) -> float:
        return (
            self.plan.updates
            * self.spec.group_size
            * self.spec.batch_size
            / (3600 * self.plan.rate_per_s)
        )

    def _stream(self, data: Records) -> None:
        plan, writer = self.plan, self.log.writer()
        values = sources.stream(
            data, self.spec.records.codec, np.random.default_rng(plan.seed), repeat=True, warp=True
        )
        places = cycle(self._record.first)
        last_s = self._record.submitted_s + plan.deadline_s + _LATE_S

        def send(value: bytes) -> None:
            place = next(places)
            writer.append(place.topic, value, partition=place.index)
            self.ends[place] += 1

        try:
            for sent, _ in send_all(
                values,
                send,
                schedule=Schedule(plan.rate_per_s),
                room=lambda sent: (
                    _MOST_UNSETTLED - (sent - self._observer.settled(self._record.first))
                ),
                clock=monotonic,
                wait=lambda wait_s: self._turn(max(wait_s, _TURN_S)),
            ):
                self._sent = sent
                writer.poll()
                self._turn(0.0)
                if self._over():
                    return
                if time.time() > last_s:
                    raise UnavailableError(
                        f"the job has not ended {_LATE_S:g} s after its deadline"
                    )
        finally:
            writer.close()

    def _over(self) -> bool:
        record = self._book.refresh(0.0).get(self.plan.name)
        if record is None or record.wanted != "stopped":
            return False
        self._ended_by = record.reason
        self._ran_s = (
            time.time() - self._record.submitted_s - (monotonic() - self._observer.course.last_at)
        )
        return True

    def _turn(self, wait_s: float) -> None:
        self._ending.check()
        for service in self._services:
            code = service.exit_code
            if code is not None:
                self._screen.quote(service.last_words())
                raise DollError(
                    f"{service.name} ended by itself with status {code}; all it said is in"
                    f" {service.log}"
                )
        self._observer.look(wait_s, monotonic())
        now = monotonic()
        for what, style in self._fleet.look():
            self._screen.happened(what, now, style)
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

    def _checkpointed(self) -> bool:
        latest = self._store.latest()
        return latest is not None and latest.version >= len(self._observer.course.updates)

    def _glance(self, now: float) -> Glance:
        course = self._observer.course
        recent = course.recent()
        return Glance(
            phase=self._phase,
            sent=self._sent,
            total=self.plan.updates * self.spec.group_size * self.spec.batch_size,
            updates=len(course.updates),
            loss=mean_loss(recent),
            accuracy=mean_accuracy(recent),
            records_per_s=course.samples_per_s(now),
            alive=len(self._observer.alive),
            workers=self.plan.workers,
            lag=self._sent - course.trained,
            spent_usd=self._fleet.ledger.spent_usd(time.time()),
        )
