"""The contract of notices, in memory and against the metadata services of three clouds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from common.errors import UnavailableError
from common.notices.metadata import InstanceMetadata, MetadataService
from common.notices.preemption import AzureNotices, Ec2Notices, GceNotices, Notice
from tests.fakes.notices import MemoryNotices
from tests.metadata_server import AzureServer, GceServer, MetadataServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.notices.preemption import PreemptionNotices

# Time limit for each answer.
PATIENCE_S = 20.0
AT_S = 1_800_000_000.0


@dataclass
class Machine:
    """A source of notices, and the worker's view of it."""

    provider: MemoryNotices | MetadataServer
    notices: PreemptionNotices
    # Detail of a notice to terminate.
    detail: str = "terminate"


@pytest.fixture(params=["memory", "ec2", "gce", "azure"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    if request.param == "memory":
        memory = MemoryNotices()
        yield Machine(memory, memory)
        return
    if request.param == "ec2":
        with MetadataServer() as server:
            yield Machine(server, Ec2Notices(InstanceMetadata(server.endpoint, PATIENCE_S)))
    elif request.param == "gce":
        with GceServer() as google:
            metadata = MetadataService(google.endpoint, PATIENCE_S)
            # Machines end 30 s after the notice.
            yield Machine(google, GceNotices(metadata, lambda: AT_S - 30.0), "preempt")
    else:
        with AzureServer() as azure:
            metadata = MetadataService(azure.endpoint, PATIENCE_S)
            yield Machine(azure, AzureNotices(metadata), "preempt")


def test_new_machine_has_no_notice(machine: Machine) -> None:
    assert machine.notices.look() is None


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_interruption_notice_has_time_and_action(machine: Machine, action: str) -> None:
    machine.provider.interrupt(AT_S, action)
    detail = action if machine.detail == "terminate" else machine.detail
    assert machine.notices.look() == Notice(AT_S, detail)


def test_notice_remains_until_the_end(machine: Machine) -> None:
    machine.provider.interrupt(AT_S)
    assert [machine.notices.look() for _ in range(3)] == [Notice(AT_S, machine.detail)] * 3


def test_unreachable_notice_source_raises_until_it_recovers(machine: Machine) -> None:
    machine.provider.interrupt(AT_S)
    machine.provider.go_away()
    for _ in range(2):
        with pytest.raises(UnavailableError):
            machine.notices.look()
    machine.provider.come_back()
    assert machine.notices.look() == Notice(AT_S, machine.detail)


def test_invalid_answer_is_ignored_until_a_notice_arrives(machine: Machine) -> None:
    machine.provider.talk_nonsense()
    assert machine.notices.look() is None
    machine.provider.interrupt(AT_S)
    assert machine.notices.look() == Notice(AT_S, machine.detail)
