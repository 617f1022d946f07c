"""Aggregation by the coordinator, from gradient vectors that pass through the board.

The alternative, aggregation among members, is `common.core.members.leading`. A leader uses both
through the same interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from common.core import commands as do
from common.core.messages import Gradient

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand
    from common.core.gradient_counting import Rounds
    from common.core.messages import (
        GradientReady,
        GroupReply,
        ModelId,
        TriggerId,
        UpdateApplied,
        WorkerId,
    )
    from common.core.rounds import Round
    from common.core.settings import AggregationSettings, CoordinatorSettings
    from common.core.snapshots import Snapshot


class BoardAggregation:
    """The coordinator holds the weights, adds up the gradients and takes each step immediately."""

    news = storing = wants_checkpoint = False
    error = ""
    fallback: ModelId | None = None
    holder: WorkerId | None = None
    status: UnsetType = UNSET

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.unread_audits = settings.unread_audits
        self._parts = False
        # Versions that members can load from storage.
        self.stored = tuple["ModelId", ...]()

    def look(
        self,
        there: frozenset[WorkerId],
        live: frozenset[WorkerId],
        rounds: Rounds,
        now: float,
    ) -> None:
        """Do nothing. The aggregation does not depend on the living workers."""

    def dismiss(self) -> None:
        """Do nothing. No worker waits for permission to leave."""

    def due(self) -> float:
        """Return infinity. There is nothing to wait for."""
        return float("inf")

    def able(self, workers: frozenset[WorkerId]) -> frozenset[WorkerId]:
        """Return all workers. Each of them can fetch the model."""
        return workers

    def why_not(self, gradient: Gradient | GradientReady) -> str:
        """Return why a gradient does not count. It must contain its vector."""
        return "" if isinstance(gradient, Gradient) else "the message contains no gradient vector"

    def is_rival(self, gradient: Gradient | GradientReady) -> bool:  # noqa: ARG002
        """Return False. Any process of a worker's name may compute."""
        return False

    def receive(self, reply: GroupReply, now: float) -> tuple[CoordinatorCommand, ...]:  # noqa: ARG002
        """Reject a message of a group."""
        return (
            do.Drop(reply, "the message is for a group of members, but this job does not use one"),
        )

    def take_restarted(self) -> frozenset[WorkerId]:
        """Return no worker. A restarted process is as good as the old one."""
        return frozenset()

    def finished(self, round_: Round, draft: Callable[[], UpdateApplied], now: float) -> bool:  # noqa: ARG002
        """Return True. The sum is complete once it contains all gradients."""
        return True

    def sign(self, draft: UpdateApplied) -> UpdateApplied:
        """Return the update unchanged."""
        return draft

    def apply(
        self, round_: Round, update: UpdateApplied, *, measured: bool
    ) -> tuple[CoordinatorCommand, ...]:
        """Order the step."""
        return (do.Apply(round_.number, update, round_.learning_rate, measured),)

    def read_back(self, update: UpdateApplied) -> float | UnsetType:  # noqa: ARG002
        """Do nothing. The step was taken before."""
        return UNSET

    def discard(self, round_: Round) -> tuple[CoordinatorCommand, ...]:
        """Order to drop the sum."""
        return (do.DiscardSum(round_.number),)

    def publish(self, model: ModelId, *, whole: bool = True) -> tuple[CoordinatorCommand, ...]:
        """Publish the weights on the board."""
        return (do.PublishModel(model, whole),)

    def orders(self, trigger: TriggerId) -> UnsetType:  # noqa: ARG002
        """Return UNSET. There are no members."""
        return UNSET

    def snapshots(
        self, commands: Iterable[do.CopyWeights | do.PublishSnapshot]
    ) -> Iterator[do.CopyWeights | do.PublishSnapshot]:
        """Pass the commands on. Before a hand-over, checkpoints are also stored for members."""
        for command in commands:
            if isinstance(command, do.PublishSnapshot) and self._parts:
                yield replace(command, state=command.checkpoint)
            else:
                yield command

    def change(self, settings: AggregationSettings | None, *, parts: bool) -> None:  # noqa: ARG002
        """Record from a job change whether members are to take over the weights."""
        self._parts = parts

    def keep(self, made: ModelId) -> None:
        """Record that members can load a version from storage."""
        self.stored = (made,)

    def marked(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot. If members can load its version from storage, it says so."""
        stored = snapshot.made in self.stored
        return replace(snapshot, stored=self.stored) if stored else snapshot
