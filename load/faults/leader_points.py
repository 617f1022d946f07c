"""A coordinator that ends itself in the middle of its work: at the point that a file names.

    python -m load.faults.leader_points --name c1 FOLDER

It is the coordinator of the product, but looks for the file at each step. Whoever
comes to the point writes into it who that was, by its epoch, and when (`monotonic`), moves it away
and is gone, as by SIGKILL: nothing is closed, flushed or given back.
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

# In the order of a leader's life. The first three are of a takeover: whoever led before must go.
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
    """The file that names a point; where it was moved to, see `died`."""
    return folder / "point"


def died(folder: Path) -> Path:
    """The file that says who came to one, and when."""
    return folder / "died"


class _MortalCoordinator(JobCoordinator):
    """A replica's part in a job, which ends its process at the point that is named."""

    folder = Path()
    _epoch = -1  # of its Lead
    _members_named = False
    _attempt: AttemptId | None = None  # newest that members were told to enter
    _by: AttemptId | None = None  # newest that members were told to apply

    def decide(self, event: events.CoordinatorEvent) -> None:
        """Before the machine takes it in."""
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
        """Before and after it is done."""
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
        with suppress(FileNotFoundError):  # nobody is to end
            if file.read_text() == point:
                file.write_text(f"{self._epoch} {monotonic()}")
                file.rename(died(self.folder))
                os.kill(os.getpid(), SIGKILL)


if __name__ == "__main__":
    _MortalCoordinator.folder = Path(sys.argv.pop())
    sys.exit(main(_MortalCoordinator))
