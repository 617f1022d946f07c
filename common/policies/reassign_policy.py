"""The policy that buys machines for gradients, whoever reads the streams: when it decides anew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from common.policies.policy import NOWHERE, ON_DEMAND, Decision
from common.policies.reassign import (
    Computing,
    Prospect,
    most_spot,
    plan_of_machines,
    plan_reassign,
)
from common.theory.errors import ParameterError
from common.theory.work import Market

if TYPE_CHECKING:
    from common.policies.policy import Situation
    from common.theory.plan import Plan
    from common.theory.work import Work

SPOT = 1  # of the pools; others are not used


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be planned for."""

    work: Work
    market: Market
    computing: Computing
    backlog: float  # updates whose records wait already

    def cheapest(self) -> Plan:
        """Plan it anew, whatever there is."""
        return plan_reassign(self.work, self.market, self.computing, self.backlog)

    def with_gradients(self, times: float) -> _Task:
        """The same with gradients that take so many times as long."""
        gradient_s = self.computing.gradient_s * times
        return replace(self, computing=replace(self.computing, gradient_s=gradient_s))

    def do(self, on_demand: int, spot: int) -> bool:
        """Tell whether so many machines do, and can still be had."""
        there = spot <= most_spot(self.work, self.market)
        prospect = Prospect(self.work, self.market, self.computing, self.backlog)
        return there and prospect.enough(on_demand, spot)

    def usd_per_s(self, on_demand: int, spot: int) -> float:
        """What so many machines cost while they run."""
        market = self.market
        spot_usd_per_s = market.spot.availability * market.spot.usd_per_s
        return on_demand * market.on_demand.usd_per_s + spot * spot_usd_per_s

    def plan_of(self, on_demand: int, spot: int) -> Plan:
        """Say what so many machines come to, which do."""
        machines = on_demand, spot
        return plan_of_machines(self.work, self.market, self.computing, self.backlog, machines)


@dataclass(frozen=True, slots=True)
class Reassign:
    """As many machines as gradients need, mostly on spot; the other slots have none.

    It decides once, and again when what it decided on has moved by more than `moved`, or when the
    updates made since lag behind by more than `patience` of the slack that there was. The lag is
    then known to wait in Kafka, and is planned with. Machines that still do are kept as long as
    others would hardly be cheaper.
    """

    probability: float = 0.95
    round_overhead_s: float = 0.0
    headroom: float = 1.25
    review_s: float | None = 30.0
    moved: float = 0.1  # relative; the headroom stands twice that
    patience: float = 0.5  # the other half is left to catch up in
    saves: float = 0.05  # of what machines cost; for less they are not changed

    @property
    def name(self) -> str:
        """What tables call it."""
        return "reassign"

    @property
    def watches_outages(self) -> bool:
        """Single outages are what the number of machines is chosen for."""
        return False

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Decide anew, or return `last` where nothing that matters has changed.

        Raises:
            ParameterError: If there is no spot pool or a number is out of range.
        """
        if len(situation.pools) <= SPOT:
            raise ParameterError("pools", "reassign needs a spot pool after the on-demand one")
        if situation.waiting is not None:
            lag_s = _arrive_in_s(situation.waiting, situation.work)
        else:
            lag_s = (
                0.0
                if last is None
                else _behind_s(situation, last.basis, last.basis.work.undisturbed_s)
            )
        reason = self._reason(situation, last, lag_s)
        if last is not None and reason is None:
            return last
        work, market = situation.work, Market(situation.pools[ON_DEMAND], situation.pools[SPOT])
        computing = Computing(
            situation.gradient_s, self.round_overhead_s, self.probability, self.headroom
        )
        backlog = max(lag_s, 0.0) * _rate_per_s(situation) / (work.group_size * work.batch_size)
        task = _Task(work, market, computing, min(backlog, work.updates))
        plan = task.cheapest()
        if last is not None and len(last.places) == work.workers:
            plan = self._steady(task, plan, last)
        places = np.full(work.workers, NOWHERE, np.int8)
        places[: plan.on_demand] = ON_DEMAND
        places[plan.spot_workers] = SPOT
        stand_ins = np.zeros(work.workers, np.bool_)
        told = f"{reason or 'first plan'}: {plan.reason}"
        return Decision(places, stand_ins, plan, told, situation)

    def _steady(self, task: _Task, plan: Plan, last: Decision) -> Plan:
        """Keep the machines that there are, where that gradients scatter may be all that changed.

        They stay if they would do for gradients a little shorter, unless it pays to change them
        even for gradients a little longer.
        """
        machines = last.plan.on_demand, last.plan.spot
        if machines == (plan.on_demand, plan.spot) or not last.plan.feasible:
            return plan
        if not task.with_gradients(1 / (1 + self.moved)).do(*machines):
            return plan
        careful = task.with_gradients(self.headroom).cheapest()
        target = careful if careful.feasible else plan
        if task.usd_per_s(target.on_demand, target.spot) < (1 - self.saves) * task.usd_per_s(
            *machines
        ):
            return plan
        return task.plan_of(*machines)

    def _reason(self, situation: Situation, last: Decision | None, lag_s: float) -> str | None:
        if last is None:
            return "first plan"
        basis = last.basis
        for what, now, then in (
            ("gradient time", situation.gradient_s, basis.gradient_s),
            ("arrivals", _rate_per_s(situation), _rate_per_s(basis)),
            ("spot price", situation.pools[SPOT].usd_per_hour, basis.pools[SPOT].usd_per_hour),
            ("on-demand price", situation.pools[0].usd_per_hour, basis.pools[0].usd_per_hour),
            ("availability", situation.pools[SPOT].availability, basis.pools[SPOT].availability),
        ):
            if abs(now - then) > self.moved * then:
                return f"{what} moved from {then:.4g} to {now:.4g}"
        planned_s = basis.work.undisturbed_s
        if situation.waiting is not None:  # what was known to wait was planned with
            planned_s = last.plan.expected_runtime_s
            lag_s = max(
                _behind_s(situation, basis, planned_s),
                lag_s - _arrive_in_s(basis.waiting or 0.0, basis.work),
            )
        slack_s = max(basis.work.deadline_s - planned_s, 0.0)
        if last.plan.feasible and lag_s > max(self.patience * slack_s, self.review_s or 0.0):
            return f"updates lag {lag_s:.3g} s behind, with {slack_s:.3g} s of slack"
        return None


def _rate_per_s(situation: Situation) -> float:
    return float(situation.work.rates_per_s.sum())


def _arrive_in_s(updates: float, work: Work) -> float:
    return updates * work.group_size * work.batch_size / float(work.rates_per_s.sum())


def _behind_s(situation: Situation, basis: Situation, planned_s: float) -> float:
    """Give how much later the updates made since then are than if all took so long."""
    made = (basis.work.updates - situation.work.updates) * planned_s
    return (
        situation.now_s - basis.now_s - (made / basis.work.updates if basis.work.updates else 0.0)
    )
