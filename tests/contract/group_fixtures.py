"""Fleets of group members for the contract of groups: in memory, and as processes."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Client
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pytest

from common.collectives.port import Peer
from common.embedded.process import Child, short_folder
from common.redis.boards import RedisBoards
from common.runtime.fork_server import prepare
from tests.contract.group_member import Member
from tests.fakes.group import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from common.embedded.redis import EmbeddedRedis

# Time limit for each expected event.
LONG_S = 30.0
Answers: TypeAlias = dict[str, Future[Any]]  # keyed by member
NOWHERE = "127.0.0.1:1"  # no server listens there


class Fleet(Protocol):
    """Members by name, which start at their first call."""

    def ask(self, name: str, method: str, *arguments: object) -> Any:  # noqa: ANN401 -- of `Member`
        """Call a method of a member."""

    def peers(self, names: Sequence[str], seen_by: str) -> list[Peer]:
        """Return the members' addresses as seen by one of them."""

    def lost(self, names: Sequence[str], seen_by: str) -> list[int]:
        """Return the ranks whose entries one of the members never gets."""

    def await_word(self, group: str) -> None:
        """Wait until a member has left an entry for the others of a group."""

    def kill(self, name: str) -> None:
        """Kill a member."""

    def freeze(self, name: str) -> None:
        """Pause a member until the test ends."""

    def cut(self, one: str, other: str) -> None:
        """Keep two members apart in groups that are formed from now on."""


class _InMemory:
    """Members that are threads."""

    def __init__(self) -> None:
        self._network = MemoryNetwork()
        self._members = dict[str, Member]()

    def _member(self, name: str) -> Member:
        return self._members.setdefault(name, Member(self._network.groups()))

    def ask(self, name: str, method: str, *arguments: object) -> Any:  # noqa: ANN401 -- see above
        return getattr(self._member(name), method)(*arguments)

    def peers(self, names: Sequence[str], seen_by: str) -> list[Peer]:
        del seen_by
        return [Peer(name, self._member(name).address()) for name in names]

    def lost(self, names: Sequence[str], seen_by: str) -> list[int]:
        del names, seen_by
        return []

    def await_word(self, group: str) -> None:
        meeting, network = self._network.meetings[group], self._network
        with network.changed:
            assert network.changed.wait_for(lambda: meeting.joined, LONG_S)

    def kill(self, name: str) -> None:
        self._network.kill(self._member(name).address())
        self._members.pop(name)

    def freeze(self, name: str) -> None:
        self._network.freeze(self._member(name).address())

    def cut(self, one: str, other: str) -> None:
        self._network.cut(*(self._member(name).address() for name in (one, other)))

    def close(self) -> None:
        for name in list(self._members):
            self.kill(name)


class _InProcesses:
    """Members that are processes and meet in a Redis; a killed one is restarted.

    With NCCL, all members share one GPU. NCCL refuses that for processes on one machine. So each
    process gives its machine a different name, and they communicate over TCP as machines would.
    """

    def __init__(self, redis: str, folder: Path, transport: str) -> None:
        self._redis = redis
        self._folder = folder
        self._transport = transport
        # Processes and their sockets, keyed by member.
        self._children = dict[str, tuple[Child, str]]()
        self._frozen = set[str]()
        self._cuts = set[frozenset[str]]()
        self._numbers = count()

    def _member(self, name: str) -> tuple[Child, str]:
        if name not in self._children:
            number = next(self._numbers)
            path = self._folder / str(number)
            module = "tests.contract.group_member"
            command = [sys.executable, "-P", "-m", module, str(path), self._redis, self._transport]
            apart = {"NCCL_HOSTID": f"machine-{number}", "NCCL_SOCKET_IFNAME": "lo"}
            environment = os.environ | apart if self._transport == "nccl" else None
            child = Child(command, self._folder / "log", environment, forks=True)
            child.await_ready(path.with_suffix(".ready").exists, LONG_S)
            self._children[name] = child, str(path)
        return self._children[name]

    def ask(self, name: str, method: str, *arguments: object) -> Any:  # noqa: ANN401 -- see above
        with Client(self._member(name)[1]) as client:
            client.send((method, *arguments))
            answer = client.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def peers(self, names: Sequence[str], seen_by: str) -> list[Peer]:
        lost = {names[rank] for rank in self.lost(names, seen_by)}
        return [Peer(it, NOWHERE if it in lost else self.ask(it, "address")) for it in names]

    def lost(self, names: Sequence[str], seen_by: str) -> list[int]:
        return [rank for rank, it in enumerate(names) if frozenset((it, seen_by)) in self._cuts]

    def await_word(self, group: str) -> None:
        boards = RedisBoards(self._redis)
        assert boards.rendezvous("job").entries(group, "", LONG_S)
        boards.close()

    def kill(self, name: str) -> None:
        self._children.pop(name)[0].kill()

    def freeze(self, name: str) -> None:
        os.kill(self._member(name)[0].pid, signal.SIGSTOP)
        self._frozen.add(name)

    def cut(self, one: str, other: str) -> None:
        self._cuts.add(frozenset((one, other)))

    def mend(self) -> None:
        """Undo all cuts and pauses."""
        for name in self._frozen:
            self.kill(name)
        self._frozen.clear()
        self._cuts.clear()

    def close(self) -> None:
        for name in list(self._children):
            self.kill(name)


@pytest.fixture(scope="module")
def gloo_processes(embedded_redis: EmbeddedRedis) -> Iterator[_InProcesses]:
    yield from _processes(embedded_redis, "gloo")


@pytest.fixture(scope="module")
def nccl_processes(embedded_redis: EmbeddedRedis) -> Iterator[_InProcesses]:
    yield from _processes(embedded_redis, "nccl")


def _processes(redis: EmbeddedRedis, transport: str) -> Iterator[_InProcesses]:
    # The template imports torch, or each forked member would load its own.
    prepare("worker")
    with TemporaryDirectory(dir=short_folder()) as folder:
        fleet = _InProcesses(redis.url, Path(folder), transport)
        yield fleet
        fleet.close()


@pytest.fixture(params=["memory", "gloo", *(["nccl"] if Path("/dev/nvidiactl").exists() else [])])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    if request.param == "memory":
        in_memory = _InMemory()
        yield in_memory
        in_memory.close()
    else:
        in_processes: _InProcesses = request.getfixturevalue(f"{request.param}_processes")
        yield in_processes
        in_processes.mend()


class Together:
    """Lets several members act at the same time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._threads = ThreadPoolExecutor(32)

    def make(self, name: str, members: Sequence[str], timeout_s: float = LONG_S) -> None:
        """Let each member make its part of a group."""
        for rank, member in enumerate(members):
            peers, lost = (of(members, member) for of in (self._fleet.peers, self._fleet.lost))
            self._fleet.ask(member, "make", name, peers, rank, timeout_s, lost)

    def begin(self, method: str, name: str, by: Mapping[str, tuple[object, ...]]) -> Answers:
        """Start a call of several members of a group, each with its own arguments."""
        ask = self._fleet.ask
        return {m: self._threads.submit(ask, m, method, name, *args) for m, args in by.items()}

    def form(self, name: str, members: Sequence[str], timeout_s: float = LONG_S) -> None:
        """Make and form a group."""
        self.make(name, members, timeout_s)
        for answer in self.begin("form", name, dict.fromkeys(members, ())).values():
            answer.result(LONG_S)

    def close(self) -> None:
        """Stop without waiting."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def together(fleet: Fleet) -> Iterator[Together]:
    together = Together(fleet)
    yield together
    together.close()
