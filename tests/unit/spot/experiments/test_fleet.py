"""Use and cost of machines: timelines by hand, and a slow bookkeeper for all others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.experiments.fleet import SimulatedFleet
from common.spot.theory.billing import Billing, Preempted
from common.spot.theory.errors import ParameterError
from common.spot.theory.work import Pool
from tests.unit.spot.experiments.decisions import (
    NOWHERE,
    ON_DEMAND,
    SPOT,
    count,
    decide,
)

STEP_S = 2.0
HOUR_S = 3600.0
# USD per hour: 1 and 0.5 a second.
DEAR, CHEAP = 3600.0, 1800.0
A_MINUTE = Billing(minimum_s=60.0)


def one_slot(on_demand: Pool, spot: Pool, place: int) -> SimulatedFleet:
    fleet = SimulatedFleet((on_demand, spot), 1, 1, STEP_S)
    fleet.order(0, decide([place]))
    return fleet


def run_steps(
    fleet: SimulatedFleet, offers: str, prices: tuple[float, float] = (DEAR, CHEAP)
) -> str:
    """Step through offers drawn as `#` and `.`. Returns a drawing of the active steps."""
    active = ""
    steps = round(float(fleet.usage.wanted_s.sum(axis=0)[0]) / STEP_S)
    for step, offer in enumerate(offers, start=steps):
        seen = fleet.step(
            step * STEP_S,
            (None, np.array([[offer == "#"]])),
            [np.array([price]) for price in prices],
        )
        active += "#" if seen[0, 0] else "."
    return active


ON_DEMAND_POOL = Pool("on-demand", DEAR)
SPOT_POOL = Pool("spot", CHEAP, 0.9)


def test_spot_machine_runs_and_costs_only_while_it_is_offered() -> None:
    # offered  # # . . #     in steps of 2 s, at 0.5 USD a second
    # active   # # . . #
    # bill     4 s     2 s
    fleet = one_slot(ON_DEMAND_POOL, SPOT_POOL, SPOT)
    assert run_steps(fleet, "##..#") == "##..#"
    assert fleet.usage.usd[:, 0].sum() == pytest.approx(6 * 0.5)
    assert fleet.usage.machine_s[:, 0].tolist() == [0, 6]
    assert (fleet.usage.launches[SPOT, 0], fleet.usage.preemptions[SPOT, 0]) == (2, 1)
    assert fleet.usage.wanted_s[SPOT, 0] == 10


def test_replacement_machine_is_paid_for_while_it_starts_up() -> None:
    # offered  # . # # # #   in steps of 2 s; a start-up takes 4 s, except the first one of the run
    # active   # . . . # #
    # bill     2 s for the first machine; 8 s for the second one, 4 s of them for its start-up
    fleet = one_slot(ON_DEMAND_POOL, Pool("spot", CHEAP, 0.9, start_up_s=4.0), SPOT)
    assert run_steps(fleet, "#.####") == "#...##"
    assert fleet.usage.usd[:, 0].sum() == pytest.approx(10 * 0.5)


def test_interrupted_start_up_starts_from_zero() -> None:
    # offered  # . # . # # #   start-up 4 s
    # active   # . . . . . #
    fleet = one_slot(ON_DEMAND_POOL, Pool("spot", CHEAP, 0.9, start_up_s=4.0), SPOT)
    assert run_steps(fleet, "#.#.###") == "#.....#"
    assert (fleet.usage.launches[SPOT, 0], fleet.usage.preemptions[SPOT, 0]) == (3, 2)


def test_start_up_between_two_steps_ends_at_the_later_one() -> None:
    # offered  # . # # #   start-up 2.5 s
    # active   # . . . #
    fleet = one_slot(ON_DEMAND_POOL, Pool("spot", CHEAP, 0.9, start_up_s=2.5), SPOT)
    assert run_steps(fleet, "#.###") == "#...#"


def test_only_a_stopped_machine_is_billed_the_minimum() -> None:
    # offered   # . # #      minimum 60 s
    # ordered   spot  | od   from 6 s on
    # spot      2   2 s + 58 s that are not used
    # on-demand         2 s so far
    fleet = one_slot(ON_DEMAND_POOL, Pool("spot", CHEAP, 0.9, billing=A_MINUTE), SPOT)
    assert run_steps(fleet, "#.#") == "#.#"
    fleet.order(0, decide([ON_DEMAND]))
    assert run_steps(fleet, "#") == "#"
    assert fleet.usage.usd[:, 0] == pytest.approx([2 * 1.0, (2 + 2 + 58) * 0.5])
    assert fleet.usage.machine_s[:, 0].tolist() == [2, 4]
    assert fleet.usage.preemptions[SPOT, 0] == 1


def test_moving_slot_is_empty_until_the_new_machine_starts() -> None:
    # ordered    spot | on-demand, whose start-up is 4 s
    # active     # #    . . #
    fleet = one_slot(Pool("on-demand", DEAR, start_up_s=4.0), SPOT_POOL, SPOT)
    assert run_steps(fleet, "##") == "##"
    fleet.order(0, decide([ON_DEMAND]))
    assert run_steps(fleet, "###") == "..#"
    assert fleet.usage.usd[:, 0] == pytest.approx([6 * 1.0, 4 * 0.5])


def test_machine_costs_the_price_of_each_step() -> None:
    # price      1.0   2.0   0.5   a second
    fleet = one_slot(ON_DEMAND_POOL, SPOT_POOL, ON_DEMAND)
    for price in (1.0, 2.0, 0.5):
        run_steps(fleet, "#", (price * HOUR_S, CHEAP))
    assert fleet.usage.usd[:, 0].sum() == pytest.approx(2 * 3.5)


def test_last_step_is_billed_as_far_as_it_was_used() -> None:
    # run 0   # # #)      ends 0.5 s into the third step
    # run 1   # # # #
    fleet = SimulatedFleet((ON_DEMAND_POOL, SPOT_POOL), 2, 2, STEP_S)
    prices = [np.array([DEAR, DEAR]), np.array([CHEAP, CHEAP])]
    offers = (None, np.ones((2, 2), np.bool_))
    for run in range(2):
        fleet.order(run, decide([ON_DEMAND, SPOT]))
    for step in range(3):
        fleet.step(step * STEP_S, offers, prices)
    fleet.stop(np.array([0]), np.array([0.5]))
    active = fleet.step(6.0, offers, prices)
    assert active.tolist() == [[False, False], [True, True]]
    assert fleet.usage.usd.sum(axis=0) == pytest.approx([4.5 * 1.5, 8 * 1.5])
    assert fleet.usage.machine_s[:, 0] == pytest.approx([4.5, 4.5])


def test_traffic_is_paid_while_a_machine_runs() -> None:
    # 7.2 GB an hour at 0.5 USD cost 0.001 USD a second. The machine runs for three steps, of which
    # the job uses the last one by half.
    spot = Pool("spot", CHEAP, 0.9, transfer_usd_per_gb=0.5, gb_per_hour=7.2)
    fleet = one_slot(ON_DEMAND_POOL, spot, SPOT)
    run_steps(fleet, "##.#")
    fleet.stop(np.array([0]), np.array([1.0]))
    assert fleet.usage.usd[:, 0].sum() == pytest.approx(5 * (0.5 + 0.001))


def test_stop_at_the_end_bills_the_minimum() -> None:
    fleet = one_slot(Pool("on-demand", DEAR, billing=A_MINUTE), SPOT_POOL, ON_DEMAND)
    run_steps(fleet, "##")
    fleet.stop(np.array([0]), np.array([1.0]))
    assert fleet.usage.usd[:, 0].sum() == pytest.approx(60.0)
    assert fleet.usage.machine_s[ON_DEMAND, 0] == pytest.approx(3.0)


def test_slot_without_a_pool_has_no_machine() -> None:
    fleet = one_slot(ON_DEMAND_POOL, SPOT_POOL, NOWHERE)
    fleet.step(0.0, (None, np.ones((1, 1), np.bool_)), [np.array([DEAR]), np.array([CHEAP])])
    assert not fleet.active.any()
    assert fleet.usage.usd[:, 0].sum() == 0


def test_stop_before_the_first_step_is_rejected() -> None:
    fleet = one_slot(ON_DEMAND_POOL, SPOT_POOL, SPOT)
    with pytest.raises(ParameterError, match="first step"):
        fleet.stop(np.array([0]), np.array([0.0]))


@dataclass
class Machine:
    """A machine of the bookkeeper."""

    pool: int
    launched_s: float
    ready_s: float
    usd_per_hour: list[float] = field(default_factory=list)  # one price per step
    used_s: float = 0.0
    usd: float = 0.0  # once it has ended


@dataclass
class Bookkeeper:
    """Follows the machines of one run one by one. `SimulatedFleet` must agree with it."""

    pools: tuple[Pool, ...]
    workers: int
    step_s: float
    by_slot: dict[int, Machine] = field(default_factory=dict)
    ended: list[Machine] = field(default_factory=list)
    preemptions: int = 0

    def end(self, slot: int, now_s: float, price: float, *, by_us: bool) -> None:
        """End the machine of a slot."""
        machine = self.by_slot.pop(slot)
        billing = self.pools[machine.pool].billing
        paid_s = float(billing.paid_s(now_s - machine.launched_s, preempted=not by_us))
        # Time that is paid after the machine's end costs this price.
        machine.usd_per_hour.append(price)
        second_s = hour_s = 0.0
        while second_s < paid_s:
            last_s = min(second_s + 1, paid_s)
            if second_s % HOUR_S == 0:
                hour_s = second_s
            seen_s = second_s if billing.price == "now" else hour_s
            step = min(int(seen_s / self.step_s), len(machine.usd_per_hour) - 1)
            machine.usd += (last_s - second_s) * machine.usd_per_hour[step] / HOUR_S
            second_s = last_s
        self.preemptions += not by_us
        self.ended.append(machine)

    def step(
        self,
        now_s: float,
        places: list[int],
        offered: list[list[bool]],
        prices: list[float],
    ) -> list[bool]:
        """Process a step, slot by slot."""
        active = []
        for slot in range(self.workers):
            if (machine := self.by_slot.get(slot)) and machine.pool != places[slot]:
                self.end(slot, now_s, prices[machine.pool], by_us=True)
            elif machine and not offered[machine.pool][slot]:
                self.end(slot, now_s, prices[machine.pool], by_us=False)
            if places[slot] >= 0 and slot not in self.by_slot and offered[places[slot]][slot]:
                ready_s = now_s + self.pools[places[slot]].start_up_s if now_s else 0.0
                self.by_slot[slot] = Machine(places[slot], now_s, ready_s)
            machine = self.by_slot.get(slot)
            active.append(machine is not None and machine.ready_s <= now_s)
            if machine is not None:
                machine.usd_per_hour.append(prices[machine.pool])
                machine.used_s += self.step_s
        return active

    def stop(self, now_s: float, after_s: float, prices: list[float]) -> None:
        """End all machines within the last step."""
        for slot, machine in list(self.by_slot.items()):
            machine.used_s -= self.step_s - after_s
            self.end(slot, now_s + after_s, prices[machine.pool], by_us=True)


STARTS = st.sampled_from([0.0, 2.0, 5.0, 10.0])
BILLINGS = st.builds(
    Billing,
    st.sampled_from(["second", "hour"]),
    st.sampled_from([0.0, 7.0, 60.0]),
    st.sampled_from(["now", "hour_start"]),
    st.builds(Preempted, st.sampled_from([0.0, 30.0, 3600.0]), st.booleans()),
)


@given(
    st.lists(st.tuples(STARTS, BILLINGS), min_size=3, max_size=3),
    st.sampled_from([2.0, 900.0]),
    st.integers(0, 2**32 - 1),
)
def test_fleet_agrees_with_a_bookkeeper_per_machine(
    kinds: list[tuple[float, Billing]], step_s: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    runs, workers, steps = 2, 3, 25
    pools = tuple(
        Pool(str(index), 1.0, start_up_s=start_up_s, billing=billing)
        for index, (start_up_s, billing) in enumerate(kinds)
    )
    fleet = SimulatedFleet(pools, runs, workers, step_s)
    bookkeepers = [Bookkeeper(pools, workers, step_s) for _ in range(runs)]
    orders = [[0] * workers for _ in range(runs)]
    prices = np.zeros((len(pools), runs))
    offered = rng.random((len(pools), runs, workers)) < 0.8
    for step in range(steps):
        now_s = step * step_s
        prices = rng.random((len(pools), runs))
        offered ^= rng.random(offered.shape) < 0.2
        offered[0] = True
        for run in np.flatnonzero((rng.random(runs) < 0.3) | (step == 0)).tolist():
            orders[run] = rng.integers(-1, len(pools), workers).tolist()
            fleet.order(run, decide(orders[run]))
        active = fleet.step(now_s, (None, offered[1], offered[2]), list(prices))
        for run, bookkeeper in enumerate(bookkeepers):
            seen = bookkeeper.step(
                now_s, orders[run], offered[:, run].tolist(), prices[:, run].tolist()
            )
            assert seen == active[run].tolist()
    after_s = rng.random(runs) * step_s
    fleet.stop(np.arange(runs), after_s)
    for run, bookkeeper in enumerate(bookkeepers):
        bookkeeper.stop((steps - 1) * step_s, float(after_s[run]), prices[:, run].tolist())
        for index in range(len(pools)):
            mine = [machine for machine in bookkeeper.ended if machine.pool == index]
            assert fleet.usage.launches[index, run] == len(mine)
            assert fleet.usage.usd[index, run] == pytest.approx(sum(one.usd for one in mine))
            assert fleet.usage.machine_s[index, run] == pytest.approx(
                sum(one.used_s for one in mine)
            )
        assert fleet.usage.preemptions[:, run].sum() == bookkeeper.preemptions


# --- counted machines ----------------------------------------------------------------------------


def counting(
    spot: Pool, workers: int = 2, slots_per_pool: int = 3, rates: list[float] | None = None
) -> SimulatedFleet:
    rates_per_s = None if rates is None else np.array([rates])
    return SimulatedFleet((ON_DEMAND_POOL, spot), 1, workers, STEP_S, slots_per_pool, rates_per_s)


def step(fleet: SimulatedFleet, at: int, offer: str) -> str:
    """Process a step with one spot machine for each mark, and draw the slots."""
    offered = np.array([[mark == "#" for mark in offer]])
    seen = fleet.step(at * STEP_S, (None, offered), [np.array([DEAR]), np.array([CHEAP])])
    return "".join("#" if up else "." for up in seen[0])


def test_spare_takes_over_a_lost_stream_in_the_same_step() -> None:
    # Only a spare can take over, because a new machine needs 100 s:
    #   slots     ###  #.#  #..
    #   streams   ##   ##   #.
    fleet = counting(Pool("spot", CHEAP, 0.9, start_up_s=100.0))
    fleet.order(0, count(spot=3))
    assert [step(fleet, at, offer) for at, offer in enumerate(("###", "#.#", "#.."))] == [
        *("##", "##"),
        "#.",
    ]


def test_lost_machine_is_replaced_anywhere_in_its_pool() -> None:
    # slots    ##.  .##  .##  .##    a start-up takes 4 s, and two machines are wanted
    # streams  ##   .#   .#   ##
    fleet = counting(Pool("spot", CHEAP, 0.9, start_up_s=4.0))
    fleet.order(0, count(spot=2))
    drawn = [step(fleet, at, offer) for at, offer in enumerate(("##.", ".##", ".##", ".##"))]
    assert drawn == ["##", ".#", ".#", "##"]
    assert fleet.usage.machine_s[SPOT, 0] == 4 * 2 * STEP_S
    assert (fleet.usage.launches[SPOT, 0], fleet.usage.preemptions[SPOT, 0]) == (3, 1)
    assert [found[:, 0].tolist() for found in fleet.machines()] == [[0, 2], [0, 0]]


def test_surplus_machines_without_a_slot_are_released_first() -> None:
    fleet = counting(SPOT_POOL, slots_per_pool=4)
    fleet.order(0, count(spot=3, on_demand=2))
    step(fleet, 0, "####")
    fleet.order(0, count(spot=1, on_demand=1))
    step(fleet, 1, "####")
    assert fleet.machines()[0][:, 0].tolist() == [1, 1]
    assert fleet.active.all()
    fleet.order(0, count(on_demand=2))
    step(fleet, 2, "####")
    assert fleet.machines()[0][:, 0].tolist() == [2, 0]
    assert fleet.usage.preemptions[SPOT, 0] == 0


def test_longest_waiting_then_busiest_stream_is_served_first() -> None:
    # slots    ##..  #...  ....  #...  ##..
    # streams  .##   .#.   ...   #..   #.#    the rates are 1, 3 and 2
    fleet = counting(SPOT_POOL, workers=3, slots_per_pool=4, rates=[1.0, 3.0, 2.0])
    fleet.order(0, count(spot=4))
    offers = ("##..", "#...", "....", "#...", "##..")
    assert [step(fleet, at, offer) for at, offer in enumerate(offers)] == [
        *(".##", ".#.", "...", "#..", "#.#"),
    ]


def test_unserved_since_s_reports_when_a_stream_lost_its_machine() -> None:
    fleet = counting(SPOT_POOL, slots_per_pool=2)
    fleet.order(0, count(spot=2))
    for at, offer in enumerate(("##", "#.", "#.")):
        step(fleet, at, offer)
    assert fleet.unserved_since_s(0, 3 * STEP_S).tolist() == [3 * STEP_S, STEP_S]


def test_fastest_machines_serve_and_set_the_speed_of_their_slots() -> None:
    fleet = counting(Pool("spot", CHEAP, 0.9, speed=2.0), workers=2, slots_per_pool=1)
    fleet.order(0, count(spot=1, on_demand=2))
    step(fleet, 0, "#")
    assert fleet.speeds[0].tolist() == [2.0, 1.0]


@given(
    offers=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=20),
    wanted=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)) | st.none(), min_size=20, max_size=20
    ),
    start_up_s=st.sampled_from([0.0, 3.0]),
)
def test_counted_fleet_never_shares_or_idles_machines(
    offers: list[list[bool]], wanted: list[tuple[int, int] | None], start_up_s: float
) -> None:
    fleet = counting(Pool("spot", CHEAP, 0.9, start_up_s=start_up_s), workers=3, slots_per_pool=5)
    usd, spot = 0.0, 0
    for at, (offer, asked) in enumerate(zip(offers, wanted, strict=False)):
        if asked is not None:
            spot, on_demand = asked
            fleet.order(0, count(spot=spot, on_demand=on_demand))
        step(fleet, at, "".join(".#"[each] for each in offer))
        up, coming = (found[:, 0] for found in fleet.machines())
        serving = fleet.server[0][fleet.active[0]]
        assert len(set(serving.tolist())) == len(serving) == min(int(up.sum()), 3)
        assert up[SPOT] + coming[SPOT] == min(spot, sum(offer))
        usd += STEP_S / HOUR_S * float((up + coming) @ [DEAR, CHEAP])
    assert fleet.usage.usd[:, 0].sum() == pytest.approx(usd)
