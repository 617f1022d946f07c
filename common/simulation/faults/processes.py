"""Common parts of simulated workers and coordinators: they die, freeze, and lose Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.simulation.faults.world import World


class SimulatedProcess:
    """A process that may die, or freeze for a while."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dead = False
        self.frozen_until = 0.0
        self._silent_until = 0.0
        # Time until which this process cannot reach Redis.
        self.redis_back_at = 0.0

    def _up(self) -> bool:
        return not self.dead and self.world.now >= self.frozen_until

    @property
    def _redis_away(self) -> bool:
        return self.world.redis_away or self.world.now < self.redis_back_at

    def _when_up(self, action: Callable[[], None]) -> None:
        """Run an action at once, or when this process is no longer frozen."""

        def act() -> None:
            if not self.dead:
                action()

        self.world.later(max(self.frozen_until - self.world.now, 0.0) + 0.001, act)

    def freeze(self, seconds: float) -> None:
        """Freeze, and later continue as if nothing had happened."""
        self.frozen_until = self.world.now + seconds
        if self.world.chance(0.5):
            # Records that it appended have not left the process either.
            self._silent_until = self.frozen_until
