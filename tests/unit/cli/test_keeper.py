"""An ended process is restarted after growing pauses. An essential one may be given up."""

from __future__ import annotations

import signal

import pytest

from common.errors import DollError, UnavailableError
from services.cli.system.keeper import (
    FIRST_PAUSE_S,
    LONG_LIFE_S,
    LONGEST_PAUSE_S,
    LOOK_S,
    SHORT_LIVES,
    Keeper,
    keep,
)


class Guest:
    """A process that ends when the test says so."""

    name = "worker-1"

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.starts = 0
        self.refusal: Exception | None = None
        self.words = "began\nNameError: no such loss\n"

    def last_words(self) -> str:
        """See `Kept`."""
        return self.words

    def restart(self) -> None:
        """See `Kept`.

        Raises:
            Exception: The test's exception.
        """
        if self.refusal is not None:
            raise self.refusal
        self.starts += 1
        self.exit_code = None


def next_pause_s(keeper: Keeper, guest: Guest, now: float, code: int = 1) -> float:
    """End a process, and return the time until it is restarted."""
    guest.exit_code, starts = code, guest.starts
    assert keeper.look(now) != ""
    pause_s = 0.0
    while guest.starts == starts:
        pause_s += FIRST_PAUSE_S
        assert keeper.look(now + pause_s) == ""
        assert pause_s <= LONGEST_PAUSE_S
    return pause_s


def test_running_process_is_left_alone() -> None:
    guest = Guest()
    keeper = Keeper(guest, 0.0)
    assert [keeper.look(now) for now in (1.0, 100.0, 1000.0)] == ["", "", ""]
    assert guest.starts == 0


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (7, "ended with status 7 after 3 s; last line of its log: NameError: no such loss"),
        (-9, "was killed by SIGKILL after 3 s; last line of its log: NameError: no such loss"),
        (-11, "was killed by SIGSEGV after 3 s; its log has the stack of each thread"),
        (-40, "was killed by signal 40 after 3 s; last line of its log: NameError: no such loss"),
    ],
)
def test_death_is_reported_once_in_one_line(code: int, line: str) -> None:
    guest = Guest()
    keeper = Keeper(guest, 0.0)
    guest.exit_code = code
    assert keeper.look(3.0) == f"worker-1 {line}; restarting it in 1 s"
    assert keeper.look(3.5) == ""
    assert guest.starts == 0
    assert keeper.look(4.0) == ""
    assert guest.starts == 1


def test_death_of_a_silent_process_is_reported() -> None:
    guest = Guest()
    guest.exit_code, guest.words = 1, ""
    assert "last line of its log: empty;" in Keeper(guest, 0.0).look(1.0)


def test_pause_doubles_after_each_short_life_up_to_the_longest() -> None:
    # lives   3 s | 3 s | 3 s ...
    # pauses     1 s   2 s   4 s ... 15 s
    guest = Guest()
    now, pauses = 0.0, list[float]()
    keeper = Keeper(guest, now)
    for _ in range(7):
        pauses.append(next_pause_s(keeper, guest, now + 3.0))
        now += 3.0 + pauses[-1]
    assert pauses == [1, 2, 4, 8, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_pause_is_reset_after_a_long_life() -> None:
    guest = Guest()
    keeper = Keeper(guest, 0.0)
    assert next_pause_s(keeper, guest, 3.0) == 1
    assert next_pause_s(keeper, guest, 10.0) == 2
    assert next_pause_s(keeper, guest, 12.0 + LONG_LIFE_S) == 1


def test_process_that_always_dies_is_never_given_up() -> None:
    guest = Guest()
    keeper, now = Keeper(guest, 0.0), 0.0
    for _ in range(2000):
        now += next_pause_s(keeper, guest, now)
    assert guest.starts == 2000


def test_essential_process_is_given_up_after_several_short_lives() -> None:
    guest = Guest()
    keeper, now = Keeper(guest, 0.0, essential=True), 0.0
    for _ in range(SHORT_LIVES - 1):
        now += next_pause_s(keeper, guest, now)
    guest.exit_code = 1
    with pytest.raises(DollError, match=r"^worker-1 keeps failing: ended with status 1 after"):
        keeper.look(now)


def test_essential_process_with_long_lives_is_kept_running() -> None:
    guest = Guest()
    keeper, now = Keeper(guest, 0.0, essential=True), 0.0
    for _ in range(3 * SHORT_LIVES):
        now += LONG_LIFE_S
        now += next_pause_s(keeper, guest, now)


def test_essential_process_with_invalid_settings_is_given_up_at_once() -> None:
    guest = Guest()
    keeper = Keeper(guest, 0.0, essential=True)
    guest.exit_code = 2
    guest.words = "admin: 127.0.0.1:8080 cannot be had: address already in use"
    with pytest.raises(DollError, match="address already in use"):
        keeper.look(1.0)


@pytest.mark.parametrize("error", [UnavailableError("no memory\nat all"), OSError(11, "try again")])
def test_failed_start_counts_as_a_death(error: Exception) -> None:
    guest = Guest()
    keeper = Keeper(guest, 0.0)
    guest.exit_code, guest.refusal = 1, error
    keeper.look(0.0)
    assert "worker-1 cannot be started" in keeper.look(1.0)
    guest.refusal = None
    assert keeper.look(2.0) == keeper.look(3.0) == ""
    assert guest.starts == 1


def test_process_that_can_never_be_restarted_is_given_up() -> None:
    guest = Guest()
    keeper = Keeper(guest, 0.0, essential=True)
    guest.exit_code, guest.refusal = -9, DollError("all records are gone")
    keeper.look(0.0)
    with pytest.raises(DollError, match=r"^all records are gone$"):
        keeper.look(1.0)


def test_all_processes_are_watched_until_the_end() -> None:
    first, second, reported, now = Guest(), Guest(), list[str](), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if round(now / LOOK_S) in (5, 50):
            first.exit_code = -signal.SIGKILL
        if round(now / LOOK_S) == 20:
            second.exit_code = 1

    keepers = [Keeper(first, now), Keeper(second, now)]
    keep(keepers, lambda: now > 60.0, reported.append, lambda: now, sleep)

    assert (first.starts, second.starts, len(reported)) == (2, 1, 3)
