"""What happens in a demo: the job, how much is streamed to it, and who works for it until when.

Without a market its workers are processes that are there from the beginning, and one of them is
killed half-way. With one they are machines that a provisioner rents to meet a deadline: processes,
too, whose spot prices are those of m4.xlarge in us-east-1d on one day of 2016 (`prices.csv`, 5
minutes a row, from EC2's public price history), and which are preempted at random. For half a
minute the price is above that of on-demand machines: a plan that is not changed pays it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from common.jobs.job_file import parse_job

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec

# Two topics of 8x8 images. 128 records per update and this rate reach 0.98 to 0.99 on held-out
# digits within 60,000 warped records (0.97 to 0.98 at half the learning rate). A checkpoint every
# few seconds lets `settled` follow the stream, by which the producer holds back.
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

# With a market, besides:
_PROVISIONED = """
stop: {{updates: {updates}, deadline_s: {deadline_s:.1f}}}
provisioning: {{workers: {workers}, review_s: {review_s}}}
"""
_PRICES = Path(__file__).with_name("prices.csv")
ON_DEMAND_USD_PER_HOUR = 0.239  # of the same machines at that time
_SPEED = 100.0  # of the recorded prices: a row takes 3 s, the time above on-demand 18 s
_AVAILABILITY = 0.9  # alpha
_CYCLE_S = 30.0  # from one preemption of a machine to its next: some in every demo
_REVIEW_S = 5.0
_SLACK = 1.12  # theta / theta_0: more than no outages at all, less than only spot machines need
_JOINED_S = 4.0  # from the start of a process to its first records
_START_S = 12.0  # until the first machines are at work: several processes load torch at once


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The size of a demo."""

    name: str  # of the job; nothing of this name may be on the servers yet
    records: int
    rate_per_s: float
    workers: int  # with a market: N_tot
    seed: int = 0  # of weights, order and warps
    away_s: float = 5.0  # without a market: how long the worker that is killed is gone
    provision: bool = False

    @property
    def partitions(self) -> int:
        """Of each topic: some brokers assign each topic apart, and no worker is to get none."""
        return self.workers

    @property
    def updates(self) -> int:
        """J, with a market."""
        return max(1, round(self.records / _UPDATE_RECORDS))

    @property
    def deadline_s(self) -> float:
        """Theta, from the submission on, with a market."""
        return _START_S + _SLACK * self.records / self.rate_per_s

    @property
    def on_demand_only_usd(self) -> float:
        """What the updates cost on on-demand machines alone, where nothing is preempted."""
        undisturbed_s = self.updates * _UPDATE_RECORDS / self.rate_per_s  # theta_0
        return self.workers * undisturbed_s / 3600 * ON_DEMAND_USD_PER_HOUR

    def job(self) -> JobSpec:
        """The job's specification."""
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
        """The market file."""
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
    """When a worker is killed, and when it is started again.

    Args:
        after: Records sent until it is killed.
        away_s: From its death to its return.
    """

    def __init__(self, after: int, away_s: float) -> None:
        self._after = after
        self._away_s = away_s
        self.killed_at: float | None = None
        self.over = False  # it has happened, and was made good

    @property
    def away(self) -> bool:
        """Whether the worker is gone just now."""
        return self.killed_at is not None and not self.over

    def due(self, sent: int, now: float) -> Literal["kill", "restart"] | None:
        """What is to be done now, each once."""
        if self.killed_at is None:
            if sent < self._after:
                return None
            self.killed_at = now
            return "kill"
        if self.over or now < self.killed_at + self._away_s:
            return None
        self.over = True
        return "restart"
