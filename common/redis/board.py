"""The notice board of a job in Redis (`common.redis.port.Board`).

Only commands of Redis 6.2 and no scripts: correctness never depends on what is here
(docs/explain/protocol.md). A job's keys share a hash tag, so that a Redis Cluster keeps them in one
slot:

    doll:{job}:model:<epoch>:<version>    weights; the last few of each leader
    doll:{job}:offered                    name and weights of one model, for evaluators
    doll:{job}:triggers                   stream with ids <epoch>-<number>
    doll:{job}:triggers:<stream>          another one, where something stood in the way there
    doll:{job}:leader-status
    doll:{job}:unable:<process>           why, expires         doll:{job}:unable      their names
    doll:{job}:alive:<worker>             status and digest of the model's layout, expires
                                                               doll:{job}:workers     their names
                                          and a channel of this name, to which the worker listens
    doll:{job}:snapshot:<epoch>           newest of a leader   doll:{job}:snapshots   its epochs
    doll:{job}:snapshot:<epoch>:whole     with the weights, where members of a group have them
    doll:{job}:lease                      who may try to lead
    doll:{job}:lease:after:<replica>      who took it from one that ended, expires
    doll:{job}:group:<name>               see `common.redis.boards`

What workers of all its jobs answer to a replica is one list, so that one connection waits for it:

    doll:{replica}:replies

and while its process lives it listens to a channel:

    doll:{replica}:alive
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from common.core.liveness import STATUSES, Heartbeat
from common.core.messages import LeaderStatus, ModelId, Reply, TriggerId, UpdateTrigger, WorkerId
from common.redis.access import TIMEOUT_S, RedisAccess, redis_access
from common.redis.port import LiveStatus
from common.redis.server import Attendance, RedisServer, connect
from common.telemetry.logging import Rejections
from common.wire import messages as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable

    from common.config.settings import Settings
    from common.redis.access import RedisClient
    from common.redis.port import Board
    from common.redis.server import Command

T = TypeVar("T")
Steps: TypeAlias = "Generator[tuple[Command, ...], list[Any], T]"  # returns a T

_OFFER_TTL_MS = 3_600_000  # an hour: a job that has ended needs no memory here
_REPLIES_TTL_MS = 600_000  # ten minutes after the last: longer than any round waits for one
WAIT_S = TIMEOUT_S / 2  # of one blocking command; longer waits are several of them
_NO_EXPIRY = -1  # PTTL's word for it
_LONGEST_LEASE = 10  # times the lifetime that is asked for: no replica has one so much longer
# One holder's lease is taken early only once in so long: who was taken for dead, and lives, is not
# deposed again for the same reason.
_TAKEN_ONCE_MS = 60_000
_ATTENDS = "+"  # behind the beat of a worker that also listens to the channel of its name
_BEAT = re.compile(rb"(%s) ([0-9a-f]{16}|)(\+?)" % "|".join(STATUSES).encode())
_NOBODY = Heartbeat("")
_OPEN = RedisAccess()


def open_board(settings: Settings, job: str) -> Board:
    """Open a job's notice board in Redis; the server is not asked before the first call.

    Raises:
        UserError: If the settings name a file that cannot be used.
    """
    return RedisBoard(settings.redis, job, access=redis_access(settings))


class RedisBoard:
    """One job's keys in a Redis server; may be shared between threads.

    A call that waits keeps one connection of the pool to itself, so it never holds up another. News
    end a wait at once; without news it may end 100 ms late, unless the server's `hz` is above 10.

    Args:
        url: `redis://host:port/db`, `rediss://...` or `unix://path`.
        job: The job's id.
        access: As whom we come, and whom we trust, beyond what the URL says.
        shared: Connections to use in place of its own.

    Raises:
        UserError: If the URL or a file of `access` cannot be used.
    """

    def __init__(
        self,
        url: str,
        job: str,
        access: RedisAccess = _OPEN,
        shared: RedisClient | None = None,
    ) -> None:
        self._job = job
        self._keys = f"doll:{{{job}}}:"
        self._rejections = Rejections()
        self._shared = shared is not None
        client = connect(url, access) if shared is None else shared
        self._server = RedisServer(client, self._keys, self._reject_key)
        self._attendances = dict[WorkerId, Attendance]()
        self._workers: list[WorkerId] = []  # there at the last look
        # Read and written ten times a second, mostly as it was, and long with many partitions.
        self._leader_status: tuple[bytes, LeaderStatus] | None = None
        self._put_at = float("-inf")  # when it was written

    def close(self) -> None:
        """Let go of all connections."""
        for attendance in self._attendances.values():
            attendance.end()
        if not self._shared:
            self._server.close()

    # --- models ----------------------------------------------------------------------------------

    def get_model(self, model: ModelId) -> bytes | None:
        """Fetch a model, or None where it is gone."""
        weights: bytes | None = self._server.ask(("GET", self._model(model)))[0]
        return weights

    def offer_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Leave a model for whoever judges models; it takes the place of the one before."""
        offer = wire.encode_offer(model, weights)
        self._server.ask(("SET", self._keys + "offered", offer, "PX", _OFFER_TTL_MS))

    def offered_model(self, known: ModelId | None = None) -> tuple[ModelId, bytes] | None:
        """The model that was left last; None where there is none, or it is the `known` one."""
        key = self._keys + "offered"
        name = self._server.ask(("GETRANGE", key, 0, wire.OFFER_NAME_BYTES - 1))[0]
        if not name or (known is not None and name == wire.encode_offer(known, b"")):
            return None
        # Asked again, since another may stand there by now: a name and its weights are one value.
        offer = self._server.ask(("GET", key))[0]
        return None if offer is None else self._rejections.parse("offer", wire.decode_offer, offer)

    # --- triggers --------------------------------------------------------------------------------

    def triggers(self, after: TriggerId, timeout_s: float, stream: str = "") -> list[UpdateTrigger]:
        """Wait for triggers of a stream with an id above `after`, oldest first; else empty."""
        key = self._triggers(stream)
        position: str | bytes = entry_id(after) if after.epoch >= 0 else "0-0"
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            block = ("BLOCK", max(1, int(1000 * min(left_s, WAIT_S)))) if left_s > 0 else ()
            answer = self._server.ask(("XREAD", *block, "STREAMS", key, position))[0]
            entries = answer[0][1] if answer else []
            found = self._parsed_triggers(entries)
            if found or left_s <= 0:
                return found
            if entries:  # garbage alone: go on behind it
                position = entries[-1][0]

    def _parsed_triggers(
        self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]
    ) -> list[UpdateTrigger]:
        """The triggers among the entries of the stream."""
        found = []
        for name, fields in entries:
            data = fields.get(b"trigger", b"")
            trigger = self._rejections.parse("trigger", wire.decode_trigger, data)
            if trigger is not None and entry_id(trigger.id).encode() == name:
                found.append(trigger)
            elif trigger is not None:
                self._rejections.reject("trigger id", f"trigger {trigger.id} stands at {name!r}")
        return found

    # --- replies ---------------------------------------------------------------------------------

    def push_reply(self, reply: Reply, to: str) -> None:
        """Append to the list of the replica; it vanishes with those that nobody takes."""
        key = replies_key(to)
        self._server.ask(
            ("RPUSH", key, wire.encode_reply(self._job, reply)),
            ("PEXPIRE", key, _REPLIES_TTL_MS),
        )

    # --- status ----------------------------------------------------------------------------------

    def get_leader_status(self) -> LeaderStatus | None:
        """Read the leader's status, or None where there is none."""
        return self._parsed_leader_status(
            self._server.ask(("GET", self._keys + "leader-status"))[0]
        )

    def _parsed_leader_status(self, data: bytes | None) -> LeaderStatus | None:
        if data is None:
            return None
        last = self._leader_status
        if last is not None and last[0] == data:
            return last[1]
        leader_status = self._rejections.parse("leader status", wire.decode_leader_status, data)
        self._leader_status = (data, leader_status) if leader_status is not None else None
        return leader_status

    # --- liveness --------------------------------------------------------------------------------

    def beat(self, worker: WorkerId, status: str, ttl_s: float, digest: str = "") -> None:
        """Say that a worker lives, for `ttl_s`, and what `Heartbeat` has."""
        key = self._alive(worker)
        if worker not in self._attendances:
            self._attendances[worker] = self._server.attendance(key)
        attends = self._attendances[worker].keep()
        self._server.ask(
            ("SET", key, f"{status} {digest}" + _ATTENDS * attends, "PX", _milliseconds(ttl_s)),
            ("SADD", self._keys + "workers", worker),
        )

    def heartbeats(self) -> dict[WorkerId, Heartbeat]:
        """Return the beat of each worker, if it has not run out and the worker's process lives."""
        return self.follow(self.looking_for_workers())

    def looking_for_workers(self) -> Steps[dict[WorkerId, Heartbeat]]:
        """`heartbeats`, in steps."""
        index, known = self._keys + "workers", self._workers
        # Beats of those that were there at the last look, mostly all, in the same packet.
        names, *beats = yield (("SMEMBERS", index), *self._asking_beats(known))
        workers = yield from self._parsed_members(index, names, lambda it: WorkerId(it.decode()))
        self._workers = workers = sorted(workers)
        if not workers:
            return {}
        if workers == known:
            found = self._read_beats(*beats)
        else:
            found = yield from self._beats(workers)
        heartbeats = dict(zip(workers, found, strict=True))
        gone = [worker for worker, beat in heartbeats.items() if beat is None]
        if gone:
            # One of them may beat right now. A beat is set before its name is added: either its
            # name is added after we removed it, or we see the beat and add the name again.
            yield (("SREM", index, *gone),)
            again = zip(gone, (yield from self._beats(gone)), strict=True)
            back = {worker: beat for worker, beat in again if beat is not None}
            if back:
                yield (("SADD", index, *back),)
                heartbeats.update(back)
        return {worker: beat for worker, beat in heartbeats.items() if beat and beat.status}

    def _beats(self, workers: list[WorkerId]) -> Steps[list[Heartbeat | None]]:
        """Beats in the same order: None if one has run out, `_NOBODY` if its process is gone."""
        values, listeners = yield self._asking_beats(workers)
        return self._read_beats(values, listeners)

    def _asking_beats(self, workers: list[WorkerId]) -> tuple[Command, ...]:
        keys = [self._alive(worker) for worker in workers]
        return (("MGET", *keys), ("PUBSUB", "NUMSUB", *keys)) if keys else ()

    def _read_beats(
        self, values: list[bytes | None], listeners: list[Any]
    ) -> list[Heartbeat | None]:
        there = listeners[1::2]  # after each channel's name the number of those who listen
        return [
            None if value is None else self._read_beat(value, listens=bool(count))
            for value, count in zip(values, there, strict=True)
        ]

    def _read_beat(self, value: bytes, *, listens: bool) -> Heartbeat:
        parsed = _BEAT.fullmatch(value)
        if parsed is None:
            expected = f"one of {STATUSES} and a digest"
            self._rejections.reject("status", f"alive is {value[:40]!r}, expected {expected}")
            return _NOBODY
        status, digest, attends = parsed.groups()
        return Heartbeat(status.decode(), digest.decode()) if listens or not attends else _NOBODY

    # --- the lease -------------------------------------------------------------------------------

    # Prolonging and releasing read first and write then, without a transaction. In between, the
    # lease may run out and another take it, whose lease is then prolonged or given back. That costs
    # a little time: the lease only says who may try to lead, who leads is decided in the log.
    # Snapshots are put in a transaction: those who read them alone do not ask the log.

    def hold_lease(self, holder: str, ttl_s: float) -> bool:
        """Take or prolong the lease that says who may try to lead; False if another holds it."""
        return self.follow(self.holding_lease(holder, ttl_s)) == holder.encode()

    def holding_lease(
        self, holder: str, ttl_s: float, ended: Collection[bytes] = ()
    ) -> Steps[bytes]:
        """`hold_lease`, in steps; returns who has it then, empty where somebody was faster.

        Args:
            holder: Who asks.
            ttl_s: For how long.
            ended: Holders whose processes have ended: what they have is taken.
        """
        key, ttl_ms = self._keys + "lease", _milliseconds(ttl_s)
        (current,) = yield (("GET", key),)
        if current == holder.encode():
            (prolonged,) = yield (("PEXPIRE", key, ttl_ms),)
            if prolonged:
                return holder.encode()
        elif current is not None:
            (left_ms,) = yield (("PTTL", key),)
            if left_ms != _NO_EXPIRY and left_ms <= _LONGEST_LEASE * ttl_ms:
                if current not in ended:
                    return bytes(current)
                # Of several that see the end one takes it: else each would take the next one's.
                mark = f"{key}:after:".encode() + current
                if not (yield (("SET", mark, holder, "NX", "PX", _TAKEN_ONCE_MS),))[0]:
                    return bytes(current)
            yield (("UNLINK", key),)  # of a process that is gone, or none of ours
        # Nobody has it, unless somebody is faster now.
        (taken,) = yield (("SET", key, holder, "NX", "PX", ttl_ms),)
        return holder.encode() if taken else b""

    def release_lease(self, holder: str) -> None:
        """Give the lease back, if it is still this holder's."""
        self.follow(self.releasing_lease(holder))

    def releasing_lease(self, holder: str) -> Steps[None]:
        """`release_lease`, in steps."""
        key = self._keys + "lease"
        if (yield (("GET", key),))[0] == holder.encode():
            yield (("UNLINK", key),)

    def is_leased(self) -> bool:
        """Whether anybody holds the lease: what somebody who only looks may know of leaders."""
        return bool(self._server.ask(("EXISTS", self._keys + "lease"))[0])

    # --- who cannot do its part ------------------------------------------------------------------

    def put_unable(self, process: str, reason: str, ttl_s: float) -> None:
        """Say, for so long, why a process cannot lead the job, or join it."""
        self._server.ask(
            ("SET", self._unable(process), reason, "PX", _milliseconds(ttl_s)),
            ("SADD", self._keys + "unable", process),
        )

    def unable(self) -> dict[str, str]:
        """Why processes cannot do their part, by what they call themselves."""
        return self.follow(self._reasons(self._server.ask(("SMEMBERS", self._keys + "unable"))[0]))

    def _reasons(self, members: Iterable[bytes]) -> Steps[dict[str, str]]:
        index = self._keys + "unable"
        replicas = yield from self._parsed_members(index, members, bytes.decode)
        if not replicas:
            return {}
        (reasons,) = yield (("MGET", *map(self._unable, replicas)),)
        found = dict(zip(replicas, reasons, strict=True))
        gone = [replica for replica, reason in found.items() if reason is None]
        if gone:  # one that says it again just now is seen at its next time
            yield (("SREM", index, *gone),)
        return {
            replica: reason.decode(errors="replace")
            for replica, reason in found.items()
            if reason is not None
        }

    def reading_live_status(self) -> Steps[LiveStatus]:
        """`is_leased`, `get_leader_status`, `alive` and `unable`, in steps."""
        leased, data, members = yield (
            ("EXISTS", self._keys + "lease"),
            ("GET", self._keys + "leader-status"),
            ("SMEMBERS", self._keys + "unable"),
        )
        heartbeats = yield from self.looking_for_workers()
        unable = yield from self._reasons(members)
        statuses = {worker: beat.status for worker, beat in heartbeats.items()}
        return LiveStatus(bool(leased), self._parsed_leader_status(data), statuses, unable)

    # --- snapshots -------------------------------------------------------------------------------

    def put_whole_snapshot(self, epoch: int, data: bytes) -> None:
        """Keep a hot snapshot of this leader with the weights, which a member of its group has."""
        self._server.ask(("SET", self._whole_snapshot(epoch), data))

    def snapshots(
        self, epoch: int | None = None, most: int | None = None, *, whole: bool = False
    ) -> list[bytes]:
        """All hot snapshots that are there, those of later leaders first."""
        if epoch is None:
            epochs = sorted(self._epochs(self._keys + "snapshots"), reverse=True)
        else:
            epochs = [epoch]
        last = -1 if most is None else most - 1
        keys = list(map(self._snapshot, epochs))
        if whole:
            keys += map(self._whole_snapshot, epochs)
        found = self._server.ask(*(("GETRANGE", key, 0, last) for key in keys)) if keys else []
        if whole:
            found = [
                found[at + len(epochs)] or data for at, data in enumerate(found[: len(epochs)])
            ]
        return [data for data in found if data]

    def wipe(self) -> None:
        """Forget everything of this job."""
        pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", self._keys) + "*"
        cursor: bytes | int = 0
        while True:
            cursor, keys = self._server.ask(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))[0]
            if keys:
                self._server.ask(("UNLINK", *keys))
            if not int(cursor):
                return

    # --- names -----------------------------------------------------------------------------------

    def _triggers(self, stream: str) -> str:
        return f"{self._keys}triggers:{stream}" if stream else f"{self._keys}triggers"

    def _model(self, model: ModelId) -> str:
        return f"{self._keys}model:{model.epoch}:{model.version}"

    def _alive(self, worker: WorkerId) -> str:
        return f"{self._keys}alive:{worker}"

    def _unable(self, replica: str) -> str:
        return f"{self._keys}unable:{replica}"

    def _snapshot(self, epoch: int) -> str:
        return f"{self._keys}snapshot:{epoch}"

    def _whole_snapshot(self, epoch: int) -> str:
        return f"{self._snapshot(epoch)}:whole"

    def _epochs(self, index: str) -> list[int]:
        return self._members(index, _epoch)

    def _members(self, index: str, parse: Callable[[bytes], T]) -> list[T]:
        """The members of a set that parse; the others are taken out of it."""
        members = self._server.ask(("SMEMBERS", index))[0]
        return self.follow(self._parsed_members(index, members, parse))

    def _parsed_members(
        self, index: str, members: Iterable[bytes], parse: Callable[[bytes], T]
    ) -> Steps[list[T]]:
        found = []
        for member in members:
            try:
                found.append(parse(member))
            except ValueError as error:
                self._rejections.reject("name", f"{member[:40]!r} in {index}: {error}")
                yield (("SREM", index, member),)
        return found

    # --- in steps --------------------------------------------------------------------------------

    # A call that an exchange makes for many jobs is a generator: it yields the commands of a step
    # and gets their answers, so that one packet can hold a step of each.

    def follow(self, steps: Steps[T]) -> T:
        """Make a call alone, a packet for each step."""
        try:
            commands = next(steps)
            while True:
                commands = steps.send(self._server.ask(*commands))
        except StopIteration as done:
            answer: T = done.value
            return answer

    def judged(self, commands: tuple[Command, ...], answers: list[Any]) -> list[Any]:
        """The answers that commands of a step got in a packet with others'.

        Raises:
            UnavailableError: If the server is busy.
            OutsideError: If it refused a command.
        """
        return self._server.judged(commands, answers)

    def _reject_key(self, key: str) -> None:
        self._rejections.reject("type", f"{key} holds another type than a job's")


def replies_key(replica: str) -> str:
    """The list of what workers answer to a replica."""
    return f"doll:{{{replica}}}:replies"


def replica_channel(replica: bytes) -> bytes:
    """The channel to which a replica listens while its process lives."""
    return b"doll:{%s}:alive" % replica


def entry_id(trigger: TriggerId) -> str:
    """The id of a trigger's entry in its stream."""
    return f"{trigger.epoch}-{trigger.number}"


def _epoch(name: bytes) -> int:
    epoch = int(name)
    if str(epoch).encode() != name:
        raise ValueError(f"not how epoch {epoch} is written")
    return epoch


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))  # Redis refuses to expire in zero
