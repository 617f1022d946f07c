"""Keeps the processes of one machine running: restarts each process that ends, after a pause."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Protocol

from common.config.program import EXIT_USAGE
from common.errors import DollError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Time between two polls of the processes.
LOOK_S = 0.2
FIRST_PAUSE_S = 1.0
# A start takes about 1 s of a processor. With this pause, a process that always dies takes less
# than a tenth of a processor. A bad batch ends workers several times, and longer pauses would keep
# all jobs waiting for these workers.
LONGEST_PAUSE_S = 15.0
# A process that ran this long had no short life: the pause after it is `FIRST_PAUSE_S` again.
LONG_LIFE_S = 60.0
# Number of short lives in a row after which an essential process is given up. The pauses between
# them are 15 s together, in which a port or memory may become free.
SHORT_LIVES = 5
# Number of characters shown of a log's last line.
_SHOWN = 300
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


class Kept(Protocol):
    """A process that can be started again, such as a service or a server."""

    name: str

    @property
    def exit_code(self) -> int | None:
        """Exit code, minus the number of a signal, or None while the process runs."""

    def last_words(self) -> str:
        """Return the end of the log."""

    def restart(self) -> None:
        """Start the process again after it has ended.

        Raises:
            UnavailableError: If the process does not start this time.
            OSError: If the operating system does not start the process this time.
            DollError: If the process can never be started again.
        """


class Keeper:
    """Restarts one process whenever it ends, with a pause that doubles after each short life.

    Args:
        kept: The process, already running.
        now: Present time in seconds, by a monotonic clock.
        essential: True if nothing on the machine works without the process. The keeper gives up
            after `SHORT_LIVES` short lives in a row.
    """

    def __init__(self, kept: Kept, now: float, *, essential: bool = False) -> None:
        self._kept = kept
        self._essential = essential
        self._started_at = now
        # Time of the next start, or None while the process runs.
        self._due: float | None = None
        self._short_lives = 0
        self._pause_s = FIRST_PAUSE_S

    def look(self, now: float) -> str:
        """Restart the process if it has ended and its pause is over.

        Returns:
            One line if the process was newly found dead, otherwise an empty string.

        Raises:
            DollError: If an essential process is given up, or cannot be restarted at all.
        """
        if self._due is None:
            code = self._kept.exit_code
            return "" if code is None else self._died(how_it_ended(code), code, now)
        if now < self._due:
            return ""
        self._due, self._started_at = None, now
        try:
            self._kept.restart()
        except (UnavailableError, OSError) as error:
            return self._died(f"cannot be started ({_one_line(str(error))})", None, now)
        return ""

    def _died(self, how: str, code: int | None, now: float) -> str:
        life_s = now - self._started_at
        if life_s >= LONG_LIFE_S:
            self._short_lives, self._pause_s = 0, FIRST_PAUSE_S
        self._short_lives += 1
        name, after = self._kept.name, f"after {life_s:.0f} s"
        if code is None:
            words = how
        elif -code in _FAULTS:
            words = f"{how} {after}; its log has the stack of each thread"
        else:
            words = f"{how} {after}; last line of its log: {_one_line(self._kept.last_words())}"
        if self._essential and (self._short_lives >= SHORT_LIVES or code == EXIT_USAGE):
            raise DollError(f"{name} keeps failing: {words}")
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._due = now + pause_s
        return f"{name} {words}; restarting it in {pause_s:g} s"


def keep(
    keepers: Iterable[Keeper],
    is_over: Callable[[], bool],
    report: Callable[[str], object],
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> None:
    """Poll all processes every `LOOK_S` until `is_over` returns True.

    Args:
        keepers: One keeper for each process.
        is_over: Called before each poll.
        report: Receives one line for each death.
        clock: Returns the time in seconds, by a monotonic clock.
        sleep: Waits for a number of seconds.

    Raises:
        DollError: If an essential process is given up, or a process can never be restarted.
    """
    all_of_them = tuple(keepers)
    while not is_over():
        sleep(LOOK_S)
        for keeper in all_of_them:
            if said := keeper.look(clock()):
                report(said)


def how_it_ended(code: int) -> str:
    """Return words for how a process ended, by its exit code."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        # A real-time signal has no name.
        return f"was killed by signal {-code}"


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-_SHOWN:] if lines else "empty"
