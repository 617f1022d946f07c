"""Commands that a board sends to Redis, step by step."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from common.core.liveness import Heartbeat
from common.core.messages import WorkerId
from common.redis.board import RedisBoard

if TYPE_CHECKING:
    from common.redis.server import Command

# Listeners to a worker's channel while its process lives.
LISTENERS = 1


class Beats:
    """A server that knows only heartbeats and counts packets."""

    def __init__(self) -> None:
        self.beats = dict[bytes, bytes]()  # worker to heartbeat
        self.packets = 0

    def answer(self, commands: tuple[Command, ...]) -> list[Any]:
        """Return the replies to a packet."""
        self.packets += 1
        return [self._answer(*map(str, command)) for command in commands]

    def _answer(self, name: str, *parts: str) -> object:
        workers = [part.rpartition(":")[2].encode() for part in parts]
        match name:
            case "SMEMBERS":
                return set(self.beats)
            case "MGET":
                return [self.beats.get(worker) for worker in workers]
            case "PUBSUB":
                return [each for worker in workers[1:] for each in (worker, LISTENERS)]
        raise AssertionError(name)


def look(board: RedisBoard, server: Beats) -> dict[WorkerId, Heartbeat]:
    """Return the live workers, with as many packets as necessary."""
    steps = board.looking_for_workers()
    commands = next(steps)
    try:
        while True:
            commands = steps.send(server.answer(commands))
    except StopIteration as done:
        found: dict[WorkerId, Heartbeat] = done.value
        return found


def test_reading_unchanged_heartbeats_takes_one_packet() -> None:
    server, one, two = Beats(), WorkerId("one"), WorkerId("two")
    with closing(RedisBoard("redis://localhost:1", "digits")) as board:
        assert (look(board, server), server.packets) == ({}, 1)
        server.beats[b"one"] = b"alive +"
        assert (look(board, server), server.packets) == ({one: Heartbeat("alive")}, 3)
        server.beats[b"one"] = b"leaving +"
        assert (look(board, server), server.packets) == ({one: Heartbeat("leaving")}, 4)
        server.beats[b"two"] = b"alive +"
        assert look(board, server) == {one: Heartbeat("leaving"), two: Heartbeat("alive")}
        del server.beats[b"one"]
        assert look(board, server) == {two: Heartbeat("alive")}
        before = server.packets
        assert (look(board, server), server.packets) == ({two: Heartbeat("alive")}, before + 1)
