"""Liveness of workers, judged by heartbeats that may all disappear at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from common.core.messages import WorkerId

ALIVE = "alive"
LEAVING = "leaving"
# The worker is alive, and its records wait for a schema. Each status has a reason.
WAITING = "waiting"
REGISTRY_REFUSES = "registry-refuses"
REGISTRY_LATE = "registry-late"
REGISTRY_UNREACHABLE = "registry-unreachable"
MISSING_SCHEMA = {
    WAITING: "no schema registry returns a usable schema; see the worker's log",
    REGISTRY_REFUSES: "the schema registry denies this worker access (status 401 or 403); see"
    " docs/howto/security.md",
    REGISTRY_LATE: "the schema registry did not answer in time",
    REGISTRY_UNREACHABLE: "the schema registry cannot be reached",
}
# The worker is alive, and the linger of its open batch has passed, but the batch has fewer samples
# than `min_batch`.
TOO_FEW = "too-few"
STATUSES = (ALIVE, LEAVING, *MISSING_SCHEMA, TOO_FEW)
# Reason for a worker without work, with the digests of both models.
OTHER_MODEL = (
    "its task builds another model than the job's (layout {}, expected {}); start this worker with"
    " the version of the task's code that the job began with"
)
# Name under which a leader reports the jobs that have the workers its job waits for.
TURN = "turn"
# Prefixes of the names of processes that cannot do their part of a job. Coordinators have no
# prefix.
WORKER, EVALUATOR = "worker ", "evaluator "
# Prefix of `<server> <process>`: a notice that the process cannot use the server. Its text is the
# start of the outage in seconds since 1970, a space, and the reason.
OUTAGE = "outage "
# Name used to test if Redis accepts writes.
PROBE = "probe"


class OutageNotice(NamedTuple):
    """A lasting outage of a server."""

    since_s: float  # seconds since 1970
    reason: str


class Device(NamedTuple):
    """Processor or GPU on which a worker computes."""

    kind: str  # "cpu" or "cuda"
    name: str
    # Memory of the GPU, or memory that the process may use. 0 if unknown.
    memory_bytes: int
    # Version of the GPU's driver, or empty.
    driver: str = ""
    # CUDA compute capability of the GPU, such as "8.0", or empty.
    capability: str = ""


class Heartbeat(NamedTuple):
    """Content of a worker's heartbeat."""

    status: str  # one of `STATUSES`
    # Digest of its model's layout, see `UpdateTrigger.digest`. Empty if not reported.
    digest: str = ""
    # None if not reported.
    device: Device | None = None
    # Random token of the process. The next process with the same name has another one. Empty if not
    # reported.
    life: str = ""


class Departures(NamedTuple):
    """Workers that have gone since the last poll."""

    lost: frozenset[WorkerId]  # gone without notice
    # Gone with notice, or replaced by a process with the same name before the end was noticed. Two
    # living processes with one name take turns to be seen, so a replacement proves no death.
    left: frozenset[WorkerId]


class Liveness:
    """A coordinator's view of its workers.

    Args:
        grace_s: Time without any heartbeat after which all workers count as dead. Before that, a
            wiped Redis is more likely. It is longer than two heartbeats, so that all workers can
            report again. A worker with an overdue order is doubted for the same time. By then its
            heartbeat has expired, or it is alive.
        digest: Digest of the job's model. A worker with another one gets no work. Empty if unknown.
    """

    def __init__(self, grace_s: float, digest: str = "") -> None:
        self._grace_s = grace_s
        self.digest = digest
        self._beats = dict[WorkerId, Heartbeat]()
        # Read-only for others, and read for every batch, so they are not computed on demand: living
        # workers with the job's model, and those of them that do not leave.
        self.there = self.live = frozenset[WorkerId]()
        # Workers with another model, and the reason shown.
        self.left_out = dict[WorkerId, str]()
        self._wiped_until = float("-inf")
        self._doubted_until = dict[WorkerId, float]()

    def trusted(self, now: float) -> frozenset[WorkerId]:
        """Return the living workers that are not doubted, or all if all are doubted."""
        if not self._doubted_until:
            return self.live
        trusted = {w for w in self.live if now >= self._doubted_until.get(w, now)}
        return frozenset(trusted) or self.live

    def suspect(self, workers: Iterable[WorkerId], now: float) -> None:
        """Doubt workers with overdue orders: others get work first for a while."""
        self._doubted_until.update(dict.fromkeys(workers, now + self._grace_s))

    def clear(self, worker: WorkerId) -> None:
        """Stop doubting a worker that sent a message."""
        self._doubted_until.pop(worker, None)

    def leave(self, worker: WorkerId) -> None:
        """Record that a worker announced its departure."""
        if worker in self._beats:
            self._beats[worker] = self._beats[worker]._replace(status=LEAVING)
            self.live -= {worker}

    def wiped(self, now: float) -> None:
        """Record that Redis was wiped. Living workers will send heartbeats again soon."""
        self._wiped_until = now + self._grace_s

    def expect(self, holder: WorkerId) -> None:
        """Adopt a worker's model as the job's, because it holds the newest version.

        If members hold the weights, the leader has no model to compare theirs with. A member copies
        a version only if that fits its own model.
        """
        if not self.digest and holder in self._beats:
            self.digest = self._beats[holder].digest
            self._judge()

    def choose(self) -> None:
        """Adopt the most common model as the job's. Only valid before the first update."""
        found = Counter(
            beat.digest for beat in self._beats.values() if beat.digest and beat.status != LEAVING
        )
        if found and self.digest not in found:
            self.digest = max(sorted(found), key=found.__getitem__)
            self._judge()

    def observe(self, seen: Mapping[WorkerId, Heartbeat], now: float) -> Departures:
        """Process all valid heartbeats and return the workers that have gone."""
        # If all heartbeats disappear at once, Redis was probably wiped.
        if self._beats and not seen and now >= self._wiped_until + self._grace_s:
            self._wiped_until = now + self._grace_s
        gone = self._beats.keys() - seen.keys()
        if now < self._wiped_until:
            gone = set()
        left = {w for w in gone if self._beats[w].status == LEAVING}
        replaced = {w for w, beat in seen.items() if beat.life != self.life(w) and self.life(w)}
        for worker in gone | replaced:
            del self._beats[worker]
            # If the worker returns, it is not doubted.
            self.clear(worker)
        self._beats.update(seen)
        self._judge()
        return Departures(frozenset(gone - left), frozenset(left | replaced))

    def life(self, worker: WorkerId) -> str:
        """Return the token of a worker's process; empty if unknown."""
        beat = self._beats.get(worker)
        return "" if beat is None else beat.life

    def _judge(self) -> None:
        """Determine the workers that can get work."""
        own = self.digest
        self.left_out = {
            worker: OTHER_MODEL.format(beat.digest or "unknown", own)
            for worker, beat in self._beats.items()
            if own and beat.digest != own
        }
        self.there = frozenset(self._beats.keys() - self.left_out.keys())
        self.live = frozenset(w for w in self.there if self._beats[w].status != LEAVING)
