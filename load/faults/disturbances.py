"""Kills, starts and stops processes of a job, and measures the cost.

An update's delay is the time of its round, from trigger to update, less the median of the
undisturbed rounds between the disturbances.
"""

from __future__ import annotations

import time
from datetime import datetime
from functools import partial
from random import Random
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from load.faults.leader_points import AT_TAKEOVER, POINTS, died, named
from load.harness.processor import used_s as processor_s
from load.harness.stack import NotMeasuredError, await_until, events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from common.embedded.services import EmbeddedService
    from load.faults.drill import Drill
    from load.harness.witness import SeenRound

_LEAVE_S = 30.0
# Shortest deadline of a job.
_FLOOR_S = 0.5
_WARM_S = 60.0
_POINT_S = 30.0


class Disturbance(NamedTuple):
    """One process that was disturbed, and the times measured."""

    process: str
    # Values compared with the bar.
    values_ms: list[float]
    # Other times, by name.
    parts_ms: dict[str, float]
    # How it went, such as the way a loss was noticed. The report counts equal notes.
    note: str = ""


def kill_workers(drill: Drill, kills: int) -> Iterator[Disturbance]:
    """SIGKILL the workers in turn in the middle of their gradients, and restart each.

    Raises:
        NotMeasuredError: If a process does not come back, or half of the kills come too late.
    """
    victims = _in_turn(drill)

    def kill() -> Disturbance | None:
        undisturbed, victim = drill.await_undisturbed(), next(victims)
        round_ = _middle_of_round(drill, victim)
        killed_at, ended_at = _killed(drill, victim, round_)
        again_at = round_.given_again_at(round_.asked_of(victim.name), away_from=victim.name)
        if again_at is None:
            # The kill came too late: no batch was reassigned, because the gradient was sent before.
            return None
        drill.await_undisturbed()
        rounds = drill.witness.rounds()
        after = [each for each in rounds if each.began_at > round_.began_at and each.applied_at]
        recovered_ms = 1e3 * ((round_.applied_at or 0.0) - killed_at)
        noticed_ms = 1e3 * (again_at - killed_at)
        return Disturbance(
            victim.name,
            [recovered_ms],
            {
                "until its system has freed its memory": 1e3 * (ended_at - killed_at),
                "until others are asked": noticed_ms,
                "from there: read back, gradient, update": recovered_ms - noticed_ms,
                "undisturbed round": _median_ms(undisturbed),
                "slowest round after": 1e3 * max(each.seconds for each in after),
            },
            _road(drill, round_, victim, again_at),
        )

    return _in_time(kill, kills)


def _killed(drill: Drill, victim: EmbeddedService, round_: SeenRound) -> tuple[float, float]:
    """Kill a worker and restart it after the round.

    Returns the times of the kill and of its exit.
    """
    killed_at = monotonic()
    victim.kill()
    ended_at = monotonic()
    drill.await_applied(round_)
    drill.bring_back(victim)
    return killed_at, ended_at


def _in_time(kill: Callable[[], Disturbance | None], kills: int) -> Iterator[Disturbance]:
    """Kill until this many kills came in time.

    Raises:
        NotMeasuredError: If more than half of the kills come too late.
    """
    missed = 0
    for _ in range(kills):
        while (found := kill()) is None:
            missed += 1
            if missed > kills:
                raise NotMeasuredError("kills came too late, because the machine is too busy")
        yield found


def kill_members(drill: Drill, kills: int) -> Iterator[Disturbance]:
    """SIGKILL the workers in turn while members add gradients up, and restart each.

    Raises:
        NotMeasuredError: If a process does not come back, or half of the kills come too late.
    """
    draw, victims = Random(1), _in_turn(drill)  # noqa: S311 -- when to strike, no secret

    def kill() -> Disturbance | None:
        undisturbed, victim = drill.await_undisturbed(), next(victims)
        usual_s = median(map(_attempt_s, undisturbed))
        round_ = drill.await_attempt()
        time.sleep(draw.uniform(0.0, usual_s))
        killed_at, ended_at = _killed(drill, victim, round_)
        if killed_at >= (round_.applied_at or 0.0):
            return None
        return Disturbance(
            victim.name,
            [1e3 * ((round_.applied_at or 0.0) - killed_at)],
            {
                "until its system has freed its memory": 1e3 * (ended_at - killed_at),
                "undisturbed, from Reduce to update": 1e3 * usual_s,
                "undisturbed round": _median_ms(undisturbed),
            },
            "added up once more" if len(round_.attempts) > 1 else "enough had finished",
        )

    return _in_time(kill, kills)


def start_workers(drill: Drill, starts: int) -> Iterator[Disturbance]:
    """Start one more worker on a job that trains, and stop it with notice.

    Raises:
        NotMeasuredError: If the worker contributes no gradient, or does not leave cleanly.
    """
    for number in range(starts):
        undisturbed = drill.await_undisturbed()
        began_at, began_on = monotonic(), time.time()
        worker = drill.start_another(number)
        first = drill.await_gradient(worker)
        used_s = processor_s(worker.pid)
        logged = [
            1e3 * (_logged_s(events(worker, event)[0]) - began_on)
            for event in ("service_started", "worker_joins", "partitions_assigned")
        ]
        asked_ms = 1e3 * (first.began_at - began_at)
        gradient_ms = 1e3 * ((first.applied_at or 0.0) - began_at)
        worker.ask_to_end()
        await_until(lambda: worker.exit_code is not None, _LEAVE_S, f"{worker.name} leaves")  # noqa: B023 -- awaited in this pass
        yield Disturbance(
            worker.name,
            [gradient_ms],
            {
                "its code is read": logged[0],
                "it joins the job": logged[1] - logged[0],
                "it has partitions": logged[2] - logged[1],
                "it receives its first order": asked_ms - logged[2],
                "from there to the update": gradient_ms - asked_ms,
                "processor, all its threads": 1e3 * used_s,
                "undisturbed round": _median_ms(undisturbed),
            },
        )


def _attempt_s(round_: SeenRound) -> float:
    """Return the time from the first order to members to reduce until their update."""
    return (round_.applied_at or 0.0) - min(round_.attempts.values())


def ask_to_leave(drill: Drill, times: int) -> Iterator[Disturbance]:
    """SIGTERM the workers in turn in the middle of a round, and restart each.

    Raises:
        NotMeasuredError: If a process does not come back, or a worker does not leave cleanly.
    """
    victims = _in_turn(drill)
    for _ in range(times):
        undisturbed, victim = drill.await_undisturbed(), next(victims)
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
        delays_ms = [1e3 * each.seconds - usual_ms for each in touched]
        further = [each.most_asked() - conditions.share for each in touched]
        both = zip(delays_ms, further, strict=True)
        yield Disturbance(
            victim.name,
            [delay_ms - 1e3 * conditions.gradient_s * count for delay_ms, count in both],
            {
                "worst delay, including extra gradients of the remaining workers": max(delays_ms),
                "until its process has ended": 1e3 * (left_at - asked_at),
                "undisturbed round": usual_ms,
            },
        )


def kill_leaders(drill: Drill, kills: int) -> Iterator[Disturbance]:
    """SIGKILL the leader repeatedly. Each killed leader restarts as the next standby.

    Raises:
        NotMeasuredError: If no standby takes over, or a process does not come back.
    """
    begun_s = dict.fromkeys((each.name for each in drill.coordinators), 0.0)  # seconds since 1970
    for _ in range(kills):
        epoch, leader = _warm(drill, begun_s)
        killed_at, killed_on = monotonic(), time.time()
        leader.kill()
        first = drill.await_leader(after=epoch)
        recovered_ms = 1e3 * (first.began_at - killed_at)
        parts_ms = _takeover_ms(drill, first.model.epoch, killed_on, recovered_ms)
        yield Disturbance(leader.name, [recovered_ms], parts_ms)
        leader.restart()
        begun_s[leader.name] = time.time()


def end_leaders(drill: Drill, folder: Path) -> Iterator[Disturbance]:
    """End a leader at each point of its work, once. Each restarts as a standby.

    Args:
        drill: Runs coordinators of `load.faults.leader_points`.
        folder: Folder of the file that names the point.

    Raises:
        NotMeasuredError: If a leader does not reach a point, no standby takes over, or a process
            does not come back.
    """
    begun_s = dict.fromkeys((each.name for each in drill.coordinators), 0.0)  # seconds since 1970
    for point in POINTS:
        drill.await_members()
        _, leader = _standing_by(drill, begun_s)
        died(folder).unlink(missing_ok=True)
        prepared = folder / "next"
        prepared.write_text(point)
        prepared.rename(named(folder))
        if point in AT_TAKEOVER:
            leader.kill()
        await_until(died(folder).exists, _POINT_S, f"a leader comes to: {point}")
        epoch, died_at = died(folder).read_text().split()
        died_on = time.time() - (monotonic() - float(died_at))
        first = drill.await_later(int(epoch))
        recovered_ms = 1e3 * (first.began_at - float(died_at))
        parts_ms = _takeover_ms(drill, first.model.epoch, died_on, recovered_ms)
        ended = [each for each in drill.coordinators if each.exit_code is not None]
        yield Disturbance(" ".join(each.name for each in ended), [recovered_ms], parts_ms, point)
        for each in ended:
            each.restart()
            begun_s[each.name] = time.time()


def _warm(drill: Drill, begun_s: Mapping[str, float]) -> tuple[int, EmbeddedService]:
    """Wait until rounds are undisturbed and all others stand by.

    Returns the leader and its epoch.
    """
    drill.await_undisturbed()
    return _standing_by(drill, begun_s)


def _standing_by(drill: Drill, begun_s: Mapping[str, float]) -> tuple[int, EmbeddedService]:
    epoch = drill.witness.rounds()[-1].model.epoch
    leader = _leader(drill, epoch)
    for standby in drill.coordinators:
        if standby is not leader:
            warm = partial(_stands_by, standby, begun_s[standby.name])
            await_until(warm, _WARM_S, f"{standby.name} stands by")
    return epoch, leader


def _in_turn(drill: Drill) -> Iterator[EmbeddedService]:
    while True:
        yield from drill.workers


def _middle_of_round(drill: Drill, worker: EmbeddedService) -> SeenRound:
    """Wait until a worker has computed half of its next gradient."""
    round_ = drill.await_order(worker)
    # Sleep, because the gradient is a timed wait, too, and no event marks its middle.
    time.sleep(max(0.0, round_.began_at + drill.conditions.gradient_s / 2 - monotonic()))
    return round_


def _road(drill: Drill, round_: SeenRound, victim: EmbeddedService, again_at: float) -> str:
    """Return what made the coordinator reassign batches: the noticed loss, or a deadline.

    A deadline is at least the floor plus, for each batch, a quantile of gradient times, none of
    which is below the timed wait.
    """
    conditions = drill.conditions
    batches = len(round_.asked_of(victim.name))
    earliest_s = _FLOOR_S + batches * conditions.gradient_s
    return "seen dead" if again_at - round_.began_at < earliest_s else "deadline"


def _median_ms(rounds: list[SeenRound]) -> float:
    return 1e3 * median(each.seconds for each in rounds)


def _stands_by(service: EmbeddedService, since_s: float) -> bool:
    """True if the service has logged `standby` since it was last started."""
    return any(_logged_s(entry) >= since_s for entry in events(service, "standby"))


def _leader(drill: Drill, epoch: int) -> EmbeddedService:
    for coordinator in drill.coordinators:
        if any(entry["epoch"] == epoch for entry in events(coordinator, "leader_elected")):
            return coordinator
    raise NotMeasuredError(f"no coordinator logged that it leads with epoch {epoch}")


def _takeover_ms(drill: Drill, epoch: int, since_s: float, all_ms: float) -> dict[str, float]:
    """Return the parts of a takeover since a moment in seconds since 1970."""
    successor = _leader(drill, epoch)
    stood_ms = _last_ms(successor, "stands_to_lead", since_s)
    led_ms = _last_ms(successor, "leader_elected", since_s)
    return {
        "until the lease is free and snapshots are read": stood_ms,
        "until its Lead is read back": led_ms - stood_ms,
        "until its first orders": all_ms - led_ms,
    }


def _last_ms(service: EmbeddedService, event: str, since_s: float) -> float:
    """Return the ms from a moment, in seconds since 1970, to the service's last log of an event."""
    return 1e3 * (_logged_s(events(service, event)[-1]) - since_s)


def _logged_s(entry: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(entry["time"]).timestamp()
