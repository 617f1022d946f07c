"""A coordinator on a bench: its two topics are lists, and only the test makes events."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.core import commands as do
from common.core import events
from common.core.coordinator import Coordinator
from common.core.liveness import ALIVE, LEAVING, Heartbeat
from common.core.settings import CoordinatorSettings, Mode
from common.core.snapshots import genesis
from tests.unit.core.examples import FIRST, SAMPLES, P, answer, of_kind, ready, span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent
    from common.core.messages import (
        Assignment,
        AuditRecord,
        ControlRecord,
        LeaderStatus,
        ModelId,
        WorkerId,
    )
    from common.core.snapshots import Snapshot

# Takes a snapshot only if a test asks for it, and reports each decision.
QUIET = CoordinatorSettings(
    Mode(group_size=2),
    bound=3,
    hot_every_s=None,
    checkpoint_every_s=None,
    checkpoint_every_updates=None,
    leader_status_news_s=0.0,
)


def changed(settings: CoordinatorSettings = QUIET, **changes: Any) -> CoordinatorSettings:  # noqa: ANN401 -- fields of all kinds
    """Return a copy of the settings with new values for fields of the job or of its mode."""
    mode = {name: changes.pop(name) for name in Mode.__slots__ if name in changes}
    return replace(settings, mode=replace(settings.mode, **mode), **changes)


class Bench:
    """Coordinator, the topics that it shares with other replicas, and all its commands.

    Args:
        settings: Settings of the job.
        updates: The updates topic, shared between the benches of several replicas.
        control: The control topic, shared in the same way.
        name: Name of the replica.
    """

    def __init__(
        self,
        settings: CoordinatorSettings = QUIET,
        *,
        updates: list[AuditRecord | None] | None = None,
        control: list[ControlRecord | None] | None = None,
        name: str = "c1",
    ) -> None:
        self.machine = Coordinator(name, settings)
        self.lease_ttl_s = settings.lease_ttl_s
        self.updates = [] if updates is None else updates
        self.control = [] if control is None else control
        self.now = 0.0
        self.digest = ""  # digest of its model's layout
        self.said: list[CoordinatorCommand] = []
        self.published: list[Snapshot] = []
        self._updates_read = self._control_read = 0

    # --- newest commands ----------------------------------------------------------------------

    @property
    def leader_status(self) -> LeaderStatus:
        """Newest leader status."""
        return of_kind(self.said, do.PutLeaderStatus)[-1].leader_status

    @property
    def orders(self) -> tuple[Assignment, ...]:
        """Orders of the newest trigger."""
        return of_kind(self.said, do.PostTrigger)[-1].trigger.orders

    @property
    def epoch(self) -> int:
        """Epoch of its leadership."""
        return self.model.epoch

    @property
    def model(self) -> ModelId:
        """Id of its weights."""
        assert self.machine.leader is not None
        return self.machine.leader.model

    # --- events -------------------------------------------------------------------------------

    def feed(self, event: CoordinatorEvent) -> tuple[CoordinatorCommand, ...]:
        """Process an event; appended records are in the topic at once, but unread."""
        commands = self.machine.on(event, self.now)
        self.said += commands
        self.updates += [c.record for c in of_kind(commands, do.AppendAudit)]
        self.published += [c.snapshot for c in of_kind(commands, do.PublishSnapshot)]
        if of_kind(commands, do.Begin):
            self._control_read = of_kind(commands, do.Begin)[0].snapshot.control_position
        return commands

    def tick(self, now: float) -> tuple[CoordinatorCommand, ...]:
        """Let time pass."""
        self.now = now
        return self.feed(events.Tick())

    def stand(self, *snapshots: Snapshot) -> tuple[CoordinatorCommand, ...]:
        """Acquire the lease, find these snapshots in every search, append a Lead record.

        If none of them is of the leader in force, the candidate first waits for one as long as a
        lease lasts.
        """
        said = self.feed(events.LeaseAnswered(held=True))
        while find := of_kind(said, do.FindSnapshots):
            said = self.find(find[-1].source, *snapshots)
            if of_kind(said, do.ReleaseLease):
                self.now += self.lease_ttl_s
                said = self.feed(events.LeaseAnswered(held=True))
        return self.feed(events.SnapshotRestored(len(self.updates), self.digest))

    def find(self, source: events.Source, *snapshots: Snapshot) -> tuple[CoordinatorCommand, ...]:
        """Report these snapshots as found in a source. `genesis` always has version 0 alone."""
        self._updates_read = end = len(self.updates)
        found = (genesis(FIRST),) if source == "genesis" else snapshots
        return self.feed(events.SnapshotsFound(source, found, tuple(enumerate(self.updates)), end))

    def read_updates(self, count: int | None = None) -> tuple[CoordinatorCommand, ...]:
        """Read this many records of the updates topic, or up to its end."""
        begin = self._updates_read
        end = len(self.updates) if count is None else begin + count
        self._updates_read = end
        return self.feed(events.UpdatesRead(tuple(enumerate(self.updates))[begin:end]))

    def lead(self, *snapshots: Snapshot) -> tuple[CoordinatorCommand, ...]:
        """Become a candidate, and read its own Lead record back."""
        self.stand(*snapshots)
        said = self.read_updates()
        # Drop the snapshot that each leader publishes first.
        self.published.clear()
        return said

    def read_control(self, *claims: ControlRecord | None) -> tuple[CoordinatorCommand, ...]:
        """Append these claims and read the control topic to its end."""
        self.control += claims
        records = tuple(enumerate(self.control))[self._control_read :]
        self._control_read = len(self.control)
        return self.feed(events.ControlRead(records))

    def see(self, *workers: WorkerId, leaving: Iterable[WorkerId] = (), digest: str = "") -> None:
        """Report the workers' heartbeats."""
        beats = dict.fromkeys(workers, Heartbeat(ALIVE, digest))
        beats |= dict.fromkeys(leaving, Heartbeat(LEAVING, digest))
        self.feed(events.WorkersSeen(beats))

    def announce(self, *workers: WorkerId) -> tuple[CoordinatorCommand, ...]:
        """Let each of these workers claim the next SAMPLES records of partition P, in turn."""
        start = self.leader_status.claimed[P]
        starts = range(start, start + SAMPLES * len(workers), SAMPLES)
        claims = [ready(w, span(P, s, s + SAMPLES)) for w, s in zip(workers, starts, strict=True)]
        return self.read_control(*claims)

    def compute(self) -> tuple[CoordinatorCommand, ...]:
        """Answer all orders of the newest trigger."""
        replies = tuple(answer(order, self.model) for order in self.orders)
        return self.feed(events.RepliesRead(replies))
