"""A job's board in Redis (`common.redis.port.Board`).

It uses only commands of Redis 6.2 and no scripts: correctness never depends on its contents
(docs/explain/protocol.md). A job's keys share a hash tag, so that a Redis Cluster keeps them in one
slot:

    doll:{job}:model:<epoch>:<version>    weights; the last few versions of each leader
    doll:{job}:offered                    id and weights of one model, for evaluators
    doll:{job}:triggers                   stream with ids <epoch>-<number>
    doll:{job}:triggers:<stream>          its replacement if an entry blocks the first stream
    doll:{job}:leader-status
    doll:{job}:unable:<process>           reason, expires      doll:{job}:unable      process names
    doll:{job}:alive:<worker>             status, digest, token of the process and device, expires
                                                               doll:{job}:workers     worker names
                                          and a channel of this name, which the worker joins
    doll:{job}:snapshot:<epoch>           newest of a leader   doll:{job}:snapshots   its epochs
    doll:{job}:snapshot:<epoch>:whole     with the weights, if members of a group have them
    doll:{job}:lease                      replica that may try to lead
    doll:{job}:lease:after:<replica>      replica that took the lease of an ended one, expires
    doll:{job}:group:<name>               see `common.redis.boards`

A replica receives the replies of all its jobs' workers in one list, so that one connection waits
for them:

    doll:{replica}:replies

While its process lives, it subscribes to a channel:

    doll:{replica}:alive
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from common.core.liveness import STATUSES, Device, Heartbeat
from common.core.messages import LeaderStatus, ModelId, Reply, TriggerId, UpdateTrigger, WorkerId
from common.redis.access import TIMEOUT_S, RedisAccess, redis_access
from common.redis.port import LiveStatus, devices_in
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
# The generator returns a T.
Steps: TypeAlias = "Generator[tuple[Command, ...], list[Any], T]"

# An hour, so that an ended job does not keep memory.
_OFFER_TTL_MS = 3_600_000
# Ten minutes after the last reply, which is longer than any round waits for one.
_REPLIES_TTL_MS = 600_000
# Longest blocking command. Longer waits consist of several.
WAIT_S = TIMEOUT_S / 2
# Answer of PTTL for a key that does not expire.
_NO_EXPIRY = -1
# Highest accepted lifetime of a lease, as a multiple of the requested one. No replica requests a
# lease that long.
_LONGEST_LEASE = 10
# A holder's lease is taken early only once in this time: a holder that was wrongly taken for dead
# is not deposed twice for the same reason.
_TAKEN_ONCE_MS = 60_000
# Suffix of a heartbeat whose worker also subscribes to the channel of its name.
_ATTENDS = "+"
_BEAT = re.compile(
    rb"(%s) ([0-9a-f]{16}|)(\+?)(?:@([0-9a-f]{16}))?(?: (.*))?" % "|".join(STATUSES).encode(),
    re.DOTALL,
)
# Kind, name, bytes of memory, driver and capability.
_DEVICE = re.compile(rb"(cpu|cuda);([ -:<-~]{1,64});(\d{1,16});([\w.+-]{0,32});(\d{1,3}\.\d{1,3}|)")
_UNNAMED = re.compile(r"[^ -:<-~]")
_NOBODY = Heartbeat("")
_OPEN = RedisAccess()


def _device_text(device: Device) -> str:
    name = _UNNAMED.sub("?", device.name)[:64]
    return f"{device.kind};{name};{device.memory_bytes};{device.driver};{device.capability}"


def open_board(settings: Settings, job: str) -> Board:
    """Open a job's board in Redis, without connecting.

    Raises:
        UserError: If the settings name a file that cannot be used.
    """
    return RedisBoard(settings.redis, job, access=redis_access(settings))


class RedisBoard:
    """One job's keys in a Redis server. Safe to use from several threads.

    A call that waits keeps one connection of the pool, so that it never delays another call. New
    entries end a wait at once. Without any, a wait may end 100 ms late, unless the server's `hz` is
    above 10.

    Args:
        url: `redis://host:port/db`, `rediss://...` or `unix://path`.
        job: Identifier of the job.
        access: Identity and trusted authorities, beyond those in the URL.
        shared: Connections to use instead of own ones.

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
        # Workers at the last poll.
        self._workers: list[WorkerId] = []
        # The leader's status as last read or written: its bytes and its decoded form. The status is
        # read and written ten times a second, usually unchanged, and is long if there are many
        # partitions.
        self._leader_status: tuple[bytes, LeaderStatus] | None = None
        # When the status was last written.
        self._put_at = float("-inf")

    def close(self) -> None:
        """Close all connections."""
        for attendance in self._attendances.values():
            attendance.end()
        if not self._shared:
            self._server.close()

    # --- models -----------------------------------------------------------------------------------

    def get_model(self, model: ModelId) -> bytes | None:
        """Fetch a model; None if it does not exist any more."""
        weights: bytes | None = self._server.ask(("GET", self._model(model)))[0]
        return weights

    def offer_model(self, model: ModelId, weights: bytes | memoryview) -> None:
        """Offer a model to evaluators, replacing the previous one."""
        offer = wire.encode_offer(model, weights)
        self._server.ask(("SET", self._keys + "offered", offer, "PX", _OFFER_TTL_MS))

    def offered_model(self, known: ModelId | None = None) -> tuple[ModelId, bytes] | None:
        """Return the offered model; None without one, or if it is the `known` one."""
        key = self._keys + "offered"
        name = self._server.ask(("GETRANGE", key, 0, wire.OFFER_NAME_BYTES - 1))[0]
        if not name or (known is not None and name == wire.encode_offer(known, b"")):
            return None
        # The value is fetched whole, because the offer may have changed since: an id and its
        # weights are one value.
        offer = self._server.ask(("GET", key))[0]
        return None if offer is None else self._rejections.parse("offer", wire.decode_offer, offer)

    # --- triggers ---------------------------------------------------------------------------------

    def triggers(self, after: TriggerId, timeout_s: float, stream: str = "") -> list[UpdateTrigger]:
        """Wait for triggers of a stream with ids above `after`, oldest first; may return none."""
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
            # All entries are garbage: continue after them.
            if entries:
                position = entries[-1][0]

    def _parsed_triggers(
        self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]
    ) -> list[UpdateTrigger]:
        """Return the triggers among the entries of the stream."""
        found = []
        for name, fields in entries:
            data = fields.get(b"trigger", b"")
            trigger = self._rejections.parse("trigger", wire.decode_trigger, data)
            if trigger is not None and entry_id(trigger.id).encode() == name:
                found.append(trigger)
            elif trigger is not None:
                self._rejections.reject(
                    "trigger id", f"trigger {trigger.id} is stored under another id, {name!r}"
                )
        return found

    # --- replies ----------------------------------------------------------------------------------

    def push_reply(self, reply: Reply, to: str) -> None:
        """Append to the replica's list, which expires if nobody reads it."""
        key = replies_key(to)
        self._server.ask(
            ("RPUSH", key, wire.encode_reply(self._job, reply)),
            ("PEXPIRE", key, _REPLIES_TTL_MS),
        )

    # --- status -----------------------------------------------------------------------------------

    def get_leader_status(self) -> LeaderStatus | None:
        """Read the leader's status; None if it does not exist."""
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

    # --- liveness ---------------------------------------------------------------------------------

    def beat(
        self,
        worker: WorkerId,
        status: str,
        ttl_s: float,
        digest: str = "",
        device: Device | None = None,
        life: str = "",
    ) -> None:
        """Record that a worker lives, for `ttl_s`, with the contents of a `Heartbeat`."""
        key = self._alive(worker)
        if worker not in self._attendances:
            self._attendances[worker] = self._server.attendance(key)
        text = f"{status} {digest}" + _ATTENDS * self._attendances[worker].keep()
        if life:
            text += f"@{life}"
        if device is not None:
            text += " " + _device_text(device)
        self._server.ask(
            ("SET", key, text, "PX", _milliseconds(ttl_s)),
            ("SADD", self._keys + "workers", worker),
        )

    def heartbeats(self) -> dict[WorkerId, Heartbeat]:
        """Return the heartbeat of each worker that lives and whose heartbeat has not expired."""
        return self.follow(self.looking_for_workers())

    def looking_for_workers(self) -> Steps[dict[WorkerId, Heartbeat]]:
        """Run `heartbeats` in steps."""
        index, known = self._keys + "workers", self._workers
        # The same packet asks for the heartbeats of the workers of the last poll, usually all
        # workers.
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
            # One of them may send a heartbeat right now. A heartbeat is set before its name is
            # added: either its name is added after this removal, or the heartbeat is seen below and
            # its name added again.
            yield (("SREM", index, *gone),)
            again = zip(gone, (yield from self._beats(gone)), strict=True)
            back = {worker: beat for worker, beat in again if beat is not None}
            if back:
                yield (("SADD", index, *back),)
                heartbeats.update(back)
        return {worker: beat for worker, beat in heartbeats.items() if beat and beat.status}

    def _beats(self, workers: list[WorkerId]) -> Steps[list[Heartbeat | None]]:
        """Return heartbeats in order: None if expired, `_NOBODY` if the process is gone."""
        values, listeners = yield self._asking_beats(workers)
        return self._read_beats(values, listeners)

    def _asking_beats(self, workers: list[WorkerId]) -> tuple[Command, ...]:
        keys = [self._alive(worker) for worker in workers]
        return (("MGET", *keys), ("PUBSUB", "NUMSUB", *keys)) if keys else ()

    def _read_beats(
        self, values: list[bytes | None], listeners: list[Any]
    ) -> list[Heartbeat | None]:
        # Each channel's name is followed by its number of subscribers.
        there = listeners[1::2]
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
        status, digest, attends, life, device = parsed.groups()
        if attends and not listens:
            return _NOBODY
        found = self._read_device(device)
        return Heartbeat(status.decode(), digest.decode(), found, (life or b"").decode())

    def _read_device(self, text: bytes | None) -> Device | None:
        """Return the device in a heartbeat; None if there is none, or if it does not parse."""
        parsed = None if text is None else _DEVICE.fullmatch(text)
        if parsed is None:
            if text is not None:
                self._rejections.reject("device", f"a heartbeat's device is {text[:80]!r}")
            return None
        kind, name, memory_bytes, driver, capability = (each.decode() for each in parsed.groups())
        return Device(kind, name, int(memory_bytes), driver, capability)

    # --- lease ------------------------------------------------------------------------------------

    # Renewing and releasing read first and write afterwards, without a transaction. In between, the
    # lease may expire and another replica may take it; that replica's lease is then renewed or
    # released. This costs a little time only, because the lease only says who may try to lead; the
    # log decides who leads. Snapshots are put in a transaction, because their readers do not look
    # at the log.

    def hold_lease(self, holder: str, ttl_s: float) -> bool:
        """Take or renew the lease, which says who may try to lead; False if another holds it."""
        return self.follow(self.holding_lease(holder, ttl_s)) == holder.encode()

    def holding_lease(
        self, holder: str, ttl_s: float, ended: Collection[bytes] = ()
    ) -> Steps[bytes]:
        """Run `hold_lease` in steps; return the holder, or an empty string if another was faster.

        Args:
            holder: The requesting replica.
            ttl_s: Lifetime of the lease.
            ended: Holders whose processes have ended. Their leases are taken.
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
                # Only one of several replicas that see the end takes the lease. Otherwise each
                # would take it from the one before.
                mark = f"{key}:after:".encode() + current
                if not (yield (("SET", mark, holder, "NX", "PX", _TAKEN_ONCE_MS),))[0]:
                    return bytes(current)
            # The lease belongs to an ended process, or no replica made it.
            yield (("UNLINK", key),)
        # The lease is free, unless another replica is faster.
        (taken,) = yield (("SET", key, holder, "NX", "PX", ttl_ms),)
        return holder.encode() if taken else b""

    def release_lease(self, holder: str) -> None:
        """Release the lease if this holder still has it."""
        self.follow(self.releasing_lease(holder))

    def releasing_lease(self, holder: str) -> Steps[None]:
        """Run `release_lease` in steps."""
        key = self._keys + "lease"
        if (yield (("GET", key),))[0] == holder.encode():
            yield (("UNLINK", key),)

    def is_leased(self) -> bool:
        """Return True if any replica holds the lease."""
        return bool(self._server.ask(("EXISTS", self._keys + "lease"))[0])

    # --- processes that cannot do their part ------------------------------------------------------

    def put_unable(self, process: str, reason: str, ttl_s: float) -> None:
        """Report, for `ttl_s`, why a process cannot lead or join the job."""
        self._server.ask(
            ("SET", self._unable(process), reason, "PX", _milliseconds(ttl_s)),
            ("SADD", self._keys + "unable", process),
        )

    def unable(self) -> dict[str, str]:
        """Return why processes cannot do their part, by process name."""
        return self.follow(self._reasons(self._server.ask(("SMEMBERS", self._keys + "unable"))[0]))

    def _reasons(self, members: Iterable[bytes]) -> Steps[dict[str, str]]:
        index = self._keys + "unable"
        replicas = yield from self._parsed_members(index, members, bytes.decode)
        if not replicas:
            return {}
        (reasons,) = yield (("MGET", *map(self._unable, replicas)),)
        found = dict(zip(replicas, reasons, strict=True))
        gone = [replica for replica, reason in found.items() if reason is None]
        # A reason that is reported right now is seen at its next report.
        if gone:
            yield (("SREM", index, *gone),)
        return {
            replica: reason.decode(errors="replace")
            for replica, reason in found.items()
            if reason is not None
        }

    def reading_live_status(self) -> Steps[LiveStatus]:
        """Read `is_leased`, `get_leader_status`, `heartbeats` and `unable` in steps."""
        leased, data, members = yield (
            ("EXISTS", self._keys + "lease"),
            ("GET", self._keys + "leader-status"),
            ("SMEMBERS", self._keys + "unable"),
        )
        heartbeats = yield from self.looking_for_workers()
        unable = yield from self._reasons(members)
        statuses = {worker: beat.status for worker, beat in heartbeats.items()}
        leader_status, devices = self._parsed_leader_status(data), devices_in(heartbeats)
        return LiveStatus(bool(leased), leader_status, statuses, unable, devices)

    # --- snapshots --------------------------------------------------------------------------------

    def put_whole_snapshot(self, epoch: int, data: bytes) -> None:
        """Store a hot snapshot of this leader, with weights; a member of its group writes it."""
        self._server.ask(("SET", self._whole_snapshot(epoch), data))

    def snapshots(
        self, epoch: int | None = None, most: int | None = None, *, whole: bool = False
    ) -> list[bytes]:
        """Return all hot snapshots, those of later leaders first."""
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
        """Delete everything of this job."""
        pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", self._keys) + "*"
        cursor: bytes | int = 0
        while True:
            cursor, keys = self._server.ask(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))[0]
            if keys:
                self._server.ask(("UNLINK", *keys))
            if not int(cursor):
                return

    # --- names ------------------------------------------------------------------------------------

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
        """Return the members of a set that parse, and remove the others from it."""
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

    # --- calls in steps ---------------------------------------------------------------------------

    # A call that an exchange makes for many jobs is a generator. It yields the commands of a step
    # and receives their answers, so that one packet can hold a step of each call.

    def follow(self, steps: Steps[T]) -> T:
        """Make a call alone, with one packet for each step."""
        try:
            commands = next(steps)
            while True:
                commands = steps.send(self._server.ask(*commands))
        except StopIteration as done:
            answer: T = done.value
            return answer

    def judged(self, commands: tuple[Command, ...], answers: list[Any]) -> list[Any]:
        """Return the answers to a step's commands from a packet with other commands.

        Raises:
            UnavailableError: If the server is busy.
            OutsideError: If the server refused a command.
        """
        return self._server.judged(commands, answers)

    def _reject_key(self, key: str) -> None:
        self._rejections.reject("type", f"{key} has another Redis type than this key of a job")


def replies_key(replica: str) -> str:
    """Return the key of the list of replies to a replica."""
    return f"doll:{{{replica}}}:replies"


def replica_channel(replica: bytes) -> bytes:
    """Return the channel that a replica subscribes to while its process lives."""
    return b"doll:{%s}:alive" % replica


def entry_id(trigger: TriggerId) -> str:
    """Return the id of a trigger's entry in its stream."""
    return f"{trigger.epoch}-{trigger.number}"


def _epoch(name: bytes) -> int:
    epoch = int(name)
    if str(epoch).encode() != name:
        raise ValueError(f"epoch {epoch} is not in canonical form")
    return epoch


def _milliseconds(seconds: float) -> int:
    # Redis refuses an expiry of zero.
    return max(1, round(1000 * seconds))
