"""What happens in a demo: how much is streamed, to which job, and when a worker is preempted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from common.jobs.spec import parse_job

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec

# Two topics of 8x8 images. 128 records per update and this rate reach 0.98 to 0.99 on held-out
# digits within 60,000 warped records (0.97 to 0.98 at half the learning rate). A checkpoint every
# few seconds lets `settled` follow the stream, by which the producer holds back.
JOB = """
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
device: cpu
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a demo."""

    name: str  # of the job; nothing of this name may be on the servers yet
    records: int
    rate_per_s: float
    workers: int
    seed: int
    away_s: float  # how long the preempted worker is gone

    @property
    def partitions(self) -> int:
        """Of each topic: some brokers deal out each topic apart, and nobody shall be left out."""
        return self.workers

    def job(self) -> JobSpec:
        """The job's specification."""
        return parse_job(JOB.format(name=self.name, seed=self.seed))


class Preemption:
    """When the victim dies and when it comes back.

    Args:
        after: Records sent until it is killed.
        away_s: From its death to its return.
    """

    def __init__(self, after: int, away_s: float) -> None:
        self._after = after
        self._away_s = away_s
        self._killed_at: float | None = None
        self._over = False

    @property
    def over(self) -> bool:
        """Whether it has happened, and was made good."""
        return self._over

    def due(self, sent: int, now: float) -> Literal["kill", "bring back"] | None:
        """What is to be done now, each once."""
        if self._killed_at is None:
            if sent < self._after:
                return None
            self._killed_at = now
            return "kill"
        if self._over or now < self._killed_at + self._away_s:
            return None
        self._over = True
        return "bring back"
