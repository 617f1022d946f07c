"""Disturbs a job and tells what it cost: workers killed, started or asked to leave, leaders killed.

How much later an update completes is its round's time, from trigger to update, less the median of
the undisturbed rounds between the disturbances.
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
_FLOOR_S = 0.5  # shortest deadline of a job
_WARM_S = 60.0
_POINT_S = 30.0


class Disturbance(NamedTuple):
    """One process that was disturbed, and what came of it."""

    process: str
    values_ms: list[float]  # what is judged
    parts_ms: dict[str, float]  # what else was timed, by what it is
    note: str = ""  # what is counted instead


def kill_workers(drill: Drill, kills: int) -> Iterator[Disturbance]:
    """SIGKILL one worker after the other in the middle of its gradient, and bring each back.

    Raises:
        NotMeasuredError: If something does not come back, or every second kill comes too late.
    """
    victims = _in_turn(drill)

    def kill() -> Disturbance | None:
        undisturbed, victim = drill.await_undisturbed(), next(victims)
        round_ = _middle_of_round(drill, victim)
        killed_at, ended_at = _killed(drill, victim, round_)
        again_at = round_.given_again_at(round_.asked_of(victim.name), away_from=victim.name)
        if again_at is None:  # its gradient was on its way
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
    """Kill a worker and bring it back after a round; returns when it was killed and had ended."""
    killed_at = monotonic()
    victim.kill()
    ended_at = monotonic()
    drill.await_applied(round_)
    drill.bring_back(victim)
    return killed_at, ended_at


def _in_time(kill: Callable[[], Disturbance | None], kills: int) -> Iterator[Disturbance]:
    """Kill until so many kills did not come too late.

    Raises:
        NotMeasuredError: If every second one does.
    """
    missed = 0
    for _ in range(kills):
        while (found := kill()) is None:
            missed += 1
            if missed > kills:
                raise NotMeasuredError("kills came too late: the machine is too busy")
        yield found


def kill_members(drill: Drill, kills: int) -> Iterator[Disturbance]:
    """SIGKILL one worker after the other while all add up, and bring each back.

    Raises:
        NotMeasuredError: If something does not come back, or every second kill comes too late.
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
    """Start one more worker on a job that trains, and let it leave again.

    Raises:
        NotMeasuredError: If it does not come to a gradient, or does not leave well.
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
                "it is asked for a gradient": asked_ms - logged[2],
                "from there to the update": gradient_ms - asked_ms,
                "processor, all its threads": 1e3 * used_s,
                "undisturbed round": _median_ms(undisturbed),
            },
        )


def _attempt_s(round_: SeenRound) -> float:
    """From when members were told to enter to their update."""
    return (round_.applied_at or 0.0) - min(round_.attempts.values())


def ask_to_leave(drill: Drill, times: int) -> Iterator[Disturbance]:
    """SIGTERM one worker after the other in the middle of a round, and bring each back.

    Raises:
        NotMeasuredError: If something does not come back, or a worker does not leave well.
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
                "worst delay, further gradients of the fewer workers included": max(delays_ms),
                "until its process has ended": 1e3 * (left_at - asked_at),
                "undisturbed round": usual_ms,
            },
        )


def kill_leaders(drill: Drill, kills: int) -> Iterator[Disturbance]:
    """SIGKILL the leader again and again; each comes back as the next standby.

    Raises:
        NotMeasuredError: If nobody takes over, or something does not come back.
    """
    begun_s = dict.fromkeys((each.name for each in drill.coordinators), 0.0)  # since 1970
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
    """Let leaders end at each point of their work, once; each comes back as a standby.

    Args:
        drill: Its coordinators are of `load.faults.leader_points`.
        folder: Where those look for the point.

    Raises:
        NotMeasuredError: If one does not come to a point, nobody takes over, or something does not
            come back.
    """
    begun_s = dict.fromkeys((each.name for each in drill.coordinators), 0.0)  # since 1970
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
    """Wait until all is well and all others stand by; gives who leads, and its epoch."""
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
    # A timed wait: the gradient is one too, and nothing says that half of it is over.
    time.sleep(max(0.0, round_.began_at + drill.conditions.gradient_s / 2 - monotonic()))
    return round_


def _road(drill: Drill, round_: SeenRound, victim: EmbeddedService, again_at: float) -> str:
    """What made the coordinator ask others: a deadline is never earlier than this.

    Floor, and for each batch a quantile of gradient times, none of which is below the timed wait.
    """
    conditions = drill.conditions
    batches = len(round_.asked_of(victim.name))
    earliest_s = _FLOOR_S + batches * conditions.gradient_s
    return "seen dead" if again_at - round_.began_at < earliest_s else "deadline"


def _median_ms(rounds: list[SeenRound]) -> float:
    return 1e3 * median(each.seconds for each in rounds)


def _stands_by(service: EmbeddedService, since_s: float) -> bool:
    """Whether it has loaded all and asked for the lease in its present life."""
    return any(_logged_s(entry) >= since_s for entry in events(service, "standby"))


def _leader(drill: Drill, epoch: int) -> EmbeddedService:
    for coordinator in drill.coordinators:
        if any(entry["epoch"] == epoch for entry in events(coordinator, "leader_elected")):
            return coordinator
    raise NotMeasuredError(f"no coordinator logged that it leads with epoch {epoch}")


def _takeover_ms(drill: Drill, epoch: int, since_s: float, all_ms: float) -> dict[str, float]:
    """What a takeover was made of, since a moment in seconds since 1970."""
    successor = _leader(drill, epoch)
    stood_ms = _last_ms(successor, "stands_to_lead", since_s)
    led_ms = _last_ms(successor, "leader_elected", since_s)
    return {
        "until the lease is free and snapshots are read": stood_ms,
        "until its Lead is read back": led_ms - stood_ms,
        "until its first orders": all_ms - led_ms,
    }


def _last_ms(service: EmbeddedService, event: str, since_s: float) -> float:
    """From a moment, in seconds since 1970, to the last time that a service logged an event."""
    return 1e3 * (_logged_s(events(service, event)[-1]) - since_s)


def _logged_s(entry: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(entry["time"]).timestamp()
