"""Rented machines and their prices in memory, on any clock.

Machines of this market are preempted by two-state chains, or by a test. Any number of provisioners
may share a fleet, as with a real provider. Tests compare with `rented`, the true record.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.errors import UnavailableError
from common.spot.machines import EndCause, LaunchRequest, Machine, Offer, PriceHistory, Refused
from common.spot.theory.billing import HOUR_S


class Chain(NamedTuple):
    """Availability of machines of a pool to a slot: alternating exponential times, on and off."""

    availability: float  # alpha
    cycle_s: float  # mean time between preemptions


class _Offer:
    """One slot's chain, stationary from the beginning. The same seed gives the same chain."""

    def __init__(self, chain: Chain, seed: str, since_s: float) -> None:
        self._chance = random.Random(seed)  # noqa: S311 -- chance in a test, no secret
        self._means_s = (
            (1 - chain.availability) * chain.cycle_s,
            chain.availability * chain.cycle_s,
        )
        self._on = self._chance.random() < chain.availability
        self._until_s = since_s + self._sojourn_s()
        # Times so far at which the chain went off.
        self._off_s: list[float] = []

    def on(self, now_s: float) -> bool:
        """Return True if a machine is available now. Later calls must not go back in time."""
        while self._until_s <= now_s:
            if self._on:
                self._off_s.append(self._until_s)
            self._on = not self._on
            self._until_s += self._sojourn_s()
        return self._on

    def lost_s(self, since_s: float, now_s: float) -> float | None:
        """Return when a machine that ran at `since_s` was lost. None if it still runs."""
        self.on(now_s)
        index = bisect_right(self._off_s, since_s)
        return self._off_s[index] if index < len(self._off_s) else None

    def _sojourn_s(self) -> float:
        return self._chance.expovariate(1 / max(self._means_s[self._on], 1e-9))


@dataclass
class _Token:
    """Result of the orders with one token."""

    machine: Machine | None
    refused: Refused | None
    named_from_s: float = 0.0
    bid_usd_per_hour: float | None = None


@dataclass
class Faults:
    """Faults of the provider that a test can set. Initially there are none."""

    away: bool = False  # every call fails
    # Pools without capacity.
    without: set[str] = field(default_factory=set)
    # Pools that fail every order.
    broken: set[str] = field(default_factory=set)
    # Launches that `machines` omits.
    hidden: set[int] = field(default_factory=set)
    # True if launches are carried out, but their calls fail.
    answers_lost: bool = False


class MemoryFleet:
    """All machines of one job, and the provider's books.

    Args:
        clock: Seconds since 1970. It never goes back.
        chains: Chains by pool. Machines of other pools are never preempted.
        seed: Seed of the chains.
        lag_s: Time from a launch until `machines` lists it.
        named_s: Time for which `machines` lists an ended machine.
        offers: Types of machines by pool. Successive launches get them in turn. Machines of other
            pools have no type.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        chains: Mapping[str, Chain] | None = None,
        seed: int = 0,
        lag_s: float = 0.0,
        named_s: float = 600.0,
        offers: Mapping[str, Sequence[Offer]] | None = None,
    ) -> None:
        self._given = dict(offers or {})
        self._clock = clock
        self._chains = dict(chains or {})
        self._seed = seed
        self._lag_s = lag_s
        self._named_s = named_s
        self._begun_s = clock()
        self._offers: dict[tuple[str, int], _Offer] = {}
        self._tokens: dict[str, _Token] = {}
        # Tokens whose machines may still run.
        self._alive: list[_Token] = []
        self._usd_per_hour: dict[Offer, float] = {}
        self.faults = Faults()

    # --- the port ------------------------------------------------------------------------------

    def launch(self, orders: Sequence[LaunchRequest]) -> tuple[Refused, ...]:
        """Launch the new ones among the orders."""
        self._reach()
        results = [self._launch(order) for order in orders]
        if self.faults.answers_lost:
            raise UnavailableError("the provider's answer got lost")
        return tuple(refused for refused in results if refused is not None)

    def release(self, machines: Sequence[str]) -> None:
        """End machines."""
        self._reach()
        for token, machine in self._running():
            if machine.id in machines:
                token.machine = self._ended(machine, self._clock(), "released", "given back")
        for token in self._tokens.values():
            held = token.machine
            if held is not None and held.state == "stopped" and held.id in machines:
                token.machine = held._replace(state="ended")

    def machines(self) -> tuple[Machine, ...]:
        """List the machines that run, and those that ended lately."""
        self._reach()
        now_s = self._clock()
        named = [
            token.machine
            for token in self._tokens.values()
            if token.machine is not None
            and token.named_from_s <= now_s
            and token.machine.launch not in self.faults.hidden
            and (token.machine.ended_s is None or now_s - token.machine.ended_s <= self._named_s)
        ]
        return tuple(sorted(named, key=lambda machine: machine.launch))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    # --- controls and observations of tests ------------------------------------------------------

    @property
    def rented(self) -> tuple[Machine, ...]:
        """Return all machines so far, in their current state, in the order of launches."""
        self._settle()
        return tuple(token.machine for token in self._tokens.values() if token.machine is not None)

    def preempt(self, *launches: int) -> None:
        """Preempt machines."""
        self._end(launches, "preempted", "taken back by the provider")

    def reprice(self, usd_per_hour: Mapping[Offer, float]) -> None:
        """Set a price, and preempt machines with a lower bid."""
        self._settle()
        self._usd_per_hour |= usd_per_hour
        for token, machine in self._running():
            bid = token.bid_usd_per_hour
            if bid is not None and self._costs(machine) > bid:
                token.machine = self._ended(machine, self._clock(), "preempted", "its bid is low")

    def fail(self, *launches: int) -> None:
        """End machines as if they stopped by themselves."""
        self._end(launches, "failed", "its worker ended with 1")

    def stop(self, launch: int) -> None:
        """Stop a machine by hand; it exists until it is released."""
        for token, machine in self._running():
            if machine.launch == launch:
                token.machine = machine._replace(
                    state="stopped", ended_s=self._clock(), detail="stopped by a user"
                )

    def go_away(self) -> None:
        """Fail every call."""
        self.faults.away = True

    def come_back(self) -> None:
        """Answer again. Machines ran on meanwhile."""
        self.faults.away = False

    # --- the provider ----------------------------------------------------------------------------

    def _reach(self) -> None:
        if self.faults.away:
            raise UnavailableError("the provider of machines is unavailable")
        self._settle()

    def _launch(self, order: LaunchRequest) -> Refused | None:
        known = self._tokens.get(order.token)
        if known is None:
            known = self._tokens[order.token] = self._carry_out(order)
            self._alive.append(known)
        return known.refused

    def _carry_out(self, order: LaunchRequest) -> _Token:
        now_s = self._clock()
        if order.pool in self.faults.broken:
            return _Token(None, Refused(order.launch, capacity=False, reason="no such machines"))
        place = order.launch if order.slot is None else order.slot
        offer = self._offer(order.pool, place)
        if order.pool in self.faults.without or (offer is not None and not offer.on(now_s)):
            reason = f"no capacity in {order.pool}"
            return _Token(None, Refused(order.launch, capacity=True, reason=reason))
        name = f"m-{len(self._tokens) + 1}"
        machine = Machine(
            name, order.launch, order.slot, order.pool, order.worker, "running", now_s
        )
        if order.pool in self._given:
            offers = self._given[order.pool]
            given = offers[order.launch % len(offers)]
            machine = machine._replace(type=given.type, zone=given.zone)
        bid = order.bid_usd_per_hour
        if bid is not None and self._costs(machine) > bid:
            reason = f"{order.pool} costs more than {bid:g}"
            return _Token(None, Refused(order.launch, capacity=True, reason=reason))
        return _Token(machine, None, now_s + self._lag_s, bid)

    def _costs(self, machine: Machine) -> float:
        offers = Offer(machine.pool, machine.type, machine.zone), Offer(machine.pool)
        known = (self._usd_per_hour[offer] for offer in offers if offer in self._usd_per_hour)
        return next(known, 0.0)

    def _offer(self, pool: str, slot: int) -> _Offer | None:
        chain = self._chains.get(pool)
        if chain is None:
            return None
        key = (pool, slot)
        if key not in self._offers:
            self._offers[key] = _Offer(chain, f"{self._seed}/{pool}/{slot}", self._begun_s)
        return self._offers[key]

    def _settle(self) -> None:
        """Preempt the machines whose chains have ended by now."""
        now_s = self._clock()
        for token, machine in self._running():
            place = machine.launch if machine.slot is None else machine.slot
            offer = self._offer(machine.pool, place)
            lost_s = None if offer is None else offer.lost_s(machine.started_s, now_s)
            if lost_s is not None:
                token.machine = self._ended(machine, lost_s, "preempted", "out of capacity")

    def _end(self, launches: Iterable[int], cause: EndCause, detail: str) -> None:
        self._settle()
        for token, machine in self._running():
            if machine.launch in launches:
                token.machine = self._ended(machine, self._clock(), cause, detail)

    def _running(self) -> list[tuple[_Token, Machine]]:
        self._alive = [
            token
            for token in self._alive
            if token.machine is not None and token.machine.state == "running"
        ]
        return [(token, token.machine) for token in self._alive if token.machine is not None]

    @staticmethod
    def _ended(machine: Machine, at_s: float, cause: EndCause, detail: str) -> Machine:
        return machine._replace(state="ended", ended_s=at_s, cause=cause, detail=detail)


class MemoryPrices:
    """Prices that stay until a test changes them."""

    def __init__(self, usd_per_hour: Mapping[str, float]) -> None:
        self._usd_per_hour = {Offer(pool): usd for pool, usd in usd_per_hour.items()}
        self.away = False

    def look(self) -> dict[Offer, float]:
        """Return the current prices."""
        if self.away:
            raise UnavailableError("the source of prices is unavailable")
        return dict(self._usd_per_hour)

    def past(self) -> dict[str, PriceHistory]:
        """Return histories that have the current price of each pool for the past hour.

        Raises:
            UnavailableError: If the source is unavailable.
        """
        return {
            offer.pool: PriceHistory((0.0,), (usd,), HOUR_S)
            for offer, usd in self.look().items()
            if not offer.type
        }

    def set(self, pool: str, usd_per_hour: float, kind: str = "", zone: str = "") -> None:
        """Change the price of a pool, or of a type in it."""
        self._usd_per_hour[Offer(pool, kind, zone)] = usd_per_hour
