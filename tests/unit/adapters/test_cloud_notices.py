"""Notices of Compute Engine and Azure, and the choice of the cloud by the machine's firmware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import pytest

from common.config.settings import Settings
from common.errors import OutsideError
from common.notices.metadata import InstanceMetadata, MetadataService
from common.notices.preemption import (
    AzureNotices,
    Ec2Notices,
    GceNotices,
    Notice,
    cloud_of,
    open_notices,
)
from tests.metadata_server import (
    AZURE_NAME,
    SCHEDULED,
    AzureServer,
    GceServer,
    MetadataServer,
    azure_event,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 120.0
AT_S = 1_800_000_000.0
NAMES = {
    "ec2": {"sys_vendor": "Amazon EC2\n", "bios_version": "1.0"},
    "ec2 on Xen": {"sys_vendor": "Xen", "bios_version": "4.11.amazon"},
    "gce": {"sys_vendor": "Google", "product_name": "Google Compute Engine\n"},
    "azure": {
        "sys_vendor": "Microsoft Corporation",
        "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n",
    },
    # Windows' own virtual machines have the same maker.
    "none: Hyper-V": {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-0"},
    "none: a laptop": {"sys_vendor": "LENOVO", "product_name": "20XW"},
    "none: no files": {},
}


@pytest.fixture
def azure() -> Iterator[AzureServer]:
    with AzureServer() as server:
        yield server


@pytest.fixture
def notices(azure: AzureServer) -> AzureNotices:
    return AzureNotices(MetadataService(azure.endpoint, PATIENCE_S), lambda: AT_S)


def firmware(folder: Path, machine: str) -> Path:
    for file, text in NAMES[machine].items():
        (folder / file).write_text(text)
    return folder


@pytest.mark.parametrize("machine", NAMES)
def test_cloud_is_that_of_the_firmware(tmp_path: Path, machine: str) -> None:
    assert cloud_of(firmware(tmp_path, machine)) == machine.split(maxsplit=1)[0].rstrip(":")


@pytest.mark.parametrize("machine", NAMES)
def test_auto_asks_the_cloud_of_the_firmware_alone(tmp_path: Path, machine: str) -> None:
    cloud = machine.split(maxsplit=1)[0].rstrip(":")
    servers = {"ec2": MetadataServer, "gce": GceServer, "azure": AzureServer}
    with servers.get(cloud, MetadataServer)() as server:
        given = Settings(metadata_endpoint=server.endpoint)
        found = open_notices(given, firmware(tmp_path, machine))
        assert (found is None) == (cloud == "none")
        if found is not None:
            assert found.look() is None
            server.interrupt(AT_S)
            assert found.look() is not None
        assert server.issued == (cloud == "ec2")


@pytest.mark.parametrize(
    ("cloud", "kind"),
    [("ec2", Ec2Notices), ("gce", GceNotices), ("azure", AzureNotices), ("none", type(None))],
)
def test_named_cloud_is_asked_whatever_the_firmware_says(cloud: str, kind: type) -> None:
    notices = cast("Literal['none', 'ec2', 'gce', 'azure']", cloud)
    assert isinstance(open_notices(Settings(notices=notices)), kind)


def test_cloud_of_another_name_refuses_or_gives_no_notice() -> None:
    with GceServer() as google, MetadataServer() as amazon, AzureServer() as azure:
        with pytest.raises(OutsideError):
            Ec2Notices(InstanceMetadata(google.endpoint, PATIENCE_S)).look()
        for other in (amazon, azure):
            with pytest.raises(OutsideError):
                GceNotices(MetadataService(other.endpoint, PATIENCE_S)).look()
        with pytest.raises(OutsideError):
            AzureNotices(MetadataService(google.endpoint, PATIENCE_S)).look()


def test_event_of_another_machine_or_kind_is_no_notice(
    azure: AzureServer, notices: AzureNotices
) -> None:
    azure.events(azure_event(AT_S, machines=("workers_2",)), azure_event(AT_S, "Reboot"))
    assert notices.look() is None
    azure.events(azure_event(AT_S, "Freeze"), azure_event(AT_S, machines=("a", "workers_3")))
    assert notices.look() == Notice(AT_S, "preempt")


def test_event_that_has_begun_ends_the_machine_now(
    azure: AzureServer, notices: AzureNotices
) -> None:
    azure.events(azure_event(None))
    assert notices.look() == Notice(AT_S, "preempt")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"Events": [{}]}',
        b'{"Events": [{"EventType": "Preempt", "Resources": "workers_3"}]}',
        b'{"Events": [{"EventType": "Preempt", "Resources": ["workers_3"], "NotBefore": "soon"}]}',
    ],
)
def test_invalid_events_are_skipped_and_logged(
    azure: AzureServer,
    notices: AzureNotices,
    body: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    azure.answer(SCHEDULED, body)
    assert notices.look() is None
    assert "no scheduled events" in caplog.text


def test_machine_without_a_name_is_refused(azure: AzureServer, notices: AzureNotices) -> None:
    azure.answer(AZURE_NAME, b"")
    with pytest.raises(OutsideError, match="must return the machine's name"):
        notices.look()
