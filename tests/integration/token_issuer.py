"""A real issuer of OAuth tokens (mock-oauth2-server, on Java), for tests."""

from __future__ import annotations

import json
import os
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError

from common.embedded.apache_kafka import resolve
from common.embedded.process import Child, free_port
from common.errors import UserError
from tests.servers import lacking

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def token_issuer(
    folder: Path, claims: Mapping[str, object], life_s: int, port: int = 0, key: str = ""
) -> Iterator[str]:
    """Run an issuer. Yields its URL.

    Args:
        folder: Folder for its log.
        claims: Claims of every token.
        life_s: Lifetime of a token.
        port: Its port. 0: any free port.
        key: Private RSA key as a JWK, with which it signs. Empty: the built-in key.
    """
    try:
        jars = resolve(folder=Path(__file__).parent / "oauth")
    except UserError as error:
        lacking(str(error))
    port = port or free_port()
    url = f"http://127.0.0.1:{port}/default"
    mapping = {"requestParam": "grant_type", "match": "*", "claims": claims}
    tokens = {"issuerId": "default", "tokenExpiry": life_s, "requestMappings": [mapping]}
    main = "no.nav.security.mock.oauth2.StandaloneMockOAuth2ServerKt"
    keys = {"tokenProvider": {"keyProvider": {"initialKeys": key, "algorithm": "RS256"}}}
    config = json.dumps({"tokenCallbacks": [tokens]} | (keys if key else {}))
    environ = {**os.environ, "SERVER_PORT": str(port), "JSON_CONFIG": config}
    child = Child(["java", "-Xmx256m", "-cp", f"{jars}/*", main], folder / "log", environ)
    try:
        child.await_ready(lambda: answers(f"{url}/jwks"), 60.0)
        yield url
    finally:
        child.kill()


def answers(url: str) -> bool:
    """Return True if a server answers."""
    try:
        with urllib.request.urlopen(url, timeout=1.0) as answer:  # noqa: S310 -- our own http
            return bool(answer.read())
    except (OSError, URLError):
        return False
