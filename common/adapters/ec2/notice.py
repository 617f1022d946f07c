"""EC2's interruption notices (`common.ports.servers.Notices`): instance metadata, version 2.

Requests go to the machine's own link-local address, never by a proxy: `http.client` knows of none.
"""

from __future__ import annotations

import re
import time
from datetime import datetime
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec

from common.errors import OutsideError, UnavailableError, WireError
from common.ports.servers import Notice
from common.telemetry.rejections import Rejections

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TOKEN = "/latest/api/token"  # noqa: S105 -- the path to ask at
_TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 -- a header's name
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_INTERRUPTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN_TTL_S = 21_600  # six hours, the longest that EC2 gives
_RENEW_S = 60.0  # so long before it runs out: many looks, so that one that fails does no harm
_TIMEOUT_S = 1.0  # the service answers in milliseconds, or the machine has none
_LONGEST = 4096  # bytes that are read of an answer; a notice has under a hundred
_TOKEN_SHAPE = re.compile(rb"[\x21-\x7e]+")  # what may stand in a header without becoming two

_Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class _InstanceAction(msgspec.Struct):
    action: str
    time: _Instant


class _Recommendation(msgspec.Struct):
    notice_time: _Instant = msgspec.field(name="noticeTime")


class Ec2Notices:
    """The notices of the EC2 instance that this process runs on.

    Args:
        endpoint: `http://host` or `http://host:port` of the metadata service.
        timeout_s: After so long without an answer it counts as away.
        clock: Tells how old the token is.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = _TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._authority = urlsplit(endpoint).netloc
        self._timeout_s = timeout_s
        self._clock = clock
        self._token = ""
        self._renew_at = 0.0
        self._rejections = Rejections()

    @property
    def rejected(self) -> int:
        """Notices read so far that did not parse."""
        return self._rejections.count

    def look(self) -> Notice | None:
        """The most urgent notice that stands: an interruption before a rebalance; None for none.

        Raises:
            UnavailableError: If the service is away or slow; look again.
            OutsideError: If it refuses, or is no metadata service at all.
        """
        return self._find(_INTERRUPTION, _interruption) or self._find(_REBALANCE, _rebalance)

    def _find(self, path: str, decode: Callable[[bytes], Notice]) -> Notice | None:
        body = self._get(path)
        return None if body is None else self._rejections.parse(path, decode, body)

    def _get(self, path: str) -> bytes | None:
        """What stands at a path; None where nothing does."""
        status, body = self._ask("GET", path, {_TOKEN_HEADER: self._valid_token()})
        if status == HTTPStatus.UNAUTHORIZED:  # it ran out while our clock stood still: hibernation
            self._token = ""
            status, body = self._ask("GET", path, {_TOKEN_HEADER: self._valid_token()})
        return None if status == HTTPStatus.NOT_FOUND else self._granted(path, status, body)

    def _valid_token(self) -> str:
        asked_at = self._clock()
        if not self._token or asked_at >= self._renew_at:
            token = self._granted(_TOKEN, *self._ask("PUT", _TOKEN, {_TTL_HEADER: _TOKEN_TTL_S}))
            if not _TOKEN_SHAPE.fullmatch(token):
                raise OutsideError(f"{self._authority}{_TOKEN} gave no token but {token[:40]!r}")
            self._token = token.decode()
            self._renew_at = asked_at + _TOKEN_TTL_S - _RENEW_S
        return self._token

    def _granted(self, path: str, status: int, body: bytes) -> bytes:
        if status == HTTPStatus.OK:
            return body
        passing = status == HTTPStatus.TOO_MANY_REQUESTS or status // 100 == 5
        kind = UnavailableError if passing else OutsideError
        raise kind(f"{self._authority}{path} answered with status {status}")

    def _ask(self, method: str, path: str, headers: Mapping[str, str | int]) -> tuple[int, bytes]:
        connection = HTTPConnection(self._authority, timeout=self._timeout_s)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(_LONGEST)
        except OSError as error:
            reason = f"no answer from the metadata service at {self._authority}: {error}"
            raise UnavailableError(reason) from error
        except HTTPException as error:
            reason = f"{self._authority} is no metadata service: {type(error).__name__}"
            raise OutsideError(reason) from error
        finally:
            connection.close()


def _interruption(body: bytes) -> Notice:
    try:
        answer = msgspec.json.decode(body, type=_InstanceAction)
    except msgspec.DecodeError as error:
        raise WireError(f"no instance action: {error}") from error
    return Notice("interruption", answer.time.timestamp(), answer.action)


def _rebalance(body: bytes) -> Notice:
    try:
        answer = msgspec.json.decode(body, type=_Recommendation)
    except msgspec.DecodeError as error:
        raise WireError(f"no recommendation to rebalance: {error}") from error
    return Notice("rebalance", answer.notice_time.timestamp(), "")
