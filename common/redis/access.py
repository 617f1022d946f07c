"""Access to a Redis server: user, password, TLS, and the meaning of refusals."""

from __future__ import annotations

import ssl
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import OutsideError, UnavailableError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.config.settings import Settings

_Kinds: TypeAlias = tuple[tuple[type[redis.RedisError], ...], tuple[str, ...]]

# Errors that pass by themselves: by class, or by the beginning of the text if there is no class.
_PASSES: _Kinds = (
    (
        # Also raised while the server loads its data.
        redis.ConnectionError,
        redis.TimeoutError,
        redis.exceptions.OutOfMemoryError,
        redis.exceptions.TryAgainError,
    ),
    ("BUSY", "MISCONF"),
)
# Errors of a server that gave up its role or does not have it yet. Another one may have it.
_FAILS_OVER: _Kinds = (
    # ClusterDownError includes MASTERDOWN.
    (redis.exceptions.ReadOnlyError, redis.exceptions.ClusterDownError),
    ("UNBLOCKED", "NOREPLICAS"),
)
# Errors that pass only if this server, or the one before it, has accepted us: a promoted replica
# may start before its users are loaded, and a cluster may move keys to another node.
_LET_IN_BEFORE = (
    redis.AuthenticationError,
    redis.exceptions.NoPermissionError,
    # AskError includes MOVED.
    redis.exceptions.AskError,
)
# A server that takes longer to answer counts as unavailable.
TIMEOUT_S = 5.0
# An unreachable host sends no answer, and the kernel repeats the request after 1, 3 and 7 s. A new
# attempt is faster, and a connection that takes longer would serve no round either.
_CONNECT_S = 1.0
_MASK = "***"
_RIGHTS = "the rights that its user needs are in docs/howto/security.md"


class RedisClient(redis.Redis):
    """A client that knows if a server has accepted it, and can drop all connections."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 -- the library's own
        super().__init__(*args, **options)
        # True once a command was answered.
        self.let_in = False
        # Idle connections; the last one used is at the end.
        self._idle = deque[Any]()

    def borrow(self) -> Any:  # noqa: ANN401 -- of one of the library's classes
        """Lend a connection for one packet. Call `take_back` after it, or close it after an error.

        The library makes the connection and parses its answers. Its pool and pipeline are not used:
        their locks, events and metrics take 70 us of processor time for a packet that takes 19 us.

        Raises:
            RedisError: If no connection can be made.
        """
        idle = self._idle
        connection = None
        while connection is None and idle:
            # Another thread may have taken the last connection.
            with suppress(IndexError):
                connection = _usable(idle.pop())
        return connection or self.connection_pool.connection_class(
            **self.connection_pool.connection_kwargs
        )

    def take_back(self, connection: Any, pool: redis.ConnectionPool) -> None:  # noqa: ANN401 -- as above
        """Keep a connection for its next user. All answers on it must have been read.

        Args:
            connection: The connection that was lent.
            pool: The pool at the time of lending; `renew` replaces the pool.
        """
        # Read this before the pool, because `renew` replaces it after the pool.
        idle = self._idle
        if self.connection_pool is pool:
            idle.append(connection)
        else:
            connection.disconnect()

    def close(self) -> None:
        """Close all idle connections."""
        self._drop(self._idle)
        super().close()

    def renew(self, pool: redis.ConnectionPool) -> None:
        """Replace a pool's connections, because another server may have its address now.

        A server that became a replica keeps its connections open, so that nobody would notice. A
        caller that has a connection in hand still uses it once.

        Args:
            pool: The caller's pool. If it was replaced already, nothing happens.
        """
        if self.connection_pool is not pool:
            return
        self.connection_pool = redis.ConnectionPool(
            pool.connection_class, pool.max_connections, **pool.connection_kwargs
        )
        pool.disconnect(inuse_connections=False)
        idle, self._idle = self._idle, deque()
        self._drop(idle)

    def _drop(self, idle: deque[Any]) -> None:
        with suppress(IndexError):
            while True:
                idle.pop().disconnect()


def _usable(connection: Any) -> Any:  # noqa: ANN401 -- of one of the library's classes
    """Return the connection; None if the server has closed it or has sent unexpected data."""
    try:
        if not connection.can_read(timeout=0):
            return connection
    except (redis.ConnectionError, OSError):
        pass
    connection.disconnect()
    return None


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Our identity, and the authorities that we trust. The URL may have parts of both."""

    password: str = field(default="", repr=False)
    # File of authorities, trusted beside the system's. For rediss:// only.
    ca: str = ""
    # File of our certificate.
    cert: str = ""
    # File of the certificate's key, which has no password.
    key: str = ""


def redis_access(settings: Settings) -> RedisAccess:
    """Return the access to Redis that the settings name."""
    return RedisAccess(
        password=settings.redis_password,
        ca=settings.redis_ca,
        cert=settings.redis_cert,
        key=settings.redis_key,
    )


def client_of(url: str, access: RedisAccess, **options: object) -> RedisClient:
    """Make a client with a pool of connections, without connecting.

    Raises:
        UserError: If the URL or a file of `access` cannot be used.
    """
    _check_files(access)
    given: dict[str, Any] = {
        "password": access.password or None,
        "ssl_ca_certs": access.ca or None,
        "ssl_certfile": access.cert or None,
        "ssl_keyfile": access.key or None,
    }
    try:
        client = RedisClient.from_url(
            url,
            **options,
            **{name: value for name, value in given.items() if value},
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=_CONNECT_S,
            protocol=2,
            # The caller decides when to retry.
            retry=Retry(NoBackoff(), 0),
        )
        assert isinstance(client, RedisClient)  # noqa: S101 -- which the library's types do not say
        # This does not connect, but checks the options.
        client.connection_pool.make_connection()
    # The error's text may show pieces of the URL.
    except (ValueError, TypeError, redis.RedisError):
        raise UserError(
            "DOLL_REDIS: the URL has a part or an option that the Redis client does not support"
        ) from None
    return client


def fault(client: RedisClient, error: redis.RedisError, doing: str = "") -> OutsideError:
    """Convert a client's error into an error of our own; the caller raises it.

    Args:
        client: The client that had the error.
        error: The error.
        doing: The refused command. Empty if no command could be sent.
    """
    text = str(error)
    password = client.connection_pool.connection_kwargs.get("password") or ""
    # Some proxies repeat a command that they refuse.
    hidden = bool(password) and password in text
    if hidden:
        text = text.replace(password, _MASK)
    passes = _is(error, _PASSES) or fails_over(client, error)
    if isinstance(error, _LET_IN_BEFORE):
        passes = client.let_in
    ours = _meaning(error, text, doing, UnavailableError if passes else OutsideError)
    ours.server = "redis"
    ours.__cause__ = None if hidden else error
    ours.__suppress_context__ = True
    return ours


def fails_over(client: RedisClient, error: object) -> bool:
    """Return True if an answer says that another server may have replaced this one."""
    return _is(error, _FAILS_OVER) or (client.let_in and isinstance(error, _LET_IN_BEFORE))


def _is(error: object, kinds: _Kinds) -> bool:
    classes, beginnings = kinds
    return isinstance(error, classes) or (
        isinstance(error, redis.ResponseError) and str(error).startswith(beginnings)
    )


def _meaning(
    error: redis.RedisError, text: str, doing: str, kind: type[OutsideError]
) -> OutsideError:
    if isinstance(error, redis.AuthenticationError):
        return kind(
            f"Redis rejects the user name or password: {text} (check the URL in DOLL_REDIS, and"
            " DOLL_REDIS_PASSWORD)"
        )
    if isinstance(error, redis.exceptions.NoPermissionError):
        return kind(f"Redis denies {doing or 'the command'}: {text} ({_RIGHTS})")
    advice = next((found for found in map(_tls_advice, _causes(error)) if found), "")
    if advice:
        return OutsideError(f"the TLS connection to Redis failed: {text} ({advice})")
    if doing:
        return kind(f"Redis refused {doing}: {text}")
    if kind is UnavailableError:
        return kind(f"Redis is unavailable: {text}")
    return kind(f"the server at DOLL_REDIS does not answer like Redis: {text}")


def _tls_advice(error: BaseException) -> str:
    """Return advice for a TLS failure that does not pass by itself; otherwise an empty string."""
    # The library's type says that there is always a reason, but Python's own errors lack it.
    reason = getattr(error, "reason", "") or "" if isinstance(error, ssl.SSLError) else ""
    if reason == "CERTIFICATE_VERIFY_FAILED":
        return (
            "set DOLL_REDIS_CA to the certificate file of the authority that signed this host's"
            " certificate"
        )
    if reason == "WRONG_VERSION_NUMBER":
        return (
            "the server does not use TLS on this port; set another port, or redis:// instead of"
            " rediss://"
        )
    if "ALERT" in reason:
        return (
            "the server rejects the client certificate or requires one; set DOLL_REDIS_CERT and"
            " DOLL_REDIS_KEY"
        )
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _check_files(access: RedisAccess) -> None:
    """Check the files now, because the client would report them as an unavailable server."""
    if access.ca:
        with _naming("DOLL_REDIS_CA"):
            ssl.create_default_context(cafile=access.ca)
    if access.cert:
        with _naming("DOLL_REDIS_CERT or DOLL_REDIS_KEY"):
            # The empty password prevents a prompt at the terminal for a key that needs a password.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_cert_chain(access.cert, access.key, password="")


@contextmanager
def _naming(variable: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise UserError(
            f"{variable}: the file contains no certificate, or no matching key without a password"
        ) from error
    except OSError as error:
        raise UserError(f"{variable}: the file cannot be read: {error.strerror}") from error
