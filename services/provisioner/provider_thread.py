"""A thread that calls the provider, so that the thread that decides never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import time
from typing import TYPE_CHECKING, TypeAlias

from common.errors import OutsideError
from common.spot.provisioning import commands as do
from common.spot.provisioning import events
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from common.spot.machines import Fleet, Prices
    from common.spot.provisioning.events import ProvisionerEvent
    from common.telemetry.logging import EventLogger

ProviderCall: TypeAlias = (
    do.Launch | do.Release | do.PollMachines | do.PollPrices | do.PollPastPrices
)

# Maximum time for which `close` waits for queued calls.
CLOSE_S = 30.0


class ProviderThread:
    """One job's fleet, and the prices. Calls run one after the other.

    Args:
        open_fleet: Opens the fleet, in the thread.
        open_prices: Opens the prices, in the thread.
        deliver: Receives the result of a call, in the thread.
        fail: Ends the job's loop with an error of the thread.
    """

    def __init__(
        self,
        open_fleet: Callable[[], Fleet],
        open_prices: Callable[[], Prices],
        deliver: Callable[[ProvisionerEvent], object],
        *,
        logger: EventLogger,
        fail: Callable[[BaseException], object],
    ) -> None:
        self._open_fleet = open_fleet
        self._open_prices = open_prices
        self._deliver = deliver
        self._log = logger
        self._fail = fail
        self._fleet_outage = Outage(logger, "fleet")
        self._prices_outage = Outage(logger, "prices")
        self._calls = SimpleQueue[ProviderCall | None]()
        self._thread = threading.Thread(target=self._run, name="provider", daemon=True)
        self._thread.start()

    def send(self, call: ProviderCall) -> None:
        """Queue a call."""
        self._calls.put(call)

    def close(self) -> None:
        """Run queued calls, then close the fleet. Its machines stay."""
        self._calls.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            fleet, prices = self._open_fleet(), self._open_prices()
            try:
                while (call := self._calls.get()) is not None:
                    self._speak(fleet, prices, call)
            finally:
                fleet.close()
        except BaseException as fault:  # noqa: BLE001 -- raised again by the loop of the job
            self._fail(fault)

    def _speak(self, fleet: Fleet, prices: Prices, call: ProviderCall) -> None:
        of_prices = isinstance(call, do.PollPrices | do.PollPastPrices)
        outage = self._prices_outage if of_prices else self._fleet_outage
        try:
            match call:
                case do.PollPrices():
                    self._deliver(events.PricesSeen(prices.look()))
                case do.PollPastPrices():
                    self._deliver(events.PastSeen(prices.past()))
                case do.Launch(orders):
                    refused = fleet.launch(orders)
                    launches = tuple(order.launch for order in orders)
                    self._deliver(events.LaunchAnswered(launches, refused))
                case do.Release(machines, reason):
                    self._log.info("machines_released", machines=",".join(machines), reason=reason)
                    fleet.release(machines)
                case do.PollMachines():
                    as_of_s = time()
                    self._deliver(events.MachinesSeen(fleet.machines(), as_of_s))
        except OutsideError as error:
            outage.met(error)
            away = events.PricesAway if of_prices else events.FleetAway
            self._deliver(away(str(error)))
        else:
            outage.over()
