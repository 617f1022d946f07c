"""Who adds gradients up: here the coordinator, from vectors that pass the board.

The other form, members among themselves, is `common.core.members.leading`; a leader asks both the
same questions.
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
    """The coordinator holds the weights, adds gradients to sums, and takes each step at once."""

    news = storing = wants_checkpoint = False
    error = ""
    fallback: ModelId | None = None
    holder: WorkerId | None = None
    status: UnsetType = UNSET

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.unread_audits = settings.unread_audits
        self._parts = False
        self.stored = tuple["ModelId", ...]()  # versions that members find in storage

    def look(
        self,
        there: frozenset[WorkerId],
        live: frozenset[WorkerId],
        rounds: Rounds,
        now: float,
    ) -> None:
        """Nothing of it depends on who lives."""

    def dismiss(self) -> None:
        """Nobody waits to be let go."""

    def due(self) -> float:
        """It waits for nothing."""
        return float("inf")

    def able(self, workers: frozenset[WorkerId]) -> frozenset[WorkerId]:
        """Whoever lives can fetch the model."""
        return workers

    def why_not(self, gradient: Gradient | GradientReady) -> str:
        """Why it does not count: its numbers must have come with it."""
        return "" if isinstance(gradient, Gradient) else "its numbers stayed where they are"

    def is_rival(self, gradient: Gradient | GradientReady) -> bool:  # noqa: ARG002
        """Return False: a worker is as good as another process of its name."""
        return False

    def receive(self, reply: GroupReply, now: float) -> tuple[CoordinatorCommand, ...]:  # noqa: ARG002
        """Nobody was asked for it."""
        return (do.Drop(reply, "of a group, and this job has none"),)

    def take_reborn(self) -> frozenset[WorkerId]:
        """A worker is as good as another that comes back under its name."""
        return frozenset()

    def finished(self, round_: Round, draft: Callable[[], UpdateApplied], now: float) -> bool:  # noqa: ARG002
        """The sum is complete once all gradients are in it."""
        return True

    def sign(self, draft: UpdateApplied) -> UpdateApplied:
        """The update as it is appended."""
        return draft

    def apply(
        self, round_: Round, update: UpdateApplied, *, measured: bool
    ) -> tuple[CoordinatorCommand, ...]:
        """Take the step."""
        return (do.Apply(round_.number, update, round_.learning_rate, measured),)

    def read_back(self, update: UpdateApplied) -> float | UnsetType:  # noqa: ARG002
        """The step was taken before."""
        return UNSET

    def discard(self, round_: Round) -> tuple[CoordinatorCommand, ...]:
        """Forget the sum."""
        return (do.DiscardSum(round_.number),)

    def publish(self, model: ModelId, *, whole: bool = True) -> tuple[CoordinatorCommand, ...]:
        """Put the weights where workers find them."""
        return (do.PublishModel(model, whole),)

    def orders(self, trigger: TriggerId) -> UnsetType:  # noqa: ARG002
        """Nobody holds anything."""
        return UNSET

    def snapshots(
        self, commands: Iterable[do.CopyWeights | do.PublishSnapshot]
    ) -> Iterator[do.CopyWeights | do.PublishSnapshot]:
        """Weights travel beside each; members are to find them, too, if they are to have them."""
        for command in commands:
            if isinstance(command, do.PublishSnapshot) and self._parts:
                yield replace(command, state=command.checkpoint)
            else:
                yield command

    def change(self, settings: AggregationSettings | None, *, parts: bool) -> None:  # noqa: ARG002
        """The job was changed; whether others are to hold the weights."""
        self._parts = parts

    def keep(self, made: ModelId) -> None:
        """A version is where members copy it from."""
        self.stored = (made,)

    def marked(self, snapshot: Snapshot) -> Snapshot:
        """Of members nothing is to be said but that they may begin with it."""
        stored = snapshot.made in self.stored
        return replace(snapshot, stored=self.stored) if stored else snapshot
