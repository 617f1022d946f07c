"""Getting into a Redis server: user, password, TLS, and what it means when that fails."""

from __future__ import annotations

import ssl
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import OutsideError, UnavailableError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

AWAY = (
    redis.ConnectionError,  # also while the server loads its data
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,  # a replica that was promoted elsewhere
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
)
_MASK = "***"
_RIGHTS = "the rights that its user needs are in docs/security.md"


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """As whom we come, and whom we trust; what the URL says need not be here."""

    username: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""  # file of authorities, trusted beside the system's; for rediss:// alone
    cert: str = ""  # file of our certificate
    key: str = ""  # file of its key, which has no password


def client_of(url: str, access: RedisAccess, timeout_s: float, **options: object) -> redis.Redis:
    """Make a client with a pool of connections; the server is not asked yet.

    Raises:
        UserError: If the URL or a file of `access` cannot be used.
    """
    _check_files(access)
    given: dict[str, Any] = {
        "username": access.username or None,
        "password": access.password or None,
        "ssl_ca_certs": access.ca or None,
        "ssl_certfile": access.cert or None,
        "ssl_keyfile": access.key or None,
    }
    try:
        client = redis.Redis.from_url(
            url,
            **options,
            **{name: value for name, value in given.items() if value},
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            protocol=2,
            retry=Retry(NoBackoff(), 0),  # when to try again is the caller's to decide
        )
        client.connection_pool.make_connection()  # which does not connect, but knows its options
    except (ValueError, TypeError, redis.RedisError):  # whose text may show pieces of the URL
        raise UserError(
            "DOLL_REDIS: the URL has a part or an option that Redis's client does not know"
        ) from None
    return client


def fault(client: redis.Redis, error: redis.RedisError, doing: str = "") -> OutsideError:
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
    ours = _meaning(error, text, doing)
    ours.__cause__ = None if hidden else error
    ours.__suppress_context__ = True
    return ours


def _meaning(error: redis.RedisError, text: str, doing: str) -> OutsideError:
    if isinstance(error, redis.AuthenticationError):
        return OutsideError(
            f"Redis does not accept our name or password, it says: {text} (check"
            " DOLL_REDIS_USERNAME and DOLL_REDIS_PASSWORD, or the URL in DOLL_REDIS)"
        )
    if isinstance(error, redis.exceptions.NoPermissionError):
        return OutsideError(f"Redis does not let us do {doing or 'this'}: {text} ({_RIGHTS})")
    advice = next((found for found in map(_tls_advice, _causes(error)) if found), "")
    if advice:
        return OutsideError(f"no safe connection to Redis: {text} ({advice})")
    if isinstance(error, AWAY):
        return UnavailableError(f"Redis is away: {text}")
    return OutsideError(f"this is no Redis that we understand: {text}")


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
        with _told("DOLL_REDIS_CA"):
            ssl.create_default_context(cafile=access.ca)
    if access.cert:
        with _told("DOLL_REDIS_CERT or DOLL_REDIS_KEY"):
            # An empty password: without any, a key that needs one would ask at the terminal.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_cert_chain(access.cert, access.key, password="")


@contextmanager
def _told(variable: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise UserError(
            f"{variable}: the file holds no certificate, or no key that fits it without a password"
        ) from error
    except OSError as error:
        raise UserError(f"{variable}: the file cannot be read: {error.strerror}") from error
