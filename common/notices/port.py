"""How a preemptible machine learns that its end is near, as a protocol."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Notice(NamedTuple):
    """Whoever lends this machine says that it will be taken back."""

    at_s: float  # since 1970: when the machine goes
    detail: str  # what becomes of the machine: terminate, stop, hibernate


class PreemptionNotices(Protocol):
    """Where a preemptible machine hears that its end is near. For one thread at a time.

    What does not parse is left out, and the first of its kind is logged.
    """

    def look(self) -> Notice | None:
        """The notice that stands, None for none.

        A notice stands from when it is given on: whoever looks again finds it again.

        Raises:
            UnavailableError: If the source is away or slow; look again.
            OutsideError: If it refuses.
        """
