"""Preemption notices of EC2 from the instance metadata service."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import msgspec

from common.errors import decoded
from common.notices.metadata import InstanceMetadata
from common.telemetry.logging import Rejections

if TYPE_CHECKING:
    from common.config.settings import Settings

_INTERRUPTION = "/latest/meta-data/spot/instance-action"

_Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class _InstanceAction(msgspec.Struct):
    action: str
    time: _Instant


_INSTANCE_ACTION = msgspec.json.Decoder(_InstanceAction)


class Notice(NamedTuple):
    """Notice that the provider will take this machine back.

    Attributes:
        at_s: Time of the preemption in seconds since 1970.
        detail: Action of the provider: `terminate`, `stop` or `hibernate`.
    """

    at_s: float
    detail: str


class PreemptionNotices(Protocol):
    """Source of preemption notices for this machine. For one thread at a time.

    Notices that do not parse are ignored; the first of each kind is logged.
    """

    def look(self) -> Notice | None:
        """Return the notice for this machine, or None. Later calls return the notice again.

        Raises:
            UnavailableError: If the source is unavailable or slow; call again later.
            OutsideError: If the source refuses the request.
        """


def open_notices(settings: Settings) -> PreemptionNotices | None:
    """Open the source that the settings name, if any. The first `look` sends the first request."""
    if settings.notices == "none":
        return None
    return Ec2Notices(InstanceMetadata(settings.metadata_endpoint))


class Ec2Notices:
    """Notices for the EC2 instance on which this process runs.

    Args:
        metadata: Metadata service of the instance.
    """

    def __init__(self, metadata: InstanceMetadata) -> None:
        self._metadata = metadata
        self._rejections = Rejections()

    def look(self) -> Notice | None:
        """Return the notice for this machine, or None.

        Raises:
            UnavailableError: If the service is unavailable or slow; call again later.
            OutsideError: If the service refuses the request.
        """
        body = self._metadata.get(_INTERRUPTION)
        return None if body is None else self._rejections.parse(_INTERRUPTION, _decoded, body)


def _decoded(body: bytes) -> Notice:
    answer = decoded(_INSTANCE_ACTION.decode, body, "no instance action")
    return Notice(answer.time.timestamp(), answer.action)
