"""The port of groups: members of a job that add their vectors up among themselves.

`common.collectives.torch_group` fulfils it with torch's gloo over TCP and with NCCL between GPUs,
`tests.fakes.group` in memory; one contract suite (tests/contract/test_group.py) holds all to the
same behaviour. A group is made for one membership and never mended: once a call in it has failed,
every member leaves it, and those who are left form another one under another name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from common.core.messages import Vector

# Between two pieces of a call, not for all of it; of NCCL, which tells of no pieces, for all of it
# and what its bytes take besides. A death shows at once, in a connection or port that closes; this
# is for what closes none: a machine without power, a cable, a process that is frozen.
TIMEOUT_S = 2.0


class Peer(NamedTuple):
    """A member, and where the others reach it."""

    name: str
    address: str  # host:port, as its `Groups.address` says


class Group(Protocol):
    """One member's part in a group. All but `abort` belong to one thread.

    Every member makes the same calls in the same order: they meet by that order, never by name.
    Each call returns once this member's part is done; others may still be at theirs. Where it
    cannot be ended it raises `GroupError`, and then its vectors may hold anything, and the group is
    of no use any more. Who raises leaves, so that others raise, too: at once those who wait for it,
    the rest once they come to, or after the timeout. Whoever knows that a group broke lets all
    others know, so that they abort it.
    """

    def form(self) -> None:
        """Connect to all the others, who must do the same.

        Raises:
            GroupError: If a member cannot be reached or does not come in time, if the group was
                aborted, or if its name was used before: entries of the dead may stand there.
        """

    def all_reduce(self, vector: Vector) -> None:
        """Sum the vectors of all members, in place; all get the same bits.

        Args:
            vector: (n,) float32, writable; n is the same everywhere.

        Raises:
            GroupError: If it cannot be ended.
        """

    def exchange(
        self, outgoing: Vector, sent: Sequence[int], incoming: Vector, received: Sequence[int]
    ) -> None:
        """Send a part of a vector to each member, and get one from each.

        Args:
            outgoing: (sum(sent),) float32: the parts for ranks 0, 1, ... one after the other.
            sent: How many numbers go to each rank; none is well.
            incoming: (sum(received),) float32, overwritten: the parts from ranks 0, 1, ...
            received: How many come from each rank: what it sends here.

        Raises:
            GroupError: If it cannot be ended.
        """

    def gather(self, vector: Vector, lengths: Sequence[int]) -> None:
        """Let every member have the parts of all, in place.

        Args:
            vector: (sum(lengths),) float32: the part of this rank is read, the others are written.
            lengths: Of the parts of ranks 0, 1, ..., which lie one after the other.

        Raises:
            GroupError: If it cannot be ended.
        """

    def copy(self, vectors: Sequence[Vector]) -> None:
        """Send rank 0's vectors to all others, and return when all have all of them.

        Mostly in a group of two of its own: whoever copies and whoever is copied go on in another
        one meanwhile, which does not notice if this one breaks. Nothing keeps rank 0 from changing
        them while they are read: what arrives may be torn, and only a digest says so.

        Args:
            vectors: (n_i,) float32 each, of the same lengths everywhere.

        Raises:
            GroupError: If it cannot be ended.
        """

    def abort(self) -> None:
        """Leave the group, from any thread and at any time; whoever is in a call of it raises."""


class Groups(Protocol):
    """A process's way into groups; shared between threads."""

    @property
    def address(self) -> str:
        """Where others reach this process: see `Peer`."""

    def group(
        self, name: str, members: Sequence[Peer], rank: int, timeout_s: float = TIMEOUT_S
    ) -> Group:
        """Make a member of a group that is still to be formed.

        Args:
            name: Used once in the job, for ever.
            members: In the order of their ranks, the same for all.
            rank: Which of them this is.
            timeout_s: See `TIMEOUT_S`; forming takes no longer, either.
        """

    def close(self) -> None:
        """Be reached no more; groups that stand go on."""
