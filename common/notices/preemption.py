"""Preemption notices of EC2, Compute Engine and Azure from the machine's metadata service."""

from __future__ import annotations

import os
import time
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Protocol

import msgspec

from common.errors import OutsideError, WireError, decoded
from common.notices.metadata import InstanceMetadata, MetadataService
from common.telemetry.logging import Rejections

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.config.settings import Settings

_INTERRUPTION = "/latest/meta-data/spot/instance-action"
# https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_GOOGLE = ("Metadata-Flavor", "Google")
# Time from the notice of Compute Engine to the end of the machine.
_GCE_NOTICE_S = 30.0
# https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
_SCHEDULED = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AZURE = ("Metadata", "true")
# Files in which the firmware names the machine's maker, as cloud-init reads them. They need no
# network, so that nothing is asked where there is no metadata service.
_FIRMWARE = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"

_Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class _InstanceAction(msgspec.Struct):
    action: str
    time: _Instant


class _ScheduledEvent(msgspec.Struct):
    kind: str = msgspec.field(name="EventType")
    resources: tuple[str, ...] = msgspec.field(name="Resources")
    # RFC 1123; empty if the event has begun.
    not_before: str = msgspec.field(name="NotBefore", default="")


class _ScheduledEvents(msgspec.Struct):
    events: tuple[_ScheduledEvent, ...] = msgspec.field(name="Events", default=())


_INSTANCE_ACTION = msgspec.json.Decoder(_InstanceAction)
_SCHEDULED_EVENTS = msgspec.json.Decoder(_ScheduledEvents)


class Notice(NamedTuple):
    """Notice that the provider will take this machine back.

    Attributes:
        at_s: Time of the preemption in seconds since 1970.
        detail: Action of the provider: `terminate`, `stop` or `hibernate` on EC2, otherwise
            `preempt`.
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


def open_notices(settings: Settings, firmware: Path = _FIRMWARE) -> PreemptionNotices | None:
    """Open the source that the settings name, if any. The first `look` sends the first request.

    Args:
        settings: Settings of the process.
        firmware: See `cloud_of`.
    """
    endpoint = settings.metadata_endpoint
    match cloud_of(firmware) if settings.notices == "auto" else settings.notices:
        case "ec2":
            return Ec2Notices(InstanceMetadata(endpoint))
        case "gce":
            return GceNotices(MetadataService(endpoint))
        case "azure":
            return AzureNotices(MetadataService(endpoint))
        case _:
            return None


def cloud_of(firmware: Path) -> Literal["none", "ec2", "gce", "azure"]:
    """Return the cloud in which this machine runs, by the names in its firmware.

    Args:
        firmware: Folder with a file for each name, which may be missing.
    """
    files = ("sys_vendor", "bios_version", "product_name", "chassis_asset_tag")
    vendor, bios, product, tag = (
        path.read_text("utf-8", "replace").strip() if os.access(path, os.R_OK) else ""
        for path in (firmware / file for file in files)
    )
    # Older instances run on Xen, and only their BIOS names Amazon.
    if vendor == "Amazon EC2" or bios.endswith(".amazon"):
        return "ec2"
    if product == "Google Compute Engine":
        return "gce"
    return "azure" if tag == _AZURE_TAG else "none"


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


class GceNotices:
    """Notices for the machine of Compute Engine on which this process runs.

    Args:
        metadata: Metadata service of the machine.
        clock: Returns the time in seconds since 1970.
    """

    def __init__(self, metadata: MetadataService, clock: Callable[[], float] = time.time) -> None:
        self._metadata, self._clock = metadata, clock

    def look(self) -> Notice | None:
        """Return the notice for this machine, or None.

        Raises:
            UnavailableError: If the service is unavailable or slow; call again later.
            OutsideError: If the service refuses the request.
        """
        given = self._metadata.get(_PREEMPTED, _GOOGLE) == b"TRUE"
        # The service reports no time.
        return Notice(self._clock() + _GCE_NOTICE_S, "preempt") if given else None


class AzureNotices:
    """Notices for the virtual machine of Azure on which this process runs.

    Args:
        metadata: Metadata service of the machine.
        clock: Returns the time in seconds since 1970.
    """

    def __init__(self, metadata: MetadataService, clock: Callable[[], float] = time.time) -> None:
        self._metadata, self._clock = metadata, clock
        self._rejections = Rejections()
        self._name = ""

    def look(self) -> Notice | None:
        """Return the notice for this machine, or None.

        Events of a scale set's other machines are skipped.

        Raises:
            UnavailableError: If the service is unavailable or slow; call again later. The first
                request enables the events, which takes up to two minutes.
            OutsideError: If the service refuses the request, or does not name the machine.
        """
        if not self._name:
            self._name = (self._metadata.get(_NAME, _AZURE) or b"").decode("utf-8", "replace")
        if not self._name:
            raise OutsideError(f"{self._metadata.endpoint}{_NAME} must return the machine's name")
        body = self._metadata.get(_SCHEDULED, _AZURE)
        return None if body is None else self._rejections.parse(_SCHEDULED, self._parsed, body)

    def _parsed(self, body: bytes) -> Notice | None:
        for event in decoded(_SCHEDULED_EVENTS.decode, body, "no scheduled events").events:
            if event.kind == "Preempt" and self._name in event.resources:
                at = event.not_before
                try:
                    at_s = parsedate_to_datetime(at).timestamp() if at else self._clock()
                except ValueError as error:
                    raise WireError(f"no scheduled events: NotBefore is {at[:40]!r}") from error
                return Notice(at_s, "preempt")
        return None
