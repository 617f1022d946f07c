"""How long a job stands still when its leader is killed, with a warm standby beside it."""

from __future__ import annotations

import time
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from load.drill import said
from load.processor import used_s
from load.stack import NotMeasuredError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.embedded.services import Service
    from load.drill import Drill

_WARM_S = 60.0
_REST_S = 1.0  # a standby that has loaded everything only asks for the lease: some milliseconds
_AT_REST = 0.1  # cores


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
    for _ in range(kills):
        drill.await_calm()
        epoch = drill.witness.rounds()[-1].model.epoch
        leader = _leader(drill, epoch)
        for standby in drill.coordinators:
            if standby is not leader:
                _await_rest(standby)
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


def _await_rest(service: Service) -> None:
    """Wait until a standby has nothing left to load.

    It says nothing of it, but then uses no processor to speak of, and while it loads torch it does.

    Raises:
        NotMeasuredError: If it does not come to rest.
    """
    deadline = monotonic() + _WARM_S
    while True:
        used = used_s(service.pid)
        time.sleep(_REST_S)
        if used_s(service.pid) - used < _AT_REST * _REST_S:
            return
        if monotonic() > deadline:
            raise NotMeasuredError(f"{service.name} is not at rest after {_WARM_S:g} s")


def _leader(drill: Drill, epoch: int) -> Service:
    for coordinator in drill.coordinators:
        if any(entry["epoch"] == epoch for entry in said(coordinator, "leads")):
            return coordinator
    raise NotMeasuredError(f"no coordinator says that it leads with epoch {epoch}")


def _last_ms(service: Service, event: str, since_s: float) -> float:
    """From a moment, in seconds since 1970, to the last time that a service logged an event."""
    logged = datetime.fromisoformat(said(service, event)[-1]["time"])
    return 1e3 * (logged.timestamp() - since_s)
