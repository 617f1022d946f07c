"""The admin service before servers in memory that hold made-up jobs: for tests of the page.

All that a browser talks to is the service itself; what happens afterwards is written to the topics,
as coordinators and provisioners would.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import uvicorn

from common.api.keys import KeyStore
from common.config.servers import Outside
from common.config.settings import Settings
from common.core.messages import UpdateApplied, WorkerId
from common.core.spans import Partition
from common.jobs.progress import Look
from common.jobs.store import JobStore, encode_job
from common.ports.servers import NewTopic
from common.testing.blobs import MemoryBlobs
from common.testing.board import MemoryBoard, MemoryRedis
from common.testing.log import MemoryLog
from common.topics import names as topics
from common.wire.messages import encode_audit
from common.wire.plans import encode_plan
from load.page.world import STREAMS, UPDATES_PER_S, leader_status_of
from services.admin.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from common.core.messages import AuditRecord
    from common.jobs.store import JobRecord
    from common.provisioning.records import PlanRecord
    from load.page.world import World
    from services.admin.live.follower import JobFollower
    from services.admin.service import Service

_RECORDS = 200_000_000  # in every partition, so that no lag is longer than the stream
_FOREVER_S = 1e9
_PATIENCE_S = 15.0


class PageService:
    """Servers with jobs, and the application before them.

    Attributes:
        app: What `served` serves.
        key: A viewer's.
    """

    def __init__(self, worlds: Mapping[str, World]) -> None:
        self._at_s: float | None = None  # what the clock of the log says; None: what time it is
        self._log = MemoryLog(lambda: time.time() if self._at_s is None else self._at_s)
        self._redis = MemoryRedis()
        self._worlds = dict(worlds)
        self.key, _ = KeyStore(self._log).create("page", "viewer")
        self._ends = {
            Partition(stream, index): _RECORDS for stream in STREAMS for index in range(3)
        }
        for stream in STREAMS:
            self._log.create_topics([NewTopic(stream, 3)])
        with self._log.anyway():
            for place, end in self._ends.items():
                self._log.stored(place).end = end
        JobStore(self._log).read()  # makes their topic
        for name, world in self._worlds.items():
            self._fill(name, world)
        outside = Outside(
            Settings(blobs="s3://memory"), lambda: self._log, self._board, MemoryBlobs
        )
        self.app = create_app(outside)
        for name in self._worlds:
            self._remember(name)

    def job(self, record: JobRecord) -> None:
        """Somebody wants something of a job."""
        self._append(topics.JOBS, encode_job(record), record.spec.name.encode())

    def update(self, job: str, record: AuditRecord) -> None:
        """The job's leader decides."""
        self._append(topics.updates_topic(job), encode_audit(record))

    def plans(self, job: str) -> list[PlanRecord]:
        """What the job's provisioner has decided."""
        return self._worlds[job].plans

    def new_key(self, name: str) -> str:
        """Make another viewer's key."""
        return KeyStore(self._log).create(name, "viewer")[0]

    def revoke(self, name: str) -> None:
        """Make a key invalid."""
        KeyStore(self._log).revoke(name)

    def plan(self, job: str, record: PlanRecord) -> None:
        """The job's provisioner decides."""
        self._append(topics.plans_topic(job), encode_plan(record))

    def next_update(self, job: str, **changed: float) -> UpdateApplied:
        """Make the update that comes next, like one of late."""
        updates = self._worlds[job].updates
        like, last = updates[-19][1], updates[-1][1]
        if not (isinstance(like, UpdateApplied) and isinstance(last, UpdateApplied)):
            raise TypeError(f"{job} was led anew of late")
        update = msgspec.structs.replace(like, version=last.version + 1, **changed)
        updates.append((time.time() if self._at_s is None else self._at_s, update))
        self.update(job, update)
        return update

    @contextmanager
    def training(self, job: str) -> Iterator[None]:
        """Make updates meanwhile, as fast as before."""
        ending = threading.Event()
        thread = threading.Thread(target=self._train, args=(job, ending), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join(_PATIENCE_S)

    def _train(self, job: str, ending: threading.Event) -> None:
        updates = self._worlds[job].updates
        while not ending.wait(0.2):
            while updates[-1][0] + 1 / UPDATES_PER_S < time.time():
                self._at_s = updates[-1][0] + 1 / UPDATES_PER_S
                self.next_update(job)
                self._at_s = None

    def _fill(self, name: str, world: World) -> None:
        for topic in (topics.control_topic, topics.updates_topic, topics.plans_topic):
            self._log.create_topics([NewTopic(topic(name))])
        # Claims are not made up: as where they are gone, the leader's status says how far it is.
        self._append(topics.control_topic(name), b"{}")
        self._log.expire(Partition(topics.control_topic(name), 0), 1)
        self.job(world.record)
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
        for worker, status in world.statuses.items():
            board.beat(WorkerId(worker), status, _FOREVER_S)

    def _remember(self, name: str) -> None:
        """Have the service know the lag of times when it did not run: no topic tells of it."""
        service: Service = self.app.state.service
        present = self._redis.copy()
        self._redis.kill()  # or its first look would come before those of the past
        service.start()
        follower = self._ready(service, name)
        world = self._worlds[name]
        with follower.view() as view:
            for at_s, lag in world.lags[:-1]:
                leader_status = leader_status_of(world, lag, self._ends)
                view.look(Look(at_s, world.statuses, leader_status, led=True, ends=self._ends))
        self._redis.restore(present)

    @staticmethod
    def _ready(service: Service, name: str) -> JobFollower:
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            if name in service.jobs:
                follower = service.followers.of(name)
                if follower.ready:
                    return follower
            time.sleep(0.01)
        raise RuntimeError(f"the service does not know {name}")

    def _board(self, job: str) -> MemoryBoard:
        return MemoryBoard(self._redis, job)

    def _append(self, topic: str, value: bytes, key: bytes | None = None) -> None:
        writer = self._log.writer()
        writer.append(topic, value, key=key)
        writer.flush(_PATIENCE_S)
        writer.close()


@contextmanager
def served(service: PageService) -> Iterator[str]:
    """Serve in a thread; gives the address."""
    config = uvicorn.Config(service.app, port=0, log_level="error", timeout_graceful_shutdown=1)
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
