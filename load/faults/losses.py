"""What it costs when a worker goes in the middle of a round: killed without notice, or asked to go.

How much later an update completes is its round's time, from trigger to update, less the median of
the undisturbed rounds between the disturbances.
"""

from __future__ import annotations

import time
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from load.harness.stack import NotMeasuredError, await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.embedded.services import Service
    from load.faults.drill import Drill
    from load.harness.witness import SeenRound

_LEAVE_S = 30.0


class Recovery(NamedTuple):
    """One SIGKILL in the middle of a gradient; all times but the last from the kill on."""

    worker: str
    recovered_ms: float  # until the update that was in flight
    noticed_ms: float  # until the trigger that asks others for its batches
    road: str  # how that came: "seen dead", or its "deadline"
    undisturbed_ms: float  # what the round would have taken: median of those just before
    slowest_after_ms: float  # of the rounds from then on, until all was well again

    @property
    def values_ms(self) -> list[float]:
        """What is judged."""
        return [self.recovered_ms]

    @property
    def parts_ms(self) -> dict[str, float]:
        """Where its time goes, and what other rounds took."""
        return {
            "until others are asked": self.noticed_ms,
            "from there: read back, gradient, update": self.recovered_ms - self.noticed_ms,
            "undisturbed round": self.undisturbed_ms,
            "slowest round after": self.slowest_after_ms,
        }

    @property
    def note(self) -> str:
        """By which road."""
        return self.road


class Leaving(NamedTuple):
    """One SIGTERM in the middle of a round."""

    worker: str
    left_ms: float  # until its process had ended
    undisturbed_ms: float  # median of the rounds just before
    delays_ms: list[float]  # of each update until then
    computing_ms: list[float]  # what of it is further gradients in the fullest hands

    @property
    def values_ms(self) -> list[float]:
        """What is judged: the delay of each update, but for what fewer workers take longer for."""
        both = zip(self.delays_ms, self.computing_ms, strict=True)
        return [delay_ms - further_ms for delay_ms, further_ms in both]

    @property
    def parts_ms(self) -> dict[str, float]:
        """What else was timed."""
        return {
            "worst delay, further gradients of the fewer workers included": max(self.delays_ms),
            "until its process has ended": self.left_ms,
            "undisturbed round": self.undisturbed_ms,
        }

    @property
    def note(self) -> str:
        """Nothing."""
        return ""


def kill_workers(drill: Drill, kills: int) -> Iterator[Recovery]:
    """SIGKILL one worker after the other in the middle of its gradient, and bring each back.

    Raises:
        NotMeasuredError: If something does not come back, or every second kill comes too late.
    """
    missed, victims = 0, _in_turn(drill)
    for _ in range(kills):
        while True:
            undisturbed, victim = drill.await_calm(), next(victims)
            round_ = _middle_of_round(drill, victim)
            killed_at = monotonic()
            victim.kill()
            drill.await_applied(round_)
            drill.bring_back(victim)
            again_at = round_.given_again_at(round_.asked_of(victim.name), away_from=victim.name)
            if again_at is not None:
                break
            missed += 1  # its gradient was on its way
            if missed > kills:
                raise NotMeasuredError("kills come too late: the machine is too busy")
        drill.await_calm()
        rounds = drill.witness.rounds()
        after = [each for each in rounds if each.began_at > round_.began_at and each.applied_at]
        yield Recovery(
            victim.name,
            recovered_ms=1e3 * ((round_.applied_at or 0.0) - killed_at),
            noticed_ms=1e3 * (again_at - killed_at),
            road=_road(drill, round_, victim, again_at),
            undisturbed_ms=_median_ms(undisturbed),
            slowest_after_ms=1e3 * max(each.seconds for each in after),
        )


def ask_to_leave(drill: Drill, times: int) -> Iterator[Leaving]:
    """SIGTERM one worker after the other in the middle of a round, and bring each back.

    Raises:
        NotMeasuredError: If something does not come back, or a worker does not leave well.
    """
    victims = _in_turn(drill)
    for _ in range(times):
        undisturbed, victim = drill.await_calm(), next(victims)
        round_ = _middle_of_round(drill, victim)
        asked_at = monotonic()
        victim.ask_to_end()
        await_until(lambda: victim.exit_code is not None, _LEAVE_S, f"{victim.name} leaves")  # noqa: B023 -- awaited in this pass
        left_at = monotonic()
        if victim.exit_code != 0:
            raise NotMeasuredError(f"{victim.name} ended with {victim.exit_code}")
        rounds = drill.witness.rounds()
        touched = [each for each in rounds if round_.began_at <= each.began_at < left_at]
        drill.await_applied(*touched)
        drill.bring_back(victim)
        usual_ms, conditions = _median_ms(undisturbed), drill.conditions
        further = [each.most_asked() - conditions.share for each in touched]
        yield Leaving(
            victim.name,
            left_ms=1e3 * (left_at - asked_at),
            undisturbed_ms=usual_ms,
            delays_ms=[1e3 * each.seconds - usual_ms for each in touched],
            computing_ms=[1e3 * conditions.gradient_s * count for count in further],
        )


def _in_turn(drill: Drill) -> Iterator[Service]:
    while True:
        yield from drill.workers


def _middle_of_round(drill: Drill, worker: Service) -> SeenRound:
    """Wait until a worker has computed half of its next gradient."""
    round_ = drill.await_order(worker)
    # A timed wait: the gradient is one too, and nothing says that half of it is over.
    time.sleep(max(0.0, round_.began_at + drill.conditions.gradient_s / 2 - monotonic()))
    return round_


def _road(drill: Drill, round_: SeenRound, victim: Service, again_at: float) -> str:
    """What made the coordinator ask others: a deadline is never earlier than this.

    Floor, and for each batch a quantile of gradient times, none of which is below the timed wait.
    """
    conditions = drill.conditions
    batches = len(round_.asked_of(victim.name))
    earliest_s = conditions.deadline_floor_s + batches * conditions.gradient_s
    return "seen dead" if again_at - round_.began_at < earliest_s else "deadline"


def _median_ms(rounds: list[SeenRound]) -> float:
    return 1e3 * median(each.seconds for each in rounds)
