"""Talking to a Redis server: commands in one packet out, answers or our errors back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from common.errors import OutsideError, UnavailableError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Argument: TypeAlias = str | bytes | memoryview | int | float
Command: TypeAlias = tuple[Argument, ...]

_LARGE = 6_000  # bytes; above it an argument is sent from where it lies instead of being copied
_READ_SIZE = 1 << 18  # bytes; a 1 MB model arrives in a few reads instead of in 32
_AWAY = (
    redis.ConnectionError,  # also while the server loads its data
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,  # a replica that was promoted elsewhere
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
)
_BUSY = ("BUSY", "MISCONF", "NOREPLICAS")  # errors without a class of their own that may pass


class RedisServer:
    """One server's pool of connections; may be shared between threads.

    Each call has one of the connections to itself, so a call that waits never holds up another.

    Args:
        url: `redis://host:port/db`, `rediss://...` or `unix://path`.
        prefix: Every key of the caller begins so.
        on_foreign_key: Hears of each such key that held another type than the caller's.
        timeout_s: After so long without an answer the server counts as away.
    """

    def __init__(
        self, url: str, prefix: str, on_foreign_key: Callable[[str], None], timeout_s: float
    ) -> None:
        self._prefix = prefix
        self._on_foreign_key = on_foreign_key
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=_READ_SIZE,
            protocol=2,
            retry=Retry(NoBackoff(), 0),  # when to try again is the caller's to decide
            # hiredis reads; its writer copies a large value three times (1.3 ms for 1 MB, not 0.3)
            command_packer=PythonRespSerializer(_LARGE, _as_bytes),
        )

    def ask(self, *commands: Command) -> list[Any]:
        """Send commands in one packet and return their answers.

        A key that holds another type than ours is garbage: it is deleted, the command repeated.

        Raises:
            UnavailableError: If the server is away or busy.
            UserError: If it does not accept our name or password.
            OutsideError: If it refused a command.
        """
        answers = self._send(commands)
        for number, (command, answer) in enumerate(zip(commands, answers, strict=True)):
            if isinstance(answer, redis.ResponseError) and "WRONGTYPE" in str(answer):
                key = next(str(part) for part in command if str(part).startswith(self._prefix))
                self._on_foreign_key(key)
                answers[number] = self._send((("UNLINK", key), command))[1]
        for command, answer in zip(commands, answers, strict=True):
            if isinstance(answer, redis.RedisError):
                busy = isinstance(answer, _AWAY) or str(answer).startswith(_BUSY)
                kind = UnavailableError if busy else OutsideError
                raise kind(f"Redis refused {command[0]!r}: {answer}") from answer
        return answers

    def close(self) -> None:
        """Let go of all connections."""
        self._redis.close()

    def _send(self, commands: Iterable[Command]) -> list[Any]:
        """Answers as they come; where a command was refused, its error stands in its place."""
        pipeline: Any = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        except redis.AuthenticationError as error:
            raise UserError(f"Redis does not accept our name or password: {error}") from error
        except _AWAY as error:
            raise UnavailableError(f"Redis is away: {error}") from error
        except redis.RedisError as error:
            raise OutsideError(f"this is no Redis that we understand: {error}") from error
        return answers


def _as_bytes(part: Argument) -> bytes | memoryview:
    return part if isinstance(part, (bytes, memoryview)) else str(part).encode()
