"""Who may add gradients up together: members that reach each other, as far as is known.

Whoever cannot reach a peer says so; nobody learns that links work again. So accusations fade, and
then those two are put together once more.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from common.core.messages import Member

ACCUSED_S = 60.0  # that two are kept apart: a link that was cut may be mended


class Accusations:
    """Pairs of members of which one could not reach the other lately."""

    def __init__(self) -> None:
        self._until = dict[frozenset["Member"], float]()

    def add(self, member: Member, unreachable: Iterable[Member], now: float) -> None:
        """A member could not reach these."""
        for other in unreachable:
            self._until[frozenset((member, other))] = now + ACCUSED_S

    def between(self, one: Member, other: Member, now: float) -> bool:
        """Whether these two are kept apart."""
        return self._until.get(frozenset((one, other)), now) > now

    def clique(
        self, members: Iterable[Member], needed: Collection[Member], now: float
    ) -> frozenset[Member]:
        """Members of which no two are kept apart: the most accused are left out first.

        Args:
            members: Of whom.
            needed: To be left out last: they have gradients that count.
            now: The time.
        """
        self._until = {pair: until for pair, until in self._until.items() if until > now}
        left = set(members)
        while pairs := [pair for pair in self._until if pair <= left]:
            count = Counter(member for pair in pairs for member in pair)
            left.remove(max(sorted(count), key=lambda m: (count[m], m not in needed)))
        return frozenset(left)
