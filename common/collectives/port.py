"""Port of groups: members of a job that sum their vectors without the coordinator.

`common.collectives.torch_group` implements it with torch's gloo over TCP and with NCCL between
GPUs, and `tests.fakes.group` in memory. One contract suite (tests/contract/test_group.py) tests
all of them. A group is made for one set of members and never repaired: after a call has failed,
every member leaves, and the remaining ones form a new group with another name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

# Longest time between two pieces of a call, not for the complete call. NCCL reports no pieces, so
# there it is the time for the call, in addition to the time that its bytes take. The death of a
# process shows at once, because a connection or port closes. The timeout is for failures that close
# neither: a power cut, a broken cable, a frozen process.
TIMEOUT_S = 2.0


class Peer(NamedTuple):
    """A member of a group.

    Attributes:
        name: Name of the member.
        address: Its `Groups.address`: host:port.
    """

    name: str
    address: str


class Group(Protocol):
    """One member's part in a group. All methods but `abort` are for one thread.

    Vectors are contiguous tensors of one dimension, usually on the member's device. A group moves a
    vector that is on another device than the group sends from, and copies the result back.

    Every member makes the same calls in the same order, and calls match by that order alone. A call
    returns once this member's part is done; others may still be working. A call that cannot be
    completed raises `GroupError`. It may still write to its vectors afterwards, and the group
    cannot be used any more. The member that raises leaves the group, so that others raise as well:
    those that wait for it at once, the rest at their next call or after the timeout. A member that
    knows that the group is broken notifies the others, so that they abort it.
    """

    def form(self) -> None:
        """Connect to all other members, which must call this as well.

        Raises:
            GroupError: If a member cannot be reached or does not call in time, if the group was
                aborted, or if its name was used before, since entries of dead members may remain.
        """

    def all_reduce(self, vector: Tensor) -> None:
        """Sum the vectors of all members in place. All members get the same bits.

        Args:
            vector: (n,) float32; n is the same for all members.

        Raises:
            GroupError: If the call cannot be completed.
        """

    def exchange(
        self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]
    ) -> None:
        """Send a part of a vector to each member, and receive a part from each.

        Args:
            outgoing: (sum(sent),) float32 or bfloat16: the parts for ranks 0, 1, ..., concatenated.
            sent: Number of values for each rank; may be 0.
            incoming: (sum(received),) of the same type, overwritten: the parts from ranks 0, 1, ...
            received: Number of values from each rank, equal to what that rank sends.

        Raises:
            GroupError: If the call cannot be completed.
        """

    def gather(self, vector: Tensor, lengths: Sequence[int]) -> None:
        """Send this member's part to all members, and receive the parts of the others in place.

        Args:
            vector: (sum(lengths),) float32 or bfloat16: this rank's part is read, the others are
                written.
            lengths: Lengths of the parts of ranks 0, 1, ..., which are concatenated.

        Raises:
            GroupError: If the call cannot be completed.
        """

    def copy(self, vectors: Sequence[Tensor]) -> None:
        """Send rank 0's vectors to all others; return when every member has all of them.

        Usually both members use a separate group of two for a copy, so that their main group
        continues and does not break with the copy. Rank 0 may change the vectors while they are
        sent, so the received ones may be torn; only a digest shows that.

        Args:
            vectors: (n_i,) float32 each, with the same lengths for all members.

        Raises:
            GroupError: If the call cannot be completed.
        """

    def abort(self) -> None:
        """Leave the group, from any thread at any time. A call in progress raises."""


class Groups(Protocol):
    """Makes groups that include this process. May be shared between threads."""

    @property
    def address(self) -> str:
        """Address of this process for other members; see `Peer`."""

    def group(
        self, name: str, members: Sequence[Peer], rank: int, timeout_s: float = TIMEOUT_S
    ) -> Group:
        """Return a group with this process as a member; `Group.form` connects it.

        Args:
            name: Name that the job never uses again.
            members: Members in the order of their ranks, the same for all.
            rank: Rank of this process.
            timeout_s: See `TIMEOUT_S`. Forming the group takes no longer either.
        """

    def close(self) -> None:
        """Close the address. Existing groups continue."""
