"""EC2's instance metadata service, version 2: what a machine can ask about itself."""

from __future__ import annotations

import re
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from common.errors import OutsideError, UnavailableError
from common.http.client import BoundedClient

if TYPE_CHECKING:
    from collections.abc import Callable

_TOKEN = "/latest/api/token"  # noqa: S105 -- the path to ask at
_TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 -- a header's name
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_ZONE_ID = "/latest/meta-data/placement/availability-zone-id"
_TOKEN_TTL_S = 21_600  # six hours, the longest that EC2 gives
_RENEW_S = 60.0  # so long before it runs out: many looks, so that one that fails does no harm
_TIMEOUT_S = 1.0  # the service answers in milliseconds, or the machine has none
_TOKEN_SHAPE = re.compile(rb"[\x21-\x7e]+")  # what may stand in a header without becoming two
_ZONE_SHAPE = re.compile(rb"[a-z0-9-]+")


class InstanceMetadata:
    """What the metadata service tells of the EC2 instance that this process runs on.

    Args:
        endpoint: `http://host` or `http://host:port` of the service.
        timeout_s: After so long without an answer it counts as away.
        clock: Tells how old the token is.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = _TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint.rstrip("/")
        # Requests go to the machine's own link-local address, never by a proxy of the environment.
        name = f"the metadata service at {self._endpoint}"
        self._http = BoundedClient(name, timeout_s, trust_env=False)
        self._clock = clock
        self._token = ""
        self._renew_at = 0.0

    def zone_id(self) -> str:
        """The id of the machine's availability zone, the same for all accounts: `use1-az1`.

        Raises:
            UnavailableError: If the service is away or slow.
            OutsideError: If it refuses, or tells no zone.
        """
        body = self.get(_ZONE_ID) or b""
        if not _ZONE_SHAPE.fullmatch(body):
            raise OutsideError(f"{self._endpoint}{_ZONE_ID} told no zone but {body[:40]!r}")
        return body.decode()

    def get(self, path: str) -> bytes | None:
        """What stands at a path; None where nothing does.

        Raises:
            UnavailableError: If the service is away or slow; ask again.
            OutsideError: If it refuses.
        """
        status, body = self._ask("GET", path, (_TOKEN_HEADER, self._valid_token()))
        if status == HTTPStatus.UNAUTHORIZED:  # it ran out while our clock stood still: hibernation
            self._token = ""
            status, body = self._ask("GET", path, (_TOKEN_HEADER, self._valid_token()))
        return None if status == HTTPStatus.NOT_FOUND else self._granted(path, status, body)

    def _valid_token(self) -> str:
        asked_at = self._clock()
        if not self._token or asked_at >= self._renew_at:
            status, token = self._ask("PUT", _TOKEN, (_TTL_HEADER, str(_TOKEN_TTL_S)))
            self._granted(_TOKEN, status, token)
            if not _TOKEN_SHAPE.fullmatch(token):
                raise OutsideError(f"{self._endpoint}{_TOKEN} gave no token but {token[:40]!r}")
            self._token = token.decode()
            self._renew_at = asked_at + _TOKEN_TTL_S - _RENEW_S
        return self._token

    def _granted(self, path: str, status: int, body: bytes) -> bytes:
        if status == HTTPStatus.OK:
            return body
        passing = status == HTTPStatus.TOO_MANY_REQUESTS or status // 100 == 5
        kind = UnavailableError if passing else OutsideError
        raise kind(f"{self._endpoint}{path} answered with status {status}")

    def _ask(self, method: str, path: str, header: tuple[str, str]) -> tuple[int, bytes]:
        return self._http.ask(method, self._endpoint + path, headers=[header])
