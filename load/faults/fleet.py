"""Services as a fleet manager sees them: slots whose machines are lost, frozen and replaced."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from load.harness.stack import freeze, thaw

if TYPE_CHECKING:
    from common.embedded.services import EmbeddedService

# Delay of a restart after an unexpected exit.
_AGAIN_S = 1.0
# Time between two machines that come back.
_IN_TURN_S = 1.0
# Exit code of a process that the harness killed.
_FORCED = -signal.SIGKILL
# Exit codes after a notice. SIGTERM ends a process only while it starts.
_LEFT = (0, -signal.SIGTERM)


class UnexpectedExit(NamedTuple):
    """A service that ended by itself, or with another exit code than expected."""

    at_s: float  # monotonic
    name: str
    exit_code: int
    last_words: str


class Slot:
    """One place in the fleet: a service and its successive replacements.

    Args:
        start: Starts a machine. Its argument counts the names used in this slot, from 1.
    """

    def __init__(self, start: Callable[[int], EmbeddedService]) -> None:
        self._start = start
        self._life = 1
        self._machine = start(self._life)
        self._expected: tuple[int, ...] = ()  # Expected exit codes.
        self._renamed = False
        # Time of the restart after an unexpected exit.
        self._vacant_until: float | None = None
        # Number of times that the machine had not left when its notice was over.
        self.overran = 0

    @property
    def name(self) -> str:
        """Name of the current machine, or of the last one."""
        return self._machine.name

    def kill(self) -> None:
        """Lose the machine without notice."""
        self._expected = (_FORCED, *self._expected)
        self._machine.kill()

    def give_notice(self) -> None:
        """Announce the loss of the machine. Its replacement has another name."""
        self._expected, self._renamed = (*_LEFT, *self._expected), True
        self._machine.ask_to_end()

    def freeze(self) -> None:
        """Stop the process with SIGSTOP, if it runs."""
        if self._machine.exit_code is None:
            freeze(self._machine)

    def thaw(self) -> None:
        """Continue the process."""
        if self._machine.exit_code is None:
            thaw(self._machine)

    def bring_back(self) -> None:
        """Fill the slot: thaw the machine, or replace it if it was killed or given notice."""
        self.thaw()
        if self._expected:
            self.overran += self._renamed and self._machine.exit_code is None
            # A kill does nothing to a process that has ended.
            self.kill()
            self._replace()

    def look(self, now: float) -> UnexpectedExit | None:
        """Notice an unexpected exit, and replace the machine after `_AGAIN_S`."""
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
        """Ask the machine to end for good, without waiting."""
        self.thaw()
        self._machine.ask_to_end()

    def stop(self) -> None:
        """End the machine for good."""
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
        self._returns = list[tuple[float, Slot]]()  # (time, slot) of each return

    @property
    def overran(self) -> int:
        """Number of times that a machine had not left by the end of its notice."""
        return sum(slot.overran for slot in self.slots)

    def look(self) -> None:
        """Bring back machines that are due, and replace those that ended by themselves.

        Call it often.
        """
        now = time.monotonic()
        for at_s, slot in self._returns:
            if at_s <= now:
                slot.bring_back()
        self._returns = [each for each in self._returns if each[0] > now]
        found = [slot.look(now) for slot in self.slots]
        self.unexpected += [each for each in found if each is not None]

    def kill_all(self) -> None:
        """Lose all machines at once."""
        for slot in self.slots:
            slot.kill()

    def bring_back_in_turn(self) -> None:
        """Bring one machine back now, and the others one after another, `_IN_TURN_S` apart."""
        now = time.monotonic()
        self._returns = [(now + n * _IN_TURN_S, slot) for n, slot in enumerate(self.slots)]

    def bring_all_back(self) -> None:
        """Bring all machines back."""
        self._returns.clear()
        for slot in self.slots:
            slot.bring_back()

    def stop(self) -> None:
        """End all machines for good."""
        for slot in self.slots:
            slot.ask_to_end()
        for slot in self.slots:
            slot.stop()
