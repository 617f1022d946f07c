"""The processes of a demo: who is there, who is preempted without notice, who fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.embedded.services import Service, stop_all
from common.errors import DollError
from services.cli.demo.plan import Preemption

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.settings import Settings
    from services.cli.demo.plan import Plan
    from services.cli.demo.screen import Screen


class Cast:
    """One coordinator and the workers, started when it is made.

    Args:
        plan: How many, and when one of them is preempted.
        settings: Of the servers.
        logs: Folder for what they say.
        screen: Where it is told what happens to them.
    """

    def __init__(self, plan: Plan, settings: Settings, logs: Path, screen: Screen) -> None:
        self._screen = screen
        self._preemption = Preemption(plan.records // 2, plan.away_s)
        self.killed_at: float | None = None
        self.preemptions = 0
        own = settings.model_copy(update={"threads": 1})
        self._services = [Service("coordinator", "coordinator-1", own, logs)]
        names = [f"worker-{number}" for number in range(1, plan.workers + 1)]
        self.workers = frozenset(names)
        arguments = ("--job", plan.name)
        self._services += [Service("worker", name, own, logs, arguments) for name in names]
        self._victim = self._services[-1]
        self._victim_away = False

    @property
    def complete(self) -> bool:
        """Whether the worker that was preempted has been started again."""
        return self._preemption.over

    def turn(self, sent: int, now: float) -> None:
        """Preempt and bring back what is due.

        Raises:
            DollError: If one of them ended by itself; its last words are shown.
        """
        for service in self._services:
            code = service.exit_code
            if code is not None and not (self._victim_away and service is self._victim):
                self._screen.quote(service.last_words())
                raise DollError(
                    f"{service.name} ended by itself with status {code}; all it said is in"
                    f" {service.log}"
                )
        match self._preemption.due(sent, now):
            case "kill":
                self._victim.kill()
                self._victim_away = True
                self.preemptions += 1
                self.killed_at = now
                self._screen.happened(f"{self._victim.name} killed without notice", now, "red")
            case "bring back":
                self._victim.restart()
                self._victim_away = False
                self._screen.happened(f"{self._victim.name} started again", now, "green")
            case None:
                pass

    def stop(self) -> None:
        """Let all of them leave well."""
        stop_all(self._services)
