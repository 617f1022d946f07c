"""What happens in a demo on rented machines: the job, its deadline, and the market in a box.

Machines are processes of this computer. Spot ones cost what m4.xlarge cost in us-east-1d one day of
2016 (`prices.csv`, 5 minutes a row, from EC2's public price history), and are preempted by a chain.
For half a minute the price is above that of on-demand machines: a plan that is not changed pays it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common.errors import UserError
from common.jobs.spec import parse_job
from common.policies.policy import POLICY_NAMES
from services.cli.demo.plan import JOB

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec
    from common.policies.policy import PolicyName

PRICES = Path(__file__).parents[1] / "prices.csv"
ON_DEMAND_USD_PER_HOUR = 0.239  # of the same machines at that time
_SPEED = 100.0  # of the recorded prices: a row takes 3 s, the time above on-demand 18 s
_AVAILABILITY = 0.9  # alpha
_CYCLE_S = 30.0  # from one preemption of a machine to its next: some in every demo
_REVIEW_S = 5.0
_RECORDS = 128  # K b, of an update
_SLACK = 1.12  # theta / theta_0: more than no outages at all, less than only spot machines need
_JOINED_S = 4.0  # from the start of a process to its first records
_START_S = 12.0  # until the first machines are at work: several processes load torch at once

# Beside what the job of the demo without a market says.
_RENTED = """
stop: {{updates: {updates}, deadline_s: {deadline_s:.1f}}}
provisioning: {{workers: {workers}, policy: {policy}, review_s: {review_s}}}
"""


@dataclass(frozen=True, slots=True)
class RentedPlan:
    """The size of a demo on rented machines."""

    name: str  # of the job; nothing of this name may be on the servers yet
    undisturbed_s: float  # theta_0: what the updates take if nothing is preempted
    rate_per_s: float
    workers: int  # N_tot
    policy: PolicyName | None  # None: the one that fits
    seed: int

    @property
    def partitions(self) -> int:
        """Of each topic: some brokers deal out each topic apart, and nobody shall be left out."""
        return self.workers

    @property
    def updates(self) -> int:
        """J."""
        return max(1, round(self.undisturbed_s * self.rate_per_s / _RECORDS))

    @property
    def deadline_s(self) -> float:
        """Theta, from the submission on."""
        return _START_S + _SLACK * self.undisturbed_s

    def job(self) -> JobSpec:
        """The job's specification."""
        rented = _RENTED.format(
            updates=self.updates,
            deadline_s=self.deadline_s,
            workers=self.workers,
            policy=self.policy or "null",
            review_s=_REVIEW_S,
        )
        return parse_job(JOB.format(name=self.name, seed=self.seed) + rented)

    def market(self) -> str:
        """The market file."""
        market = {
            "fleet": "process",
            "on_demand": {"usd_per_hour": ON_DEMAND_USD_PER_HOUR, "start_up_s": _JOINED_S},
            "spot": [
                {
                    "name": "spot",
                    "usd_per_hour": {"file": str(PRICES), "speed": _SPEED, "start_s": 0},
                    "availability": _AVAILABILITY,
                    "cycle_s": _CYCLE_S,
                    "start_up_s": _JOINED_S,
                }
            ],
            "process": {
                "availability": _AVAILABILITY,
                "cycle_s": _CYCLE_S,
                "seed": self.seed,
            },
        }
        return msgspec.json.encode(market).decode()


def policy_named(name: str) -> PolicyName | None:
    """The policy of this name; None for no name.

    Raises:
        UserError: If there is none.
    """
    if not name:
        return None
    for known in POLICY_NAMES:
        if name == known:
            return known
    raise UserError(f"--policy: must be one of {', '.join(POLICY_NAMES)}, got {name!r}")
