"""Figure 3b: accuracy against time and cost, with and without preemption, by real SGD."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from common.spot.experiments.experiment import simulate
from common.spot.experiments.spec import (
    Experiment,
    GradientSpec,
    LearningSpec,
    OnDemandSpec,
    PolicySpec,
    SpotSpec,
)
from load.paper import plots
from load.paper.document import Section, percent
from load.paper.job import HIGH, PAIRS, Setting

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.policy_names import StreamPolicyName
    from load.paper.runner import Asked, Runner

IMAGES = "mnist-train-00000-47999-images-idx3-ubyte.gz"
WORKERS, GROUP_SIZE, BATCH_SIZE = 16, 8, 64
# Low, so that outages of some seconds are as long relative to a run as in the paper.
RATE_PER_S = 12.5
UPDATES, QUICK_UPDATES = 400, 60
# An outage must last a step of 2 s on average.
LEAST_CYCLE_S = 25.0
SEEDS, QUICK_SEEDS = 5, 1


@dataclass(frozen=True, slots=True)
class Lesson:
    """A run with real SGD."""

    policy: StreamPolicyName
    availability: float
    deadline_factor: float
    updates: int
    data: str
    folder: Path
    seed: int

    @property
    def label(self) -> str:
        """Policy and setting."""
        if self.policy == "on-demand":
            return "on-demand"
        return f"{self.policy}, {Setting(self.availability, self.deadline_factor).label}"

    @property
    def name(self) -> str:
        """Unique name of the run."""
        return f"{self.label}, seed {self.seed}"

    def experiment(self) -> Experiment:
        """Return the experiment.

        A run has 6.4 cycles of availability, as in the paper, or fewer that last `LEAST_CYCLE_S`.
        """
        alone_s = self.updates * GROUP_SIZE * BATCH_SIZE / (WORKERS * RATE_PER_S)
        return Experiment(
            name=self.name,
            workers=WORKERS,
            rates=RATE_PER_S,
            group_size=GROUP_SIZE,
            batch_size=BATCH_SIZE,
            updates=self.updates,
            deadline_factor=self.deadline_factor,
            gradient=GradientSpec(mean_s=0.01),
            on_demand=OnDemandSpec(usd_per_hour=HIGH.on_demand),
            spot=(
                SpotSpec(
                    usd_per_hour=HIGH.spot,
                    availability=self.availability,
                    cycle_s=max(alone_s / 6.4, LEAST_CYCLE_S),
                ),
            ),
            policy=PolicySpec(name=self.policy),
            mode="protocol",
            learning=LearningSpec(
                data=self.data, hidden=(32,), evaluate_every=max(self.updates // 20, 1)
            ),
        )


def learn(lesson: Lesson) -> plots.Curve:
    """Run a lesson. At module level, so that another process finds it by its name."""
    import torch  # noqa: PLC0415 -- takes seconds, and only these simulations need it

    # The networks are small, and other runs share the machine.
    torch.set_num_threads(1)
    experiment = lesson.experiment()
    (found,) = simulate(experiment, lesson.folder, 1, lesson.seed)
    return plots.Curve(
        found.curve, found.runtime_s, found.cost_usd, found.cost_ratio, found.updates
    )


def run(runner: Runner) -> Section:
    """Learn under each policy and compare."""
    section = Section("Accuracy, as in figure 3b")
    lessons = _lessons(runner.asked)
    curves = runner.map("accuracy", learn, {each.name: each for each in lessons})
    found = defaultdict[str, list[plots.Curve]](list)
    for lesson in lessons:
        found[lesson.label].append(curves[lesson.name])
    first = lessons[0]
    data = "48,000 images of MNIST" if first.data.endswith(IMAGES) else "scikit-learn's digits"
    section.say(
        f"Real SGD (Adam) in virtual time with the production state machines: {data}, a fifth of"
        f" them held out, one hidden layer of 32, {WORKERS} workers with {RATE_PER_S:g} records/s"
        f" each, K = {GROUP_SIZE}, b = {BATCH_SIZE}, J = {first.updates},"
        f" {len(found['on-demand'])} runs each. The task is not the paper's; only the effect of"
        " preemption is compared."
    )
    rows, accuracies = [], dict[str, list[float]]()
    for label, each in found.items():
        accuracies[label] = [one.points[-1].accuracy for one in each]
        rows.append(
            f"{label} | {_mean(accuracies[label])} | {fmean(one.runtime_s for one in each):,.0f} s"
            f" | {percent(fmean(one.cost_ratio for one in each))}"
        )
        section.data[label] = [asdict(one) for one in each]
    section.table(" | final accuracy | runtime | cost", rows)
    section.draw(
        "accuracy.png",
        plots.accuracy({label: each[0] for label, each in found.items()}),
        "Accuracy over time and over cost, one run each",
    )
    alone = accuracies.pop("on-demand")
    gap = max(abs(fmean(each) - fmean(alone)) for each in accuracies.values())
    noise = f" ({100 * stdev(alone):.2f} points between seeds)" if len(alone) > 1 else ""
    section.say(
        "After the same number of updates, the mean accuracy with preemption is within"
        f" {100 * gap:.2f} points of that without{noise}. Every update has K batches, so preemption"
        " costs time, not accuracy. The plot spreads a run's cost evenly over its time."
    )
    return section


def _lessons(asked: Asked) -> list[Lesson]:
    folder, data = asked.scratch, "digits"
    if asked.data is not None and (asked.data / "images" / IMAGES).exists() and not asked.quick:
        folder, data = asked.data, f"images/{IMAGES}"
    updates, seeds = (QUICK_UPDATES, QUICK_SEEDS) if asked.quick else (UPDATES, SEEDS)
    kinds: list[tuple[StreamPolicyName, tuple[float, float]]] = [("on-demand", PAIRS[0])]
    kinds += [("static", pair) for pair in PAIRS[: 1 if asked.quick else None]]
    return [
        Lesson(policy, *pair, updates, data, folder, seed)
        for policy, pair in kinds
        for seed in range(asked.seed, asked.seed + seeds)
    ]


def _mean(values: list[float]) -> str:
    if len(values) == 1:
        return percent(values[0], 2)
    return f"{percent(fmean(values), 2)} ± {100 * stdev(values):.2f}"
