"""One attempt at an update: all members start together, and the result of some may suffice.

    all have finished with one digest            it counts
    the finished members own too few slices      it is over: part of the state died with others
    some broke off, enough others have finished  it counts, and the others copy the result
    one died, and too few can still finish       it is over; all living members try again
    no more answers, and too few have finished   it is over; all but the silent try again

A member applies its result only if an audit record names it, so an attempt that is abandoned by
mistake does no harm.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import UNSET

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Set as AbstractSet

    from msgspec import UnsetType

    from common.core.messages import Broken, Member, Membership, Reduce, Reduced

Verdict: TypeAlias = Literal["open", "whole", "over", "diverged", "different"]

# Time to wait for the others after one broke off. Their answers are in transit, or they hang until
# the attempt is declared over.
BROKEN_S = 0.05
# Minimum time of an attempt.
FLOOR_S = 0.3
# Multiple of the median of recent attempts. If an attempt takes longer, a member is frozen, not
# just slow.
SLOWER = 5
RECENT = 16


class AttemptTimes:
    """Time limit of attempts."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=RECENT)

    def observe(self, seconds: float) -> None:
        """Add the duration of a finished attempt."""
        self._recent.append(seconds)

    def allowed_s(self, first_s: float) -> float:
        """Return the time limit of the next attempt.

        Args:
            first_s: Limit until one was measured. The first attempt also opens connections.
        """
        return FLOOR_S + SLOWER * median(self._recent) if self._recent else first_s


class Attempt:
    """One attempt in progress.

    Args:
        reduce: The order to the members.
        round: Number of the round whose gradients are added up.
        membership: The members that take part.
        now: Start of the attempt.
        allowed_s: Time limit.
    """

    def __init__(
        self,
        reduce: Reduce,
        round: int,  # noqa: A002 -- the usual name
        membership: Membership,
        now: float,
        allowed_s: float,
    ) -> None:
        self.reduce = reduce
        self.round = round
        self.membership = membership
        self.members = membership.members
        self.begun = now
        # Digest of each member's result.
        self.finished = dict["Member", int]()
        self.square: float | UnsetType = UNSET
        self._broken = set["Member"]()
        # Time at which the attempt is decided by the answers received so far.
        self.due = now + allowed_s
        self._diverged = False

    def finish(self, member: Member, reduced: Reduced) -> None:
        """Record that a member has the whole result."""
        if member in self.members:
            self.finished[member] = reduced.digest
            self.square = reduced.square

    def break_off(self, member: Member, broken: Broken, now: float) -> None:
        """Record that a member has left the attempt."""
        if member in self.members:
            self._broken.add(member)
            self._diverged |= broken.reason == "not_finite"
            self.due = min(self.due, now + BROKEN_S)

    def silent(self, there: Collection[Member]) -> frozenset[Member]:
        """Return the living members that have not answered."""
        return frozenset(there).intersection(self.members) - self._broken - self.finished.keys()

    def judge(self, there: Collection[Member], copies: int, now: float) -> Verdict:
        """Return the state of the attempt.

        Args:
            there: Living members.
            copies: Number of living members that must have the result, if there are as many.
            now: Current time.
        """
        if self._diverged:
            return "diverged"
        there, silent = frozenset(there).intersection(self.members), self.silent(there)
        has_it = self.finished.keys() & there
        # Only a known death makes an attempt hopeless. Before that, the next attempt would include
        # the dead member again.
        hopeless = len(there) < len(self.members) and not self._is_enough(
            has_it | silent, there, copies
        )
        if silent and now < self.due and not hopeless:
            return "open"
        digests = {self.finished[member] for member in has_it}
        if len(digests) > 1:
            return "different"
        return "whole" if digests and self._is_enough(has_it, there, copies) else "over"

    def _is_enough(
        self, has_it: AbstractSet[Member], there: AbstractSet[Member], copies: int
    ) -> bool:
        """True if enough living members, and enough owners of each slice, have the result."""
        if len(has_it) < min(copies, len(there)):
            return False
        for ranks in self.membership.owners or ():
            owners = {self.members[rank] for rank in ranks}
            if len(owners & has_it) < max(1, min(copies, len(owners & there))):
                return False
        return True
