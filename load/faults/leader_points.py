"""A coordinator that kills itself in the middle of its work, at the point that a file names.

    python -m load.faults.leader_points --name c1 FOLDER

This is the product's coordinator, but it looks for the file at each step. A coordinator that
reaches the point writes its epoch and the time (`monotonic`) into the file, moves the file and
sends itself SIGKILL: it closes, flushes and releases nothing.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from time import monotonic
from typing import TYPE_CHECKING

from common.core import commands as do
from common.core import events
from common.core.messages import AttemptId, GradientReady, Reduced, UpdateApplied, UpdateTrigger
from services.coordinator.__main__ import main
from services.coordinator.loop import JobCoordinator

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand

# Points in the order in which a leader reaches them. The first three belong to a takeover, so the
# previous leader must end first.
AT_TAKEOVER = ("its Lead counts", "members asked what they hold", "members named")
POINTS = (
    *AT_TAKEOVER,
    "gradients ordered",
    "a gradient ready",
    "all gradients ready",
    "members told to enter",
    "a member has finished",
    "all members have finished",
    "its update sent",
    "its update in Kafka",
    "its update read back",
)


def named(folder: Path) -> Path:
    """Return the path of the file that names a point. A dying coordinator moves it to `died`."""
    return folder / "point"


def died(folder: Path) -> Path:
    """Return the path of the file with the epoch and the time of a death."""
    return folder / "died"


class _MortalCoordinator(JobCoordinator):
    """A replica's part in a job that kills its process at the named point."""

    folder = Path()
    _epoch = -1  # Epoch of this replica's Lead.
    _members_named = False
    # Newest attempt that members were ordered to reduce.
    _attempt: AttemptId | None = None
    # Newest attempt that members were ordered to apply.
    _by: AttemptId | None = None

    def decide(self, event: events.CoordinatorEvent) -> None:
        """End at points before the state machine processes an event."""
        match event:
            case events.RepliesRead(replies):
                if any(isinstance(reply, GradientReady) for reply in replies):
                    self._reach("a gradient ready")
                if any(isinstance(reply, Reduced) for reply in replies):
                    self._reach("a member has finished")
            case events.UpdatesRead(records):
                if any(isinstance(record, UpdateApplied) for _, record in records):
                    self._reach("its update in Kafka")
        super().decide(event)

    def carry_out(self, command: CoordinatorCommand) -> list[events.CoordinatorEvent]:
        """End at points before and after a command is carried out."""
        match command:
            case do.PostTrigger(trigger):
                self._before_trigger(trigger)
            case do.AppendAudit(UpdateApplied()):
                self._reach("all members have finished")
        made = super().carry_out(command)
        match command:
            case do.Begin(epoch):
                self._epoch, self._members_named = epoch, False
                self._attempt = self._by = None
                self._reach("its Lead counts")
            case do.PostTrigger(trigger):
                self._after_trigger(trigger)
            case do.AppendAudit(UpdateApplied()):
                self._reach("its update sent")
        return made

    def _before_trigger(self, trigger: UpdateTrigger) -> None:
        group = trigger.group
        if not group:
            return
        if group.reduce is not None and group.reduce.attempt != self._attempt:
            self._reach("all gradients ready")
        if group.by is not None and group.by != self._by and self._attempt is not None:
            self._reach("its update read back")

    def _after_trigger(self, trigger: UpdateTrigger) -> None:
        group = trigger.group
        if not group:
            return
        if trigger.id.number == 1:
            self._reach("members asked what they hold")
        if group.membership.members and not self._members_named:
            self._members_named = True
            self._reach("members named")
        if trigger.orders:
            self._reach("gradients ordered")
        if group.reduce is not None and group.reduce.attempt != self._attempt:
            self._attempt = group.reduce.attempt
            self._reach("members told to enter")
        self._by = group.by

    def _reach(self, point: str) -> None:
        file = named(self.folder)
        with suppress(FileNotFoundError):
            # Without the file, no coordinator is to end.
            if file.read_text() == point:
                file.write_text(f"{self._epoch} {monotonic()}")
                file.rename(died(self.folder))
                os.kill(os.getpid(), SIGKILL)


if __name__ == "__main__":
    _MortalCoordinator.folder = Path(sys.argv.pop())
    sys.exit(main(_MortalCoordinator))
