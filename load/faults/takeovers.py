"""How long a job stands still when its leader is killed, with a warm standby beside it."""

from __future__ import annotations

import time
from datetime import datetime
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from load.faults.drill import said
from load.harness.stack import NotMeasuredError, await_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from common.embedded.services import Service
    from load.faults.drill import Drill

_WARM_S = 60.0


class Takeover(NamedTuple):
    """One SIGKILL of a leader; all times from the kill on, by the log of its successor."""

    leader: str
    recovered_ms: float  # until a trigger of a later epoch was on the board
    stood_ms: float  # until the standby stood as a candidate: it had the lease and a snapshot
    led_ms: float  # until it had read its own Lead back

    @property
    def values_ms(self) -> list[float]:
        """What is judged."""
        return [self.recovered_ms]

    @property
    def parts_ms(self) -> dict[str, float]:
        """Where its time goes."""
        return {
            "until the lease is free and snapshots are read": self.stood_ms,
            "until its Lead is read back": self.led_ms - self.stood_ms,
            "until its first trigger": self.recovered_ms - self.led_ms,
        }

    @property
    def note(self) -> str:
        """Nothing."""
        return ""


def kill_leaders(drill: Drill, kills: int) -> Iterator[Takeover]:
    """SIGKILL the leader again and again; each comes back as the next standby.

    Raises:
        NotMeasuredError: If nobody takes over, or something does not come back.
    """
    begun_s = dict.fromkeys((each.name for each in drill.coordinators), 0.0)  # since 1970
    for _ in range(kills):
        drill.await_calm()
        epoch = drill.witness.rounds()[-1].model.epoch
        leader = _leader(drill, epoch)
        for standby in drill.coordinators:
            if standby is not leader:
                warm = partial(_stands_by, standby, begun_s[standby.name])
                await_until(warm, _WARM_S, f"{standby.name} stands by")
        killed_at, killed_on = monotonic(), time.time()
        leader.kill()
        first = drill.await_leader(after=epoch)
        successor = _leader(drill, first.model.epoch)
        yield Takeover(
            leader.name,
            recovered_ms=1e3 * (first.began_at - killed_at),
            stood_ms=_last_ms(successor, "stands_to_lead", killed_on),
            led_ms=_last_ms(successor, "leads", killed_on),
        )
        leader.restart()
        begun_s[leader.name] = time.time()


def _stands_by(service: Service, since_s: float) -> bool:
    """Whether it has loaded all and asked for the lease in its present life."""
    return any(_logged_s(entry) >= since_s for entry in said(service, "stands_by"))


def _leader(drill: Drill, epoch: int) -> Service:
    for coordinator in drill.coordinators:
        if any(entry["epoch"] == epoch for entry in said(coordinator, "leads")):
            return coordinator
    raise NotMeasuredError(f"no coordinator says that it leads with epoch {epoch}")


def _last_ms(service: Service, event: str, since_s: float) -> float:
    """From a moment, in seconds since 1970, to the last time that a service logged an event."""
    return 1e3 * (_logged_s(said(service, event)[-1]) - since_s)


def _logged_s(entry: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(entry["time"]).timestamp()
