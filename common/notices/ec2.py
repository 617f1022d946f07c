"""How a preemptible machine learns that its end is near: EC2's notices, from instance metadata."""

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
    """Whoever lends this machine says that it will be taken back."""

    at_s: float  # since 1970: when the machine goes
    detail: str  # what becomes of the machine: terminate, stop, hibernate


class PreemptionNotices(Protocol):
    """Where a preemptible machine hears that its end is near. For one thread at a time.

    What does not parse is left out, and the first of its kind is logged.
    """

    def look(self) -> Notice | None:
        """The notice that stands, None for none.

        A notice stands from when it is given on: whoever looks again finds it again.

        Raises:
            UnavailableError: If the source is away or slow; look again.
            OutsideError: If it refuses.
        """


def open_notices(settings: Settings) -> PreemptionNotices | None:
    """Open where this machine hears of its end, or None; it is not asked before the first look."""
    if settings.notices == "none":
        return None
    return Ec2Notices(InstanceMetadata(settings.metadata_endpoint))


class Ec2Notices:
    """The notices of the EC2 instance that this process runs on.

    Args:
        metadata: Tells them.
    """

    def __init__(self, metadata: InstanceMetadata) -> None:
        self._metadata = metadata
        self._rejections = Rejections()

    def look(self) -> Notice | None:
        """The notice that stands, None for none.

        Raises:
            UnavailableError: If the service is away or slow; look again.
            OutsideError: If it refuses.
        """
        body = self._metadata.get(_INTERRUPTION)
        return None if body is None else self._rejections.parse(_INTERRUPTION, _decoded, body)


def _decoded(body: bytes) -> Notice:
    answer = decoded(_INSTANCE_ACTION.decode, body, "no instance action")
    return Notice(answer.time.timestamp(), answer.action)
