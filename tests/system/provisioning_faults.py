"""What goes wrong in a provisioning world, on purpose and by chance."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.provisioning import events
from common.provisioning.codec import encode_plan
from common.provisioning.records import ReplanAsked

if TYPE_CHECKING:
    from tests.system.provisioning_world import Process, World

LEASE_S = 3.0


class Faults:
    """Does one thing after another to a world.

    Attributes:
        last_s: Until when the last one lasts.
        hidden: Launches that the lender did not name for a while.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.chance
        self.last_s = world.now_s
        self.hidden = set[int]()

    def strike(self) -> None:
        """Do something, whatever."""
        self._lasts(0.0)
        self._chance.choice(
            (
                *(self._crash, self._crash, self._freeze, self._freeze, self._fleet_away),
                *(self._lease_moves, self._answers_lost, self._hide, self._price, self._price),
                *(self._preempt, self._fail, self._refuse, self._replan, self._pause),
                self._settings,
            )
        )()

    def _lasts(self, seconds: float) -> None:
        self.last_s = max(self.last_s, self._world.now_s + seconds)

    def _some(self) -> Process | None:
        alive = [p for p in self._world.replicas if not p.dead and not p.machine.finished]
        charged = [p for p in alive if p.machine.in_charge]
        return self._chance.choice(charged * 3 + alive) if alive else None

    def _crash(self) -> None:
        process = self._some()
        if process is not None:
            process.dead = True
            self._world.after(self._chance.uniform(0.1, 8), self._world.start)

    def _freeze(self) -> None:
        process = self._some()
        if process is not None:
            frozen_s = self._chance.uniform(1, 20)
            process.frozen_until_s = self._world.now_s + frozen_s
            self._lasts(frozen_s)
            self._world.after(frozen_s, lambda: self._world.handle(process))

    def _fleet_away(self) -> None:
        self._world.fleet.go_away()
        gone_s = self._chance.uniform(1, 12)
        self._lasts(gone_s)
        self._world.after(gone_s, self._world.fleet.come_back)

    def _answers_lost(self) -> None:
        faults = self._world.fleet.faults
        faults.answers_lost = True
        gone_s = self._chance.uniform(1, 6)
        self._lasts(gone_s)

        def mend() -> None:
            faults.answers_lost = False

        self._world.after(gone_s, mend)

    def _lease_moves(self) -> None:
        process = self._some()
        until_s = self._world.now_s + LEASE_S
        self._world.lease = None if process is None else (process.name, until_s)

    def _hide(self) -> None:
        """The lender does not name a machine for a while."""
        if launches := self._world.running():
            launch = self._chance.choice(launches)
            hidden = self._world.fleet.faults.hidden
            hidden.add(launch)
            self.hidden.add(launch)
            gone_s = self._chance.uniform(1, 15)
            self._lasts(gone_s)
            self._world.after(gone_s, lambda: hidden.discard(launch))

    def _price(self) -> None:
        world = self._world
        world.prices.set(self._chance.choice(("spot", "other")), self._chance.uniform(0.1, 1.2))
        world.told_prices.append((world.now_s, dict(world.prices.look())))

    def _preempt(self) -> None:
        running = self._world.running()
        self._world.fleet.preempt(*self._chance.sample(running, k=min(2, len(running))))

    def _fail(self) -> None:
        if launches := self._world.running():
            self._world.fleet.fail(self._chance.choice(launches))

    def _refuse(self) -> None:
        pool = self._chance.choice(self._world.settings.pool_names)
        self._world.fleet.refuse(pool)
        gone_s = self._chance.uniform(1, 15)
        self._lasts(gone_s)
        self._world.after(gone_s, lambda: self._world.fleet.offer(pool))

    def _replan(self) -> None:
        data = encode_plan(ReplanAsked(self._world.now_s, "ada", "to see"))
        self._world.after(0.1, lambda: self._world.append(data, "ada"))

    def _pause(self) -> None:
        world = self._world
        if world.wanted == "running":
            world.want("paused")
            self._lasts(10.0)

            def resume() -> None:
                if world.wanted == "paused":
                    world.want("running")

            world.after(self._chance.uniform(2, 10), resume)

    def _settings(self) -> None:
        world = self._world
        world.settings = replace(world.settings, updates=self._chance.choice((28, 50_000)))
        world.tell_all(lambda: events.SettingsChanged(world.settings))
