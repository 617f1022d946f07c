"""Getting into a Redis server: user, password, TLS, and what it means when that fails."""

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

# What passes by itself: by class, and by how the text begins of what has no class of its own.
_PASSES: _Kinds = (
    (
        redis.ConnectionError,  # also while the server loads its data
        redis.TimeoutError,
        redis.exceptions.OutOfMemoryError,
        redis.exceptions.TryAgainError,
    ),
    ("BUSY", "MISCONF"),
)
# What says that the server gave up its role, or has not got it yet: another one may have it.
_FAILS_OVER: _Kinds = (
    (redis.exceptions.ReadOnlyError, redis.exceptions.ClusterDownError),  # MASTERDOWN is the latter
    ("UNBLOCKED", "NOREPLICAS"),
)
# What waiting mends only where the same server, or the one before it, has let us in: a replica
# that is promoted may come up before its users, and a node of a cluster hands its keys on.
_LET_IN_BEFORE = (
    redis.AuthenticationError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.AskError,  # and MOVED
)
# A host that is away answers nothing, and the kernel asks it again after 1, 3 and 7 s: a new
# attempt is sooner. A connection that takes longer would serve no round either.
TIMEOUT_S = 5.0  # without an answer: then the server counts as away
_CONNECT_S = 1.0
_MASK = "***"
_RIGHTS = "the rights that its user needs are in docs/howto/security.md"


class RedisClient(redis.Redis):
    """A client that knows whether it was let in, and can leave a server that is no longer ours."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 -- the library's own
        super().__init__(*args, **options)
        self.let_in = False  # a command was answered
        self._idle = deque[Any]()  # connections; the last used is at the end

    def borrow(self) -> Any:  # noqa: ANN401 -- of one of the library's classes
        """Lend a connection for one packet: to be taken back, or closed where an error came.

        The library makes it and understands its answers. Its own pool and pipeline are passed by:
        their locks, events and metrics take 70 us of processor for a packet that takes 19.

        Raises:
            RedisError: If none can be made.
        """
        idle = self._idle
        connection = None
        while connection is None and idle:
            with suppress(IndexError):  # another thread took the last one
                connection = _usable(idle.pop())
        return connection or self.connection_pool.connection_class(
            **self.connection_pool.connection_kwargs
        )

    def take_back(self, connection: Any, pool: redis.ConnectionPool) -> None:  # noqa: ANN401 -- likewise
        """Keep a connection on which all was answered for whoever is next.

        Args:
            connection: The one that was lent.
            pool: What was the pool before that; after `renew` it is another one.
        """
        idle = self._idle  # before the pool is looked at: `renew` changes it after the pool
        if self.connection_pool is pool:
            idle.append(connection)
        else:
            connection.disconnect()

    def close(self) -> None:
        """Let go of all connections that nobody uses."""
        self._drop(self._idle)
        super().close()

    def renew(self, pool: redis.ConnectionPool) -> None:
        """Use none of a pool's connections again: behind its address may be another server by now.

        A server that became a replica keeps its connections open, so nobody would look there.
        Who has one of them in hand still uses it once.

        Args:
            pool: That the caller had its connection from; one that was left already is no news.
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
    """The connection, or None where the server has closed it, or sent what nobody asked for."""
    try:
        if not connection.can_read(timeout=0):
            return connection
    except (redis.ConnectionError, OSError):
        pass
    connection.disconnect()
    return None


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """As whom we come, and whom we trust; what the URL says need not be here."""

    password: str = field(default="", repr=False)
    ca: str = ""  # file of authorities, trusted beside the system's; for rediss:// alone
    cert: str = ""  # file of our certificate
    key: str = ""  # file of its key, which has no password


def redis_access(settings: Settings) -> RedisAccess:
    """As whom we come to Redis, and whom we trust, as the settings say."""
    return RedisAccess(
        password=settings.redis_password,
        ca=settings.redis_ca,
        cert=settings.redis_cert,
        key=settings.redis_key,
    )


def client_of(url: str, access: RedisAccess, **options: object) -> RedisClient:
    """Make a client with a pool of connections; the server is not asked yet.

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
            retry=Retry(NoBackoff(), 0),  # when to try again is the caller's to decide
        )
        assert isinstance(client, RedisClient)  # noqa: S101 -- which the library's types do not say
        client.connection_pool.make_connection()  # which does not connect, but knows its options
    except (ValueError, TypeError, redis.RedisError):  # whose text may show pieces of the URL
        raise UserError(
            "DOLL_REDIS: the URL has a part or an option that Redis's client does not know"
        ) from None
    return client


def fault(client: RedisClient, error: redis.RedisError, doing: str = "") -> OutsideError:
    """The error of our tree that says what an error of the client means; to be raised.

    Args:
        client: Which had it.
        error: What it said.
        doing: The command that was refused; empty where none could be sent.
    """
    text = str(error)
    password = client.connection_pool.connection_kwargs.get("password") or ""
    hidden = bool(password) and password in text  # some proxies repeat a command that they refuse
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
    """Whether an answer says that another server may have taken the place of this one."""
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
            f"Redis does not accept our name or password, it says: {text} (check"
            " the URL in DOLL_REDIS, and DOLL_REDIS_PASSWORD)"
        )
    if isinstance(error, redis.exceptions.NoPermissionError):
        return kind(f"Redis does not let us do {doing or 'this'}: {text} ({_RIGHTS})")
    advice = next((found for found in map(_tls_advice, _causes(error)) if found), "")
    if advice:
        return OutsideError(f"no safe connection to Redis: {text} ({advice})")
    if doing:
        return kind(f"Redis refused {doing}: {text}")
    if kind is UnavailableError:
        return kind(f"Redis is unavailable: {text}")
    return kind(f"this is no Redis that we understand: {text}")


def _tls_advice(error: BaseException) -> str:
    """What to do about a failure of TLS that waiting will not mend; empty where it is none."""
    # The library's type says that there is always a reason; Python's own errors come without.
    reason = getattr(error, "reason", "") or "" if isinstance(error, ssl.SSLError) else ""
    if reason == "CERTIFICATE_VERIFY_FAILED":
        return "DOLL_REDIS_CA must name the file of the authority that signed for this very host"
    if reason == "WRONG_VERSION_NUMBER":
        return "nobody speaks TLS there: another port, or redis:// instead of rediss://"
    if "ALERT" in reason:
        return "it refuses our certificate, or wants one: DOLL_REDIS_CERT and DOLL_REDIS_KEY"
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _check_files(access: RedisAccess) -> None:
    """Look at the files now: the client would report them as a server that is away."""
    if access.ca:
        with _naming("DOLL_REDIS_CA"):
            ssl.create_default_context(cafile=access.ca)
    if access.cert:
        with _naming("DOLL_REDIS_CERT or DOLL_REDIS_KEY"):
            # An empty password: without any, a key that needs one would ask at the terminal.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_cert_chain(access.cert, access.key, password="")


@contextmanager
def _naming(variable: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise UserError(
            f"{variable}: the file holds no certificate, or no key that fits it without a password"
        ) from error
    except OSError as error:
        raise UserError(f"{variable}: the file cannot be read: {error.strerror}") from error
