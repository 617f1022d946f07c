"""What is asked for, for every part alike, and what a part is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from load.paper.job import NOTHING, experiment
from load.paper.runner import Simulation

if TYPE_CHECKING:
    from pathlib import Path

    from common.policies.policy import PolicyName
    from load.paper.document import Section
    from load.paper.job import Setting, Variation
    from load.paper.runner import Runner


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command was asked for."""

    runs: int
    seed: int
    quick: bool
    data: Path | None  # recorded traces and images; None: there are none
    scratch: Path  # for files that simulations read

    def simulation(
        self, setting: Setting, policy: PolicyName, change: Variation = NOTHING, runs: int = 0
    ) -> Simulation:
        """Make a simulation of one setting and policy; the same seed for all of them.

        So all policies see the same rates and preemptions.
        """
        wanted = experiment(setting, policy, change)
        return Simulation(wanted, self.scratch, runs or self.runs, self.seed)


class Part(Protocol):
    """Does one part of the evaluation and says what it found."""

    def __call__(self, asked: Asked, runner: Runner) -> Section:
        """Do it."""
        ...
