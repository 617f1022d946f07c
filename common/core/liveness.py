"""Which workers can be given work: a judgement over beats that may all vanish at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from common.core.messages import WorkerId

ALIVE = "alive"
LEAVING = "leaving"
# The worker is alive, and its records wait for a schema. Each status says why it is missing.
WAITING = "waiting"
REGISTRY_REFUSES = "registry-refuses"
REGISTRY_LATE = "registry-late"
REGISTRY_UNREACHABLE = "registry-unreachable"
MISSING_SCHEMA = {
    WAITING: "no registry gives a schema that can be used; see the worker's log",
    REGISTRY_REFUSES: "the registry refuses this worker (status 401 or 403); see security.md",
    REGISTRY_LATE: "the registry did not answer in time",
    REGISTRY_UNREACHABLE: "the registry cannot be reached",
}
# The worker is alive, and the linger of its open batch is over, but that batch has fewer samples
# than `min_batch`.
TOO_FEW = "too-few"
STATUSES = (ALIVE, LEAVING, *MISSING_SCHEMA, TOO_FEW)
# Why a worker gets no work, by the digests of both models.
OTHER_MODEL = (
    "its task's code builds another model than the job's (layout {}, expected {}); start it with"
    " the version of the code that the job began with"
)
# Name under which a leader says at which jobs the workers are that its job waits for.
TURN = "turn"
# Prefixes of the names of processes that cannot do their part of a job; a coordinator's has none.
WORKER, EVALUATOR = "worker ", "evaluator "
# Prefix of `<server> <process>`: a notice that the process cannot use the server. Its text is the
# time since when, in seconds since 1970, a space, and the reason.
OUTAGE = "outage "
# Name under which is tried whether Redis takes writes.
PROBE = "probe"


class OutageNotice(NamedTuple):
    """An outage of a server that lasts."""

    since_s: float  # since 1970
    reason: str


class Heartbeat(NamedTuple):
    """Content of a worker's heartbeat."""

    status: str  # of `STATUSES`
    # Digest of its model's layout: see `UpdateTrigger.digest`. Empty: the worker did not say it.
    digest: str = ""


class Departures(NamedTuple):
    """What changed since the last look."""

    lost: frozenset[WorkerId]  # gone without notice
    left: frozenset[WorkerId]  # gone after saying that they would


class Liveness:
    """The coordinator's view of its workers.

    Args:
        grace_s: How long all beats may be gone before that means that all workers are. Until then
            a wiped Redis is the likelier cause; longer than two beats, so that everybody is back.
            A worker that is overdue is doubted for as long: by then its beat runs out, or it lives.
        digest: Digest of the job's model. A worker of another one gets no work. Empty: not known.
    """

    def __init__(self, grace_s: float, digest: str = "") -> None:
        self._grace_s = grace_s
        self.digest = digest
        self._beats = dict[WorkerId, Heartbeat]()
        # These follow from the heartbeats, to be read alone; the first two at every batch: all
        # workers of the job's model that live, and without those that leave.
        self.there = self.live = frozenset[WorkerId]()
        self.left_out = dict[WorkerId, str]()  # workers of another model, and why
        self._wiped_until = float("-inf")
        self._doubted_until = dict[WorkerId, float]()

    def trusted(self, now: float) -> frozenset[WorkerId]:
        """Those of them that are not in doubt; all of them where each one is."""
        if not self._doubted_until:
            return self.live
        trusted = {w for w in self.live if now >= self._doubted_until.get(w, now)}
        return frozenset(trusted) or self.live

    def suspect(self, workers: Iterable[WorkerId], now: float) -> None:
        """They did not do in time what they were asked to: others are asked first for a while."""
        self._doubted_until.update(dict.fromkeys(workers, now + self._grace_s))

    def clear(self, worker: WorkerId) -> None:
        """It was heard of."""
        self._doubted_until.pop(worker, None)

    def leave(self, worker: WorkerId) -> None:
        """It said that it leaves."""
        if worker in self._beats:
            self._beats[worker] = self._beats[worker]._replace(status=LEAVING)
            self.live -= {worker}

    def wiped(self, now: float) -> None:
        """The board is empty, of beats too: who lives will beat again soon."""
        self._wiped_until = now + self._grace_s

    def expect(self, holder: WorkerId) -> None:
        """Take a worker's model for the job's, because it holds the newest version.

        Where members hold the weights, the leader has no model to compare theirs with. A member
        copies a version only if that fits its own model.
        """
        if not self.digest and holder in self._beats:
            self.digest = self._beats[holder].digest
            self._judge()

    def choose(self) -> None:
        """Take the most common model for the job's; only while no version was learned."""
        found = Counter(
            beat.digest for beat in self._beats.values() if beat.digest and beat.status != LEAVING
        )
        if found and self.digest not in found:
            self.digest = max(sorted(found), key=found.__getitem__)
            self._judge()

    def observe(self, seen: Mapping[WorkerId, Heartbeat], now: float) -> Departures:
        """Take in all beats that are valid now."""
        if self._beats and not seen and now >= self._wiped_until + self._grace_s:
            self._wiped_until = now + self._grace_s
        gone = self._beats.keys() - seen.keys()
        if now < self._wiped_until:
            gone = set()
        left = {w for w in gone if self._beats[w].status == LEAVING}
        for worker in gone:
            del self._beats[worker]
            self.clear(worker)  # if it comes back, it does so anew
        self._beats.update(seen)
        self._judge()
        return Departures(frozenset(gone - left), frozenset(left))

    def _judge(self) -> None:
        """Find who can be given work."""
        own = self.digest
        self.left_out = {
            worker: OTHER_MODEL.format(beat.digest or "not known", own)
            for worker, beat in self._beats.items()
            if own and beat.digest != own
        }
        self.there = frozenset(self._beats.keys() - self.left_out.keys())
        self.live = frozenset(w for w in self.there if self._beats[w].status != LEAVING)
