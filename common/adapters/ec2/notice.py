"""EC2's interruption notices (`common.ports.servers.Notices`), from instance metadata."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from common.errors import WireError
from common.ports.servers import Notice
from common.telemetry.rejections import Rejections

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.adapters.ec2.metadata import InstanceMetadata

T = TypeVar("T")

_INTERRUPTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

_Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class _InstanceAction(msgspec.Struct):
    action: str
    time: _Instant


class _Recommendation(msgspec.Struct):
    notice_time: _Instant = msgspec.field(name="noticeTime")


_INSTANCE_ACTION = msgspec.json.Decoder(_InstanceAction)
_RECOMMENDATION = msgspec.json.Decoder(_Recommendation)


class Ec2Notices:
    """The notices of the EC2 instance that this process runs on.

    Args:
        metadata: Tells them.
    """

    def __init__(self, metadata: InstanceMetadata) -> None:
        self._metadata = metadata
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
        body = self._metadata.get(path)
        return None if body is None else self._rejections.parse(path, decode, body)


def _interruption(body: bytes) -> Notice:
    answer = _decoded(_INSTANCE_ACTION, "instance action", body)
    return Notice("interruption", answer.time.timestamp(), answer.action)


def _rebalance(body: bytes) -> Notice:
    answer = _decoded(_RECOMMENDATION, "recommendation to rebalance", body)
    return Notice("rebalance", answer.notice_time.timestamp(), "")


def _decoded(decoder: msgspec.json.Decoder[T], what: str, body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no {what}: {error}") from error
