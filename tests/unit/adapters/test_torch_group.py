"""Addresses that other machines cannot use are refused, and leaving waits for no connection."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.collectives.port import Peer
from common.collectives.torch_group import GlooGroup, TorchGroups, advertised
from common.config.settings import Settings
from common.errors import GroupError, UnavailableError, UserError
from common.redis.memory import MemoryBoards, MemoryRedis

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_S = 60.0
NEAR, FAR = Peer("near", "127.0.0.1:4000"), Peer("far", "10.0.0.3:4000")


@pytest.fixture
def groups() -> Iterator[TorchGroups]:
    groups = TorchGroups("127.0.0.1", MemoryBoards(MemoryRedis()).rendezvous("job"))
    yield groups
    groups.close()


@pytest.mark.parametrize(("rank", "named"), [(0, []), (1, ["near"])])
def test_loopback_address_among_others_is_refused_with_advice(
    groups: TorchGroups, rank: int, named: list[str]
) -> None:
    with pytest.raises(GroupError) as caught:
        groups.group("view-1", [NEAR, FAR], rank).form()

    reported = "no address that others can reach is advertised by near (127.0.0.1:4000)"
    assert reported in str(caught.value)
    assert sorted(caught.value.unreachable) == named


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "here:4000", "127.0.0.1:here", "10.0.0.3:70000"]
)
def test_invalid_address_is_refused_with_its_member(groups: TorchGroups, address: str) -> None:
    members = [Peer("whole", groups.address), Peer("odd", address)]

    with pytest.raises(
        GroupError, match="no address that others can reach is advertised by odd"
    ) as caught:
        groups.group("view-1", members, 0).form()

    assert caught.value.unreachable == {"odd"}


def test_advertised_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"must be an address of this machine, got 192\.0\.2\.1"):
        TorchGroups("192.0.2.1", MemoryBoards(MemoryRedis()).rendezvous("job"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_gpu_is_refused_with_advice() -> None:
    rendezvous = MemoryBoards(MemoryRedis()).rendezvous("job")

    with pytest.raises(UserError, match=r"nccl needs GPUs.* use gloo, or run workers"):
        TorchGroups("127.0.0.1", rendezvous, "nccl")


def test_closed_member_is_unreachable(groups: TorchGroups) -> None:
    other = TorchGroups("127.0.0.1", MemoryBoards(MemoryRedis()).rendezvous("job"))
    members = [Peer("a", groups.address), Peer("b", other.address)]
    other.close()

    with pytest.raises(GroupError) as caught:
        groups.group("view-1", members, 0).form()

    assert caught.value.unreachable == {"b"}
    assert "b did not connect; cannot reach b at 127.0.0.1:" in str(caught.value)


class SlowToClose(GlooGroup):
    """A group whose connections are closed when a test allows it."""

    may_close = threading.Event()

    @staticmethod
    def _close(group: Any) -> None:  # noqa: ANN401 -- torch has no stubs of it
        SlowToClose.may_close.wait(LONG_S)
        GlooGroup._close(group)  # noqa: SLF001 -- as its own


def test_leaving_a_group_does_not_wait_for_closing_connections() -> None:
    # Each group takes gloo 10 ms. Meanwhile a member must report that it left, and form the next
    # group.
    rendezvous = MemoryBoards(MemoryRedis()).rendezvous("job")
    both = [TorchGroups("127.0.0.1", rendezvous) for _ in range(2)]
    members = [Peer(name, groups.address) for name, groups in zip("ab", both, strict=True)]
    a, b = [SlowToClose("127.0.0.1", rendezvous, "view-1", members, n, LONG_S) for n in range(2)]
    forming = threading.Thread(target=a.form)
    forming.start()
    b.form()
    forming.join(LONG_S)

    leaving = threading.Thread(target=a.abort)
    leaving.start()
    leaving.join(LONG_S / 2)

    assert not leaving.is_alive()
    SlowToClose.may_close.set()
    with pytest.raises(GroupError):
        b.all_reduce(torch.zeros(1))
    for groups in both:
        groups.close()


@pytest.mark.parametrize(
    ("redis", "advertise", "found"),
    [
        ("unix:///run/redis.sock", "", "127.0.0.1"),
        ("redis://localhost:6379/0", "", "127.0.0.1"),
        ("redis://127.0.0.2", "", "127.0.0.1"),
        ("redis://127.0.0.1", "192.0.2.7", "192.0.2.7"),
        ("redis://127.0.0.1", "localhost", "127.0.0.1"),
    ],
)
def test_advertised_address_defaults_to_the_one_that_reaches_redis(
    redis: str, advertise: str, found: str
) -> None:
    assert advertised(Settings(redis=redis, advertise=advertise)) == found


def test_advertised_loopback_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The machine's name resolves to loopback there, and Redis is elsewhere.
    class Elsewhere(socket.socket):
        def connect(self, address: object) -> None:
            del address

        def getsockname(self) -> tuple[str, int]:
            return "192.0.2.7", 1

    monkeypatch.setattr(socket, "socket", Elsewhere)

    with pytest.raises(UserError, match=r"such as 192.0.2.7, got localhost"):
        advertised(Settings(redis="redis://192.0.2.1", advertise="localhost"))


def test_unknown_advertised_name_raises_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        UnavailableError, match=r"DOLL_ADVERTISE: nobody.invalid cannot be resolved"
    ):
        advertised(Settings(redis="unix:///run/redis.sock", advertise="nobody.invalid"))


@pytest.mark.parametrize("value", ["http://here", "name@host", "a b"])
def test_advertised_address_rejects_ports_and_urls(value: str) -> None:
    with pytest.raises(ValueError, match="must be a host's name or address, without a port"):
        Settings(advertise=value)


def test_groups_are_reached_at_the_advertised_address() -> None:
    rendezvous = MemoryBoards(MemoryRedis()).rendezvous("digits")
    groups = TorchGroups(advertised(Settings(advertise="127.0.0.3")), rendezvous)

    assert groups.address.startswith("127.0.0.3:")
    groups.close()
