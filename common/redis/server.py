"""Sends commands to a Redis server in packets, and returns answers or our own errors."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import redis
from hiredis import pack_command
from redis.connection import PythonRespSerializer

from common.redis.access import RedisAccess, client_of, fails_over, fault

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from common.redis.access import RedisClient

Argument: TypeAlias = str | bytes | memoryview | int | float
Command: TypeAlias = tuple[Argument, ...]

# Bytes. Larger arguments are sent without being copied.
_LARGE = 6_000
# Bytes. A model of 1 MB arrives in a few reads instead of 32.
_READ_SIZE = 1 << 18


def connect(url: str, access: RedisAccess) -> RedisClient:
    """Make a pool of connections, without connecting.

    Args:
        url: `redis://host:port/db`, `rediss://...` or `unix://path`.
        access: Identity and trusted authorities.

    Raises:
        UserError: If the URL or a file of `access` cannot be used.
    """
    return client_of(
        url,
        access,
        socket_read_size=_READ_SIZE,
        command_packer=_CommandPacker(_LARGE, _as_bytes),
    )


class RedisServer:
    """One server's pool of connections. Safe to use from several threads.

    Each call has a connection of its own, so a waiting call never delays another.

    Args:
        client: A client made by `connect`. Several servers may share it.
        prefix: Prefix of all keys of the caller.
        on_foreign_key: Called with each such key whose value has an unexpected type.
    """

    def __init__(
        self, client: RedisClient, prefix: str, on_foreign_key: Callable[[str], None]
    ) -> None:
        self._redis = client
        self._prefix = prefix
        self._on_foreign_key = on_foreign_key

    def ask(self, *commands: Command) -> list[Any]:
        """Send commands in one packet and return their answers.

        A key with a value of an unexpected type is garbage: it is deleted and the command repeated.

        Raises:
            UnavailableError: If the server is unavailable or busy, or fails over.
            OutsideError: If it does not accept our name or password, or refused a command.
        """
        return self.judged(commands, self.send(commands))

    def ask_while(self, key: str, values: Container[bytes | None], *commands: Command) -> bool:
        """Send commands in a transaction if a key has one of these values; otherwise return False.

        Raises:
            UnavailableError: If the server is unavailable or busy, or fails over.
            OutsideError: If it does not accept our name or password, or refused a command.
        """
        looked = ("WATCH", key), ("GET", key)
        transaction = ("MULTI",), *commands, ("EXEC",)
        with self._lent() as connection:
            while True:
                value = self.judged(looked, self._said(connection, looked))[-1]
                if value not in values:
                    self._said(connection, (("UNWATCH",),))
                    return False
                answers = self.judged(transaction, self._said(connection, transaction))[-1]
                # If None, the key was written meanwhile, perhaps with the same value.
                if answers is not None:
                    self.judged(commands, answers)
                    return True

    def send(self, commands: Sequence[Command]) -> list[Any]:
        """Return the raw answers to commands; a refused command's answer is its error.

        Raises:
            UnavailableError: If the server is unavailable.
            OutsideError: If it does not accept our name or password.
        """
        with self._lent() as connection:
            return self._said(connection, commands)

    @contextmanager
    def _lent(self) -> Iterator[Any]:
        """Lend a connection for packets of one caller, and close it after an error."""
        client, pool = self._redis, self._redis.connection_pool
        connection = None
        try:
            connection = client.borrow()
            yield connection
        except BaseException as error:
            if connection is not None:
                # Half of an answer may be left on the connection.
                connection.disconnect()
            if isinstance(error, redis.TimeoutError):
                # The other connections go to the same host, and each would wait as long.
                client.renew(pool)
            if isinstance(error, redis.RedisError):
                raise fault(client, error)  # noqa: B904 -- it knows what it came from
            raise
        client.take_back(connection, pool)

    def _said(self, connection: Any, commands: Sequence[Command]) -> list[Any]:  # noqa: ANN401 -- the library's own
        """Send a packet and return the raw answers."""
        client, pool = self._redis, self._redis.connection_pool
        packet = connection.pack_commands(commands)
        connection.send_packed_command(packet, check_health=False)
        answers = [self._answer(connection, str(command[0])) for command in commands]
        refused = [answer for answer in answers if isinstance(answer, redis.RedisError)]
        if any(fails_over(client, answer) for answer in refused):
            client.renew(pool)
        elif not refused:
            client.let_in = True
        return answers

    def _answer(self, connection: Any, name: str) -> Any:  # noqa: ANN401 -- of any type
        try:
            return self._redis.parse_response(connection, name)  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            return error

    def judged(self, commands: Sequence[Command], answers: list[Any]) -> list[Any]:
        """Return the answers to commands that were sent in a packet, as `ask` does.

        Raises:
            UnavailableError: If the server is busy, or fails over.
            OutsideError: If it refused a command.
        """
        for number, (command, answer) in enumerate(zip(commands, answers, strict=True)):
            if isinstance(answer, redis.ResponseError) and "WRONGTYPE" in str(answer):
                key = next(str(part) for part in command if str(part).startswith(self._prefix))
                self._on_foreign_key(key)
                answers[number] = self.send((("UNLINK", key), command))[1]
        for command, answer in zip(commands, answers, strict=True):
            if isinstance(answer, redis.RedisError):
                raise fault(self._redis, answer, str(command[0]))
        return answers

    def attendance(self, channel: str | bytes) -> Attendance:
        """Make a subscription whose end tells the server that this process has ended."""
        return Attendance(self._redis, channel)

    def close(self) -> None:
        """Close all connections."""
        self._redis.close()


class Attendance:
    """A subscription to an unused channel: it ends with the process that holds it.

    When a process dies, the system closes its connections and the server drops the subscription at
    once. A machine that loses its power sends nothing, so a subscription only speeds up what
    expiring heartbeats do anyway.

    Args:
        client: Provides the connection.
        channel: Channel that others look up with PUBSUB NUMSUB.
    """

    def __init__(self, client: RedisClient, channel: str | bytes) -> None:
        self._client = client
        # The pool of `_connection`.
        self._pool = client.connection_pool
        self._channel = channel
        self._lock = threading.Lock()
        self._connection: Any = None

    def keep(self) -> bool:
        """Subscribe, or check that the subscription still stands; False if it is not allowed.

        Raises:
            UnavailableError: If the server is unavailable.
            OutsideError: If the server does not accept us.
        """
        with self._lock:
            if self._stands():
                return True
            self._end()
            self._pool = self._client.connection_pool
            try:
                self._connection = self._pool.get_connection()
                self._connection.send_command("SUBSCRIBE", self._channel)
                self._connection.read_response()
            except redis.exceptions.NoPermissionError:
                self._end()
                return False
            except redis.RedisError as error:
                self._end()
                raise fault(self._client, error)  # noqa: B904 -- it knows what it came from
            return True

    def stands(self) -> bool:
        """Return True if this side still has the subscription; the server is not contacted."""
        with self._lock:
            return self._stands()

    def end(self) -> None:
        """Unsubscribe by closing the connection."""
        with self._lock:
            self._end()

    def _stands(self) -> bool:
        """Check the connection. Nothing is ever published, so if it is readable, it has ended."""
        if self._connection is None or self._pool is not self._client.connection_pool:
            return False
        try:
            return not self._connection.can_read(timeout=0)
        except redis.ConnectionError:
            return False

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)


class _CommandPacker(PythonRespSerializer):
    """Packs commands with hiredis, in an eighth of Python's time, unless an argument is large.

    hiredis copies a large value three times: 1.3 ms for 1 MB, compared with 0.3 ms.
    """

    def pack(self, *parts: Argument) -> list[bytes | memoryview]:
        """Return a packed command, in pieces."""
        for part in parts:
            if isinstance(part, memoryview) or (isinstance(part, bytes) and len(part) > _LARGE):
                packed: list[bytes | memoryview] = super().pack(*parts)  # type: ignore[no-untyped-call]
                return packed
        return [pack_command(parts)]  # type: ignore[arg-type] # its stub has a tuple of one


def _as_bytes(part: Argument) -> bytes | memoryview:
    return part if isinstance(part, (bytes, memoryview)) else str(part).encode()
