"""Clients of a cloud's metadata service, and of EC2's instance metadata service, version 2."""

from __future__ import annotations

import re
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from common.errors import OutsideError, UnavailableError
from common.http.client import BoundedClient

if TYPE_CHECKING:
    from collections.abc import Callable

_TOKEN = "/latest/api/token"  # noqa: S105 -- a path
_TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 -- the name of a header
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_ZONE_ID = "/latest/meta-data/placement/availability-zone-id"
# Six hours, the longest lifetime that EC2 grants.
_TOKEN_TTL_S = 21_600
# Time before the expiry at which the token is renewed. It leaves time for several attempts.
_RENEW_S = 60.0
# The service answers within milliseconds, or the machine does not have it.
_TIMEOUT_S = 1.0
# Characters that cannot split a header into two.
_TOKEN_SHAPE = re.compile(rb"[\x21-\x7e]+")
_ZONE_SHAPE = re.compile(rb"[a-z0-9-]+")


class MetadataService:
    """Metadata service of the machine on which this process runs.

    Args:
        endpoint: URL of the service: `http://host` or `http://host:port`.
        timeout_s: Time without an answer after which the service counts as unavailable.
    """

    def __init__(self, endpoint: str, timeout_s: float = _TIMEOUT_S) -> None:
        self.endpoint = endpoint.rstrip("/")
        # Requests go to a link-local address, never through a proxy that the environment names.
        name = f"the metadata service at {self.endpoint}"
        self._http = BoundedClient(name, timeout_s, trust_env=False)

    def get(self, path: str, header: tuple[str, str]) -> bytes | None:
        """Return the value at a path, or None.

        Raises:
            UnavailableError: If the service is unavailable or slow; call again later.
            OutsideError: If the service refuses the request.
        """
        return self.found(path, *self.ask("GET", path, header))

    def ask(self, method: str, path: str, header: tuple[str, str]) -> tuple[int, bytes]:
        """Return status and body of the answer to a request.

        Raises:
            UnavailableError: If the service is unavailable or slow; call again later.
        """
        return self._http.ask(method, self.endpoint + path, headers=[header])

    def found(self, path: str, status: int, body: bytes) -> bytes | None:
        """Return the body of an answer; None if nothing is at the path.

        Raises:
            UnavailableError: If the service is busy or failing; call again later.
            OutsideError: If the service refuses the request.
        """
        return None if status == HTTPStatus.NOT_FOUND else self.granted(path, status, body)

    def granted(self, path: str, status: int, body: bytes) -> bytes:
        """Return the body of an answer with status 200.

        Raises:
            UnavailableError: If the service is busy or failing; call again later.
            OutsideError: If the service refuses the request.
        """
        if status == HTTPStatus.OK:
            return body
        passing = status == HTTPStatus.TOO_MANY_REQUESTS or status // 100 == 5
        kind = UnavailableError if passing else OutsideError
        raise kind(f"{self.endpoint}{path} answered with status {status}")


class InstanceMetadata:
    """Metadata of the EC2 instance on which this process runs.

    Args:
        endpoint: URL of the service: `http://host` or `http://host:port`.
        timeout_s: Time without an answer after which the service counts as unavailable.
        clock: Monotonic clock that measures the token's age.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = _TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = MetadataService(endpoint, timeout_s)
        self._clock = clock
        self._token = ""
        self._renew_at = 0.0

    def zone_id(self) -> str:
        """Return the id of the machine's availability zone, equal for all accounts: `use1-az1`.

        Raises:
            UnavailableError: If the service is unavailable or slow.
            OutsideError: If the service refuses the request or returns no zone.
        """
        body = self.get(_ZONE_ID) or b""
        if not _ZONE_SHAPE.fullmatch(body):
            endpoint = self._service.endpoint
            raise OutsideError(f"{endpoint}{_ZONE_ID} must return a zone, got {body[:40]!r}")
        return body.decode()

    def get(self, path: str) -> bytes | None:
        """Return the value at a path, or None.

        Raises:
            UnavailableError: If the service is unavailable or slow; call again later.
            OutsideError: If the service refuses the request.
        """
        ask, found = self._service.ask, self._service.found
        status, body = ask("GET", path, (_TOKEN_HEADER, self._valid_token()))
        # The token can expire during a hibernation, because our clock stands still.
        if status == HTTPStatus.UNAUTHORIZED:
            self._token = ""
            status, body = ask("GET", path, (_TOKEN_HEADER, self._valid_token()))
        return found(path, status, body)

    def _valid_token(self) -> str:
        asked_at = self._clock()
        if not self._token or asked_at >= self._renew_at:
            status, token = self._service.ask("PUT", _TOKEN, (_TTL_HEADER, str(_TOKEN_TTL_S)))
            self._service.granted(_TOKEN, status, token)
            if not _TOKEN_SHAPE.fullmatch(token):
                endpoint = self._service.endpoint
                raise OutsideError(f"{endpoint}{_TOKEN} must return a token, got {token[:40]!r}")
            self._token = token.decode()
            self._renew_at = asked_at + _TOKEN_TTL_S - _RENEW_S
        return self._token
