"""Addresses that nobody else could use are refused; who leaves a group waits for no connection."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from common.collectives.port import Peer
from common.collectives.torch_group import GlooGroup, TorchGroups
from common.config.settings import Settings
from common.errors import GroupError, UserError
from common.redis.memory import MemoryBoards, MemoryRedis
from common.runtime.connect import open_groups

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
def test_a_loopback_address_among_others_is_refused_in_words(
    groups: TorchGroups, rank: int, named: list[str]
) -> None:
    with pytest.raises(GroupError) as caught:
        groups.group("view-1", [NEAR, FAR], rank).form()

    reported = "no address for others is told by near (127.0.0.1:4000): set DOLL_ADVERTISE where"
    assert reported in str(caught.value)
    assert sorted(caught.value.unreachable) == named


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "here:4000", "127.0.0.1:here", "10.0.0.3:70000"]
)
def test_what_is_no_address_is_refused_in_words(groups: TorchGroups, address: str) -> None:
    members = [Peer("whole", groups.address), Peer("odd", address)]

    with pytest.raises(GroupError, match="no address for others is told by odd") as caught:
        groups.group("view-1", members, 0).form()

    assert caught.value.unreachable == {"odd"}


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"DOLL_ADVERTISE: 192.0.2.1 is no address of this machine"):
        TorchGroups("192.0.2.1", MemoryBoards(MemoryRedis()).rendezvous("job"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_one_in_words() -> None:
    rendezvous = MemoryBoards(MemoryRedis()).rendezvous("job")

    with pytest.raises(UserError, match=r"nccl adds up in .* take gloo, or run workers"):
        open_groups(Settings(advertise="127.0.0.1"), rendezvous, "nccl")


def test_whoever_is_closed_is_reached_no_more(groups: TorchGroups) -> None:
    other = TorchGroups("127.0.0.1", MemoryBoards(MemoryRedis()).rendezvous("job"))
    members = [Peer("a", groups.address), Peer("b", other.address)]
    other.close()

    with pytest.raises(GroupError) as caught:
        groups.group("view-1", members, 0).form()

    assert caught.value.unreachable == {"b"}
    assert "b did not come; cannot reach b at 127.0.0.1:" in str(caught.value)


class SlowToClose(GlooGroup):
    """One whose connections are closed once a test lets them."""

    may_close = threading.Event()

    @staticmethod
    def _close(group: Any) -> None:  # noqa: ANN401 -- torch has no stubs of it
        SlowToClose.may_close.wait(LONG_S)
        GlooGroup._close(group)  # noqa: SLF001 -- as its own


def test_who_leaves_a_group_does_not_wait_until_its_connections_are_closed() -> None:
    # Each takes gloo 10 ms: a member must say meanwhile that it left, and form the next group.
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
        b.all_reduce(np.zeros(1, np.float32))
    for groups in both:
        groups.close()
