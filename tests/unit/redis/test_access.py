"""Meaning of Redis errors, and no password in their text."""

from __future__ import annotations

import ssl
import traceback

import pytest
import redis

from common.errors import OutsideError, UnavailableError, UserError
from common.redis.access import RedisAccess, client_of, fault

PASSWORD = "its-pass-word"  # noqa: S105 -- of no server
URL = "redis://127.0.0.1:6379/0"


def all_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("url", "access"),
    [
        ("redis://doll@127.0.0.1:6379/0", RedisAccess(PASSWORD)),
        (f"redis://doll:{PASSWORD}@127.0.0.1:6379/0", RedisAccess()),
    ],
)
def test_password_repeated_by_the_server_is_not_shown(url: str, access: RedisAccess) -> None:
    client = client_of(url, access)
    said = f"unknown command 'AUTH', with args beginning with: 'doll' '{PASSWORD}'"
    try:
        try:
            raise redis.ResponseError(said)
        except redis.RedisError as error:
            raise fault(client, error)  # noqa: B904 -- it knows what it came from
    except OutsideError as ours:
        assert "'doll' '***'" in str(ours)  # noqa: PT017 -- a traceback is what this is about
        assert PASSWORD not in all_text(ours)  # noqa: PT017 -- as above
        assert PASSWORD not in repr(client)
        assert PASSWORD not in repr(access)


def test_fault_keeps_its_cause() -> None:
    error = redis.ConnectionError("refused")
    assert fault(client_of(URL, RedisAccess()), error).__cause__ is error


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("CERTIFICATE_VERIFY_FAILED", "set DOLL_REDIS_CA to"),
        ("WRONG_VERSION_NUMBER", "redis:// instead of rediss://"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "DOLL_REDIS_CERT and DOLL_REDIS_KEY"),
    ],
)
def test_tls_failure_is_not_retriable(reason: str, advice: str) -> None:
    cause = ssl.SSLError(1, "trouble")
    cause.reason = reason
    error = redis.ConnectionError("Error 1 connecting")
    error.__context__ = cause
    ours = fault(client_of(URL, RedisAccess()), error)
    assert advice in str(ours)
    assert not ours.retriable


def test_broken_connection_is_unavailable() -> None:
    cause = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    error = redis.ConnectionError("Error 8")
    error.__context__ = cause
    assert isinstance(fault(client_of(URL, RedisAccess()), error), UnavailableError)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://127.0.0.1/0?{PASSWORD}=1",
        f"redis://127.0.0.1/0?socket_timeout={PASSWORD}",
        f"redis://u:{PASSWORD}@127.0.0.1:port",
        f"redis://:{PASSWORD}/x@127.0.0.1",
    ],
)
def test_invalid_redis_url_is_not_shown(url: str) -> None:
    with pytest.raises(UserError, match="DOLL_REDIS: the URL has a part") as raised:
        client_of(url, RedisAccess())
    assert PASSWORD not in all_text(raised.value)


def test_certificates_require_a_tls_url() -> None:
    ca = ssl.get_default_verify_paths().cafile
    assert ca
    with pytest.raises(UserError, match="DOLL_REDIS: the URL has a part or an option"):
        client_of(URL, RedisAccess(ca=ca))
