"""Services as a fleet manager sees them: slots whose machines vanish, freeze and are replaced."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from load.harness.stack import freeze, thaw

if TYPE_CHECKING:
    from common.embedded.services import EmbeddedService

_AGAIN_S = 1.0  # after an exit that nobody asked for
_IN_TURN_S = 1.0  # between two machines that come back
_FORCED = -signal.SIGKILL  # exit code of what we killed
_LEFT = (0, -signal.SIGTERM)  # exit codes of what was given notice; the latter while it starts


class UnexpectedExit(NamedTuple):
    """A service that ended by itself, or otherwise than it was asked to."""

    at_s: float  # monotonic
    name: str
    exit_code: int
    last_words: str


class Slot:
    """One place in the fleet: a service, and its replacements one after the other.

    Args:
        start: Starts a machine; its number counts the names in this slot, from 1.
    """

    def __init__(self, start: Callable[[int], EmbeddedService]) -> None:
        self._start = start
        self._life = 1
        self._machine = start(self._life)
        self._expected: tuple[int, ...] = ()  # exit codes that were asked for
        self._renamed = False
        self._vacant_until: float | None = None  # after an exit that nobody asked for
        self.overran = 0  # times that it was given notice and had not left when its time was over

    @property
    def name(self) -> str:
        """Of the machine that is in it, or was last."""
        return self._machine.name

    def kill(self) -> None:
        """Let the machine vanish."""
        self._expected = (_FORCED, *self._expected)
        self._machine.kill()

    def give_notice(self) -> None:
        """Announce that the machine will vanish; its replacement has another name."""
        self._expected, self._renamed = (*_LEFT, *self._expected), True
        self._machine.ask_to_end()

    def freeze(self) -> None:
        """Let the process do nothing, if it runs."""
        if self._machine.exit_code is None:
            freeze(self._machine)

    def thaw(self) -> None:
        """Let it go on."""
        if self._machine.exit_code is None:
            thaw(self._machine)

    def bring_back(self) -> None:
        """Fill the slot: thaw what is there, let what was given notice vanish, start another."""
        self.thaw()
        if self._expected:
            self.overran += self._renamed and self._machine.exit_code is None
            self.kill()  # does nothing to one that has ended
            self._replace()

    def look(self, now: float) -> UnexpectedExit | None:
        """Notice an exit that nobody asked for, and replace what ended so, a little later."""
        code = self._machine.exit_code
        if self._vacant_until is not None:
            if now >= self._vacant_until:
                self._replace()
            return None
        if code is None or code in self._expected:
            return None
        self._vacant_until = now + _AGAIN_S
        return UnexpectedExit(now, self._machine.name, code, self._machine.last_words())

    def ask_to_end(self) -> None:
        """Ask it to end for good, without waiting for it."""
        self.thaw()
        self._machine.ask_to_end()

    def stop(self) -> None:
        """End it for good."""
        self._machine.stop()

    def _replace(self) -> None:
        self._vacant_until = None
        self._expected = ()
        if self._renamed:
            self._life, self._renamed = self._life + 1, False
            self._machine = self._start(self._life)
        else:
            self._machine.restart()


class Fleet:
    """All slots of one kind."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.unexpected = list[UnexpectedExit]()
        self._returns = list[tuple[float, Slot]]()  # when to bring back whom

    @property
    def overran(self) -> int:
        """Times that one had not left by the end of its notice."""
        return sum(slot.overran for slot in self.slots)

    def look(self) -> None:
        """Do what is due, and replace what ended by itself; to be called often."""
        now = time.monotonic()
        for at_s, slot in self._returns:
            if at_s <= now:
                slot.bring_back()
        self._returns = [each for each in self._returns if each[0] > now]
        found = [slot.look(now) for slot in self.slots]
        self.unexpected += [each for each in found if each is not None]

    def kill_all(self) -> None:
        """Let all machines vanish at once."""
        for slot in self.slots:
            slot.kill()

    def bring_back_in_turn(self) -> None:
        """Bring one back now and the others a while after each other."""
        now = time.monotonic()
        self._returns = [(now + n * _IN_TURN_S, slot) for n, slot in enumerate(self.slots)]

    def bring_all_back(self) -> None:
        """Let everything run."""
        self._returns.clear()
        for slot in self.slots:
            slot.bring_back()

    def stop(self) -> None:
        """End everything for good."""
        for slot in self.slots:
            slot.ask_to_end()
        for slot in self.slots:
            slot.stop()
