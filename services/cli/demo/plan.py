"""Plan of a demo: the job, the size of the stream, and the workers.

Without a market, the workers are processes that run from the start, and one of them is killed
half-way. With a market, they are machines that a provisioner rents to meet a deadline. These are
processes, too. Their spot prices are those of m4.xlarge in us-east-1d on one day of 2016
(`prices.csv`, one row per 5 minutes, from EC2's public price history), and they are preempted at
random. For 18 s, the spot price is at least that of on-demand machines; a plan that does not change
pays it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from common.jobs.job_file import parse_job

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec

# Two topics of 8x8 images. 128 records per update and this learning rate reach 0.98 to 0.99 on
# held-out digits within 60,000 warped records (0.97 to 0.98 at half the rate). A checkpoint every
# few seconds lets `settled` follow the stream, which limits the producer.
_JOB = """
name: {name}
streams: [{name}-a, {name}-b]
records:
  codec: tensor
  fields:
    image: {{dtype: uint8, shape: [1, 8, 8]}}
    label: {{dtype: int64}}
task: {{name: image-classifier, classes: 10}}
batch_size: 32
group_size: 4
optimizer: {{name: adam, learning_rate: 4.0e-3}}
seed: {seed}
checkpoint: {{every_s: 3.0}}
batch_linger_s: 0.5
group_linger_s: 0.5
"""
_UPDATE_RECORDS = 128  # K b

# Additional blocks with a market.
_PROVISIONED = """
stop: {{updates: {updates}, deadline_s: {deadline_s:.1f}}}
provisioning: {{workers: {workers}, review_s: {review_s}}}
"""
_PRICES = Path(__file__).with_name("prices.csv")
# Price of the same machines at that time.
ON_DEMAND_USD_PER_HOUR = 0.239
# Speed of the recorded prices: a row lasts 3 s. Six rows are not below the on-demand price.
_SPEED = 100.0
_AVAILABILITY = 0.9  # alpha
# Mean time between preemptions of a machine, so that every demo has some.
_CYCLE_S = 30.0
_REVIEW_S = 5.0
# theta / theta_0: above 1, the ratio without preemptions, and below that of spot machines alone.
_SLACK = 1.12
# Time from the start of a process to its first records.
_JOINED_S = 4.0
# Time until the first machines work; several processes load torch at once.
_START_S = 12.0


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Size of a demo."""

    # Name of the job; the servers must not have anything of this name yet.
    name: str
    records: int
    rate_per_s: float
    workers: int  # N_tot
    # Seed of weights, order and warps.
    seed: int = 0
    # Time without a market that the killed worker is gone.
    away_s: float = 5.0
    provision: bool = False

    @property
    def partitions(self) -> int:
        """Partitions per topic: one per worker, because some brokers assign topics separately."""
        return self.workers

    @property
    def updates(self) -> int:
        """J, with a market."""
        return max(1, round(self.records / _UPDATE_RECORDS))

    @property
    def deadline_s(self) -> float:
        """Theta, seconds from the submission on, with a market."""
        return _START_S + _SLACK * self.records / self.rate_per_s

    @property
    def on_demand_only_usd(self) -> float:
        """Cost of the updates on on-demand machines alone, without preemptions."""
        undisturbed_s = self.updates * _UPDATE_RECORDS / self.rate_per_s  # theta_0
        return self.workers * undisturbed_s / 3600 * ON_DEMAND_USD_PER_HOUR

    def job(self) -> JobSpec:
        """Return the job's specification."""
        text = _JOB.format(name=self.name, seed=self.seed)
        if self.provision:
            text += _PROVISIONED.format(
                updates=self.updates,
                deadline_s=self.deadline_s,
                workers=self.workers,
                review_s=_REVIEW_S,
            )
        return parse_job(text)

    def market(self) -> bytes:
        """Return the market file."""
        chance = {"availability": _AVAILABILITY, "cycle_s": _CYCLE_S}
        spot = {
            "name": "spot",
            "usd_per_hour": {"file": str(_PRICES), "speed": _SPEED, "start_s": 0},
            "start_up_s": _JOINED_S,
            **chance,
        }
        market = {
            "fleet": "process",
            "on_demand": {"usd_per_hour": ON_DEMAND_USD_PER_HOUR, "start_up_s": _JOINED_S},
            "spot": [spot],
            "process": {"seed": self.seed, **chance},
        }
        return msgspec.json.encode(market)


class Preemption:
    """Decides when a worker is killed and when it is started again.

    Args:
        after: Number of records sent before the kill.
        away_s: Time from the kill to the restart.
    """

    def __init__(self, after: int, away_s: float) -> None:
        self._after = after
        self._away_s = away_s
        self.killed_at: float | None = None
        # True once the worker was restarted.
        self.over = False

    @property
    def away(self) -> bool:
        """True if the worker is gone at the moment."""
        return self.killed_at is not None and not self.over

    def due(self, sent: int, now: float) -> Literal["kill", "restart"] | None:
        """Return the action that is due now; each is returned once."""
        if self.killed_at is None:
            if sent < self._after:
                return None
            self.killed_at = now
            return "kill"
        if self.over or now < self.killed_at + self._away_s:
            return None
        self.over = True
        return "restart"
