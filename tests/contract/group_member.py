"""A member of groups under remote control, in a thread or in a process of its own.

    python -m tests.contract.group_member SOCKET REDIS gloo|nccl

The program listens on a socket. Each connection sends one request and receives its result.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from math import nan
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.collectives.port import Group
from common.errors import GroupError
from common.redis.boards import RedisBoards

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from common.collectives.port import Groups, Peer
    from common.core.messages import Vector
    from common.redis.port import Rendezvous


class Member:
    """One member, and the groups that it is in.

    Args:
        groups: Makes the groups.
        link: Optional. Loses entries of some members.
        device: Device of the vectors.
    """

    def __init__(self, groups: Groups, link: Lossy | None = None, device: str = "cpu") -> None:
        self._groups = groups
        self._tensor = partial(torch.tensor, dtype=torch.float32, device=device)
        self._link = link
        self._formed = dict[str, Group]()

    def address(self) -> str:
        """Return the address for other members."""
        return self._groups.address

    def make(
        self, name: str, members: Sequence[Peer], rank: int, timeout_s: float, lost: Collection[int]
    ) -> None:
        """Make a group; entries of the `lost` ranks do not arrive here."""
        if self._link is not None:
            self._link.lost = lost
        self._formed[name] = self._groups.group(name, members, rank, timeout_s)

    def form(self, name: str) -> None:
        """Form a group."""
        self._formed[name].form()

    def all_reduce(self, name: str, numbers: Sequence[float]) -> Vector:
        """Add numbers up."""
        vector = self._tensor(numbers)
        self._formed[name].all_reduce(vector)
        return _found(vector)

    def exchange(
        self,
        name: str,
        numbers: Sequence[float],
        sent: Sequence[int],
        received: Sequence[int],
        dtype: str = "float32",
    ) -> Vector:
        """Exchange parts."""
        incoming = self._tensor([nan] * sum(received)).to(_dtype(dtype))
        outgoing = self._tensor(numbers).to(_dtype(dtype))
        self._formed[name].exchange(outgoing, sent, incoming, received)
        return _found(incoming)

    def gather(
        self, name: str, numbers: Sequence[float], lengths: Sequence[int], dtype: str = "float32"
    ) -> Vector:
        """Gather parts."""
        vector = self._tensor(numbers).to(_dtype(dtype))
        self._formed[name].gather(vector, lengths)
        return _found(vector)

    def copy(self, name: str, *numbers: Sequence[float]) -> list[Vector]:
        """Copy from rank 0."""
        # The bytes of a copy are in main memory.
        vectors = [torch.tensor(each) for each in numbers]
        self._formed[name].copy(vectors)
        return [_found(each) for each in vectors]

    def abort(self, name: str) -> None:
        """Leave a group."""
        self._formed[name].abort()


class Lossy:
    """A rendezvous that loses entries of some ranks, which cuts the link to them."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self.lost: Collection[int] = ()

    def leave(self, name: str, key: str, value: bytes) -> None:
        """Append an entry."""
        self._rendezvous.leave(name, key, value)

    def entries(self, name: str, after: str, timeout_s: float) -> list[tuple[str, str, bytes]]:
        """Return the entries that are not lost."""
        found = self._rendezvous.entries(name, after, timeout_s)
        return [each for each in found if _rank(each[1]) not in self.lost]


def _rank(key: str) -> int | None:
    """Return the rank at the end of torch's key, if there is one."""
    last = key.rpartition("/")[2]
    return int(last) if last.isdigit() else None


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _found(vector: Tensor) -> Vector:
    # NumPy has no bfloat16.
    found: Vector = vector.float().numpy(force=True)
    return found


def _serve(socket: str, redis: str, transport: str) -> None:
    from common.collectives.torch_group import TorchGroups  # noqa: PLC0415 -- memory needs no gloo

    link = Lossy(RedisBoards(redis).rendezvous("job"))
    device = "cuda" if transport == "nccl" else "cpu"
    member = Member(TorchGroups("127.0.0.1", link, transport), link, device)
    with Listener(socket, backlog=16) as listener:
        # The socket's own file appears a moment too early.
        Path(socket + ".ready").touch()
        while True:
            threading.Thread(target=_answer, args=(member, listener.accept())).start()


def _answer(member: Member, asked: Connection[Any, Any]) -> None:
    with asked:
        method, *arguments = asked.recv()
        try:
            asked.send(getattr(member, method)(*arguments))
        except GroupError as error:
            asked.send(error)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
