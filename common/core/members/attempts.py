"""An attempt at an update: all members enter at once, and what some of them finish may count.

    all have finished, with one digest            it counts
    who has finished owns too few slices          it is over: some of the next state died with them
    some broke off, enough others have finished   it counts; who broke off copies the result
    one died, and too few can have finished       it is over, and tried anew by all who live
    nobody answers any more, or too few have it   it is over, and tried anew without the silent

Whoever has finished holds a result that no audit record may ever name: it is applied only if one
does, so an attempt that is given up by mistake harms nothing.
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

# So long after somebody broke off others are waited for: their answers are under way, or they hang
# until the attempt is said to be over.
BROKEN_S = 0.05
FLOOR_S = 0.3  # shortest time that an attempt gets
SLOWER = 5  # times as long as the last ones took: then somebody is frozen, rather than slow
RECENT = 16


class AttemptTimes:
    """How long an attempt may take."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=RECENT)

    def observe(self, seconds: float) -> None:
        """Take in how long one took that was finished."""
        self._recent.append(seconds)

    def allowed_s(self, first_s: float) -> float:
        """Time for the next one.

        Args:
            first_s: Until one has been measured; the first forms connections, too.
        """
        return FLOOR_S + SLOWER * median(self._recent) if self._recent else first_s


class Attempt:
    """One attempt under way.

    Args:
        reduce: What members were told.
        round: Whose gradients it adds.
        membership: Who enters.
        now: When it begins.
        allowed_s: How long it may take.
    """

    def __init__(
        self,
        reduce: Reduce,
        round: int,  # noqa: A002 -- what it is called everywhere
        membership: Membership,
        now: float,
        allowed_s: float,
    ) -> None:
        self.reduce = reduce
        self.round = round
        self.membership = membership
        self.members = membership.members
        self.begun = now
        self.finished = dict["Member", int]()  # the digest that each found
        self.square: float | UnsetType = UNSET
        self._broken = set["Member"]()
        self.due = now + allowed_s  # when it is judged by what has come by then
        self._diverged = False

    def finish(self, member: Member, reduced: Reduced) -> None:
        """A member has the whole result."""
        if member in self.members:
            self.finished[member] = reduced.digest
            self.square = reduced.square

    def break_off(self, member: Member, broken: Broken, now: float) -> None:
        """A member has left it."""
        if member in self.members:
            self._broken.add(member)
            self._diverged |= broken.reason == "not_finite"
            self.due = min(self.due, now + BROKEN_S)

    def silent(self, there: Collection[Member]) -> frozenset[Member]:
        """Members that are there, and of which nothing was heard."""
        return frozenset(there).intersection(self.members) - self._broken - self.finished.keys()

    def judge(self, there: Collection[Member], copies: int, now: float) -> Verdict:
        """What becomes of it.

        Args:
            there: Members that live.
            copies: How many of them must have its result, where so many live.
            now: The time.
        """
        if self._diverged:
            return "diverged"
        there, silent = frozenset(there).intersection(self.members), self.silent(there)
        has_it = self.finished.keys() & there
        # Where nobody is known to have died, somebody is about to be: it must not enter again.
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
        """Whether so many have finished, of those who live, and so many owners of each slice."""
        if len(has_it) < min(copies, len(there)):
            return False
        for ranks in self.membership.owners or ():
            owners = {self.members[rank] for rank in ranks}
            if len(owners & has_it) < max(1, min(copies, len(owners & there))):
                return False
        return True
