"""Slots of a fleet: a planned stop lasts until the slot is resumed, and a crash is restarted."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest

from common.config.settings import Settings
from common.embedded.services import EmbeddedService
from load.faults.fleet import Fleet, Slot
from load.harness.stack import await_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from common.runtime.fork_server import Forked

PATIENCE_S = 120.0
# A time at which every restart is due.
LATER = float("inf")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


class Sleeper(EmbeddedService):
    """An idle machine."""

    def __init__(self, name: str, folder: Path) -> None:
        self.lives = 0
        self.ignores_sigterm = False
        super().__init__("worker", name, Settings(), folder)

    def ask_to_end(self) -> None:
        """Send SIGTERM, unless the machine is to act as if it ignored the signal."""
        if not self.ignores_sigterm:
            super().ask_to_end()

    def _started(self, output: BinaryIO) -> subprocess.Popen[bytes] | Forked:
        self.lives += 1
        self._command = ["sleep", "600"]
        return super()._started(output)

    def frozen(self) -> bool:
        """Return True if the kernel has stopped the process."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].startswith("T")

    def ended(self) -> bool:
        """Return True if the process does not run."""
        return self.exit_code is not None


class Place:
    """A slot, and its machines so far."""

    def __init__(self, folder: Path) -> None:
        self.machines = list[Sleeper]()
        self._folder = folder
        self.slot = Slot(self._start)

    @property
    def machine(self) -> Sleeper:
        """Return the current machine."""
        return self.machines[-1]

    def _start(self, life: int) -> Sleeper:
        self.machines.append(Sleeper(f"m.{life}", self._folder))
        return self.machines[-1]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.slot.ask_to_end()
    made.slot.stop()


def test_killed_machine_restarts_under_its_name_on_request(place: Place) -> None:
    place.slot.kill()
    assert place.slot.look(LATER) is None
    assert place.machine.ended()
    place.slot.bring_back()
    assert not place.machine.ended()
    assert [machine.name for machine in place.machines] == ["m.1"]


def test_machine_that_left_on_notice_is_replaced_under_another_name(place: Place) -> None:
    place.slot.give_notice()
    await_until(place.machine.ended, PATIENCE_S, "the machine exits")
    assert place.slot.look(LATER) is None
    place.slot.bring_back()
    assert [machine.name for machine in place.machines] == ["m.1", "m.2"]
    assert not place.machine.ended()
    assert place.slot.overran == 0


def test_machine_that_ignores_its_notice_is_killed_when_it_expires(place: Place) -> None:
    place.machine.ignores_sigterm = True
    place.slot.give_notice()
    place.slot.bring_back()
    assert [machine.ended() for machine in place.machines] == [True, False]
    assert place.slot.overran == 1


def test_frozen_machine_continues_when_it_is_resumed(place: Place) -> None:
    place.slot.freeze()
    await_until(place.machine.frozen, PATIENCE_S, "the machine is frozen")
    place.slot.bring_back()
    await_until(lambda: not place.machine.frozen(), PATIENCE_S, "the machine continues")
    assert place.machine.lives == 1


def test_unexpected_exit_is_reported_once_and_restarted_later(place: Place) -> None:
    place.machine.kill()  # not by the fleet
    found = place.slot.look(0.0)
    assert found is not None
    assert (found.name, found.exit_code) == ("m.1", -signal.SIGKILL)
    assert place.slot.look(0.0) is None
    assert place.machine.ended()
    assert place.slot.look(LATER) is None
    assert not place.machine.ended()


def test_notice_to_a_killed_machine_is_not_an_unexpected_exit(place: Place) -> None:
    place.slot.kill()
    place.slot.give_notice()
    assert place.slot.look(LATER) is None


def test_first_machine_restarts_alone_after_all_were_killed(tmp_path: Path) -> None:
    places = [Place(tmp_path), Place(tmp_path)]
    fleet = Fleet([place.slot for place in places])
    fleet.kill_all()
    fleet.bring_back_in_turn()
    fleet.look()
    assert [place.machine.ended() for place in places] == [False, True]
    fleet.bring_all_back()
    assert [place.machine.ended() for place in places] == [False, False]
    assert fleet.unexpected == []
    fleet.stop()
