"""Checks a URL of Redis, without a word of what is in it: it may hold a password."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_BEGINNING = re.compile(r"(redis|rediss|unix)://.+", re.DOTALL)
_DATABASE = re.compile(r"(/\d*)?", re.ASCII)


def check_redis_url(value: str) -> None:
    """Check that a URL is whole.

    A password with a slash in it ends the host's part too early: what is left may well be a URL,
    whose host and port, pieces of the password, would be told when nobody answers there.

    Raises:
        ValueError: If it is not; says what to do.
    """
    if not _BEGINNING.fullmatch(value):
        raise ValueError("must be redis://host:port/db, rediss://... or unix:///path")
    if not _is_whole(value):
        raise ValueError(
            "is no whole URL: in a password write / as %2F, ? as %3F, # as %23 and @ as %40, or"
            " put it into DOLL_REDIS_PASSWORD"
        )


def names_user(value: str) -> bool:
    """Whether a checked URL holds a user or a password."""
    return "@" in urlsplit(value).netloc


def _is_whole(value: str) -> bool:
    try:
        url = urlsplit(value)
        host, port = url.hostname, url.port
    except ValueError:
        return False
    if url.fragment or "@" in url.query:
        return False
    if url.scheme == "unix":
        return bool(url.path) and host is None and port is None
    return bool(host) and port != 0 and bool(_DATABASE.fullmatch(url.path))
