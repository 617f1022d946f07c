"""The admin service with servers in memory that hold made-up jobs, for tests of the page.

A browser only communicates with the service. Later changes are written to the topics, as
coordinators and provisioners would do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import uvicorn

from common.api.keys import KeyStore
from common.config.settings import Settings
from common.core.liveness import TURN, Device
from common.core.messages import AuditRecord, ModelId, Synchrony, UpdateApplied, WorkerId
from common.core.snapshots import Snapshot
from common.core.spans import Partition
from common.jobs.build import trainer_of
from common.jobs.progress import JobObservation
from common.jobs.servers import Outside
from common.jobs.store import JobStore, encode_entry
from common.kafka import names as topics
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from common.kafka.table import NUMBER
from common.redis.memory import MemoryBoard, MemoryRedis
from common.spot.plans import encode_plan
from common.storage.memory import MemoryBlobs
from common.storage.snapshot_file import SnapshotFile, to_bytes
from common.wire.messages import encode_audit
from services.admin.app import create_app
from tests.page.world import STREAMS, UPDATES_PER_S, World, leader_status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI

    from common.kafka.dead_letters import EncodedDeadLetter
    from common.spot.provisioning.records import PlanRecord
    from services.admin.service import AdminService

# Records of each partition: more than any made-up lag.
_RECORDS = 200_000_000
# The device of some workers; others do not report any.
GPU = Device("cuda", "NVIDIA L4", 24 << 30, "580.65.06", "8.9")
_FOREVER_S = 1e9
_PATIENCE_S = 15.0


class PageService:
    """Servers with jobs, and the application in front of them.

    Attributes:
        worlds: The jobs by name.
        app: The application that `served` serves.
        keys: Its API keys.
        key: A viewer's key.
        operator: An operator's key.
    """

    def __init__(self, worlds: Mapping[str, World]) -> None:
        self.worlds = dict(worlds)
        # Time of the log's clock. None for the real time.
        self._at_s: float | None = None
        self._log = MemoryLog(lambda: time.time() if self._at_s is None else self._at_s)
        self._redis = MemoryRedis()
        self._board = partial(MemoryBoard, self._redis)
        self.keys = KeyStore(self._log)
        self.key, _ = self.keys.create("page", "viewer")
        self.operator, _ = self.keys.create("olga", "operator")
        self._ends = {
            Partition(stream, index): _RECORDS for stream in STREAMS for index in range(3)
        }
        self._log.create_topics([NewTopic(stream, 3) for stream in STREAMS])
        with self._log.anyway():
            for place, end in self._ends.items():
                self._log.stored(place).end = end
        JobStore(self._log).read()  # makes their topic
        for name, world in self.worlds.items():
            self._fill(name, world)
        outside = Outside(
            Settings(blobs="s3://memory"), lambda: self._log, self._board, MemoryBlobs
        )
        self.app = create_app(outside)
        for name, world in self.worlds.items():
            self._remember(name, world)

    def update(self, job: str, record: AuditRecord) -> None:
        """Append a decision of the job's leader."""
        self._append(topics.updates_topic(job), encode_audit(record))

    def plan(self, job: str, record: PlanRecord) -> None:
        """Append a decision of the job's provisioner."""
        self._append(topics.plans_topic(job), encode_plan(record))

    def hold(self, job: str, reason: str) -> None:
        """Hold a job, as its coordinator does."""
        job_store = JobStore(self._log)
        job_store.hold(job_store.get(job), reason)

    def await_turn(self, job: str, why: str) -> None:
        """Report at which jobs the job's workers are, as its coordinator does."""
        self._board(job).put_unable(TURN, why, _FOREVER_S)

    def dead_letter(self, dead_letter: EncodedDeadLetter) -> None:
        """Report that a record cannot be used."""
        self._log.create_topics([NewTopic(dead_letter.topic)])
        with closing(self._log.writer()) as writer:
            writer.append(
                dead_letter.topic,
                dead_letter.value,
                key=dead_letter.key,
                headers=dead_letter.headers,
            )
            writer.flush(_PATIENCE_S)

    def leave_model(self, job: str) -> None:
        """Put the leader's last version on the board."""
        world = self.worlds[job]
        last = next(r for _, r in reversed(world.updates) if isinstance(r, UpdateApplied))
        position = self._log.bounds(Partition(topics.updates_topic(job), 0)).end
        made = ModelId(last.epoch, last.version)
        snapshot = Snapshot(last.epoch, made, position, 0, dict(world.record.first))
        trainer = trainer_of(world.record.spec, ())().snapshot()
        saved = to_bytes(SnapshotFile(snapshot, trainer))
        self._board(job).put_snapshot(last.epoch, saved, "c1")

    def next_update(self, job: str, **changed: float | Synchrony) -> UpdateApplied:
        """Make the next update, similar to the recent ones."""
        updates = self.worlds[job].updates
        like, last = updates[-19][1], updates[-1][1]
        if not (isinstance(like, UpdateApplied) and isinstance(last, UpdateApplied)):
            raise TypeError(f"{job} has a new leader since its last update")
        update = msgspec.structs.replace(like, version=last.version + 1, **changed)
        updates.append((time.time() if self._at_s is None else self._at_s, update))
        self.update(job, update)
        return update

    @contextmanager
    def training(self, job: str) -> Iterator[None]:
        """Make updates in the background, at the job's rate."""
        updates, ending = self.worlds[job].updates, threading.Event()

        def train() -> None:
            while not ending.wait(0.2):
                while updates[-1][0] + 1 / UPDATES_PER_S < time.time():
                    self._at_s = updates[-1][0] + 1 / UPDATES_PER_S
                    self.next_update(job)
                    self._at_s = None

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join(_PATIENCE_S)

    def _fill(self, name: str, world: World) -> None:
        own = (topics.control_topic(name), topics.updates_topic(name), topics.plans_topic(name))
        self._log.create_topics([NewTopic(topic) for topic in own])
        # There are no claims, as if they had expired. The leader's status reports the progress
        # instead.
        self._append(own[0], b"{}")
        self._log.expire(Partition(own[0], 0), 1)
        self._append(topics.JOBS, encode_entry(world.record), name.encode(), [(NUMBER, b"1")])
        for at_s, record in world.updates:
            self._at_s = at_s
            self.update(name, record)
        self._at_s = None
        for plan in world.plans:
            self.plan(name, plan)
        if world.record.wanted == "stopped" or not world.lags:
            return
        board = self._board(name)
        board.hold_lease("c1", _FOREVER_S)
        board.put_leader_status(leader_status_of(world, world.lags[-1][1], self._ends))
        for index, (worker, status) in enumerate(world.statuses.items()):
            device = GPU if index % 2 else None
            board.beat(WorkerId(worker), status, _FOREVER_S, "", device)

    def _remember(self, name: str, world: World) -> None:
        """Give the service the lags from before it ran, because no topic has them."""
        service: AdminService = self.app.state.service
        present = deepcopy(self._redis.jobs)
        # Without Redis, the service cannot take a lag of its own before it has those of the past.
        self._redis.kill()
        service.start()
        until = time.monotonic() + _PATIENCE_S
        while name not in service.stores.jobs or not service.followers.of(name).ready:
            if time.monotonic() > until:
                raise RuntimeError(f"the service does not know {name}")
            time.sleep(0.01)
        with service.followers.of(name).view() as view:
            for at_s, lag in world.lags[:-1]:
                leader_status = leader_status_of(world, lag, self._ends)
                view.job.look(
                    JobObservation(at_s, world.statuses, leader_status, led=True, ends=self._ends)
                )
        self._redis.restart()
        self._redis.jobs = present

    def _append(
        self,
        topic: str,
        value: bytes,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        with closing(self._log.writer()) as writer:
            writer.append(topic, value, key=key, headers=headers)
            writer.flush(_PATIENCE_S)


def served(service: PageService) -> AbstractContextManager[str]:
    """Serve in a thread. Yields the address."""
    return served_app(service.app)


@contextmanager
def served_app(app: FastAPI) -> Iterator[str]:
    """Serve any application in a thread."""
    config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        if not thread.is_alive():
            raise RuntimeError("the page's service did not start")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(_PATIENCE_S)
