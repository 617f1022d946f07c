"""Section V's job and market as experiments, one for each setting and policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from common.spot.experiments.draws import draws_of
from common.spot.experiments.spec import (
    Experiment,
    GradientSpec,
    OnDemandSpec,
    PolicySpec,
    SpotSpec,
    UniformRates,
)
from common.spot.market.billing_spec import BillingRules
from common.spot.theory.work import PaperMarket, Work, market

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.policy_names import StreamPolicyName
    from common.spot.traces.spec import TraceSpec

Rates: TypeAlias = Literal["equal", "drawn"]

WORKERS = 64  # N_tot
# lambda_A if all workers have the same.
RATE_PER_S = 125.0
# lambda_A otherwise, drawn for each worker and run.
DRAWN = UniformRates(low=1, high=250)
GROUP_SIZE = 20  # K
BATCH_SIZE = 256  # b
UPDATES = 10_000  # J
# mu_C: Proposition 1 requires less than 0.032 s. The paper does not give its value.
GRADIENT_S = 0.025
# A CNN of 230,000 weights, a batch of 256 images, one core.
SLOW_GRADIENT_S = 0.1
PLAIN = BillingRules()
# Mean time from one preemption to the next.
CYCLE_S = 1000.0

# Without the escapes, the linter takes them for mistyped Latin letters.
ALPHA, SIGMA = "\N{GREEK SMALL LETTER ALPHA}", "\N{GREEK SMALL LETTER SIGMA}"

RATES: dict[Rates, str] = {"equal": "λ = 125", "drawn": "λ ~ U(1, 250)"}


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per hour."""

    name: str
    on_demand: float  # pi_o
    spot: float  # pi_s

    @property
    def ratio(self) -> float:
        """pi_s / pi_o: the cost of all workers on spot relative to on-demand machines alone."""
        return self.spot / self.on_demand


HIGH = Prices("high", 0.286, 0.158)
LOW = Prices("low", 0.186, 0.058)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of section V's cost comparison."""

    availability: float = 0.9  # alpha
    deadline_factor: float = 1.05  # theta / theta_0
    rates: Rates = "equal"
    prices: Prices = HIGH
    group_size: int = GROUP_SIZE  # K

    @property
    def key(self) -> str:
        """Name of the setting in the JSON file."""
        factor = f"{self.availability:g}-{self.deadline_factor:.2f}"
        return f"{self.rates}-{self.prices.name}-{factor}-K{self.group_size}"

    @property
    def label(self) -> str:
        """Availability and deadline, for tables and plots."""
        return f"{ALPHA} = {self.availability:g}, θ = {self.deadline_factor:.2f} θ₀"

    @property
    def market(self) -> PaperMarket:
        """The paper's market."""
        return market(self.prices.on_demand, self.prices.spot, self.availability)

    @property
    def bound(self) -> float:
        """Corollary 2, equation 19: lower bound of Theorem 4's cost as a share of on-demand cost.

        It is equation 16 at the N_s* of equation 18 without its floor.
        """
        prices, alpha = self.prices, self.availability
        saved = (prices.on_demand - alpha * prices.spot) * (self.deadline_factor - 1)
        lost = prices.on_demand * (1 - alpha)
        return max(self.deadline_factor - saved / lost, prices.ratio)

    def work(self) -> Work:
        """Return the work if all rates are equal."""
        return self._work(np.full(WORKERS, RATE_PER_S))

    def works(self, runs: int, seed: int, folder: Path) -> list[Work]:
        """Return the work of each run of that seed, with the rates that it draws."""
        rates = draws_of(experiment(self, "static"), folder, runs, seed).givens.rates_per_s
        return [self._work(each) for each in rates]

    def _work(self, rates_per_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Work:
        work = Work(rates_per_s, self.group_size, BATCH_SIZE, UPDATES, 0.0)
        return replace(work, deadline_s=self.deadline_factor * work.undisturbed_s)


PAIRS = ((0.9, 1.05), (0.8, 1.05), (0.8, 1.10))  # (alpha, theta / theta_0)


def settings(*, quick: bool) -> list[Setting]:
    """Return all settings of figures 3 to 5. If quick, only the first pair at the high price."""
    pairs, prices = (PAIRS[:1], (HIGH,)) if quick else (PAIRS, (HIGH, LOW))
    return [Setting(*pair, rates, price) for price in prices for rates in RATES for pair in pairs]


@dataclass(frozen=True, slots=True)
class Variation:
    """Differences from section V."""

    name: str = ""  # name of the variation, if any
    spot: int | None = None  # N_s as given, static only
    updates: int = UPDATES
    deadline_s: float | None = None  # instead of a factor
    gradient_s: float = GRADIENT_S
    start_up_s: tuple[float, float] = (0.0, 0.0)  # on-demand, spot
    billing: BillingRules = PLAIN
    usd_per_hour: TraceSpec | None = None  # spot machines
    bid_usd_per_hour: float | None = None
    availability: TraceSpec | None = None
    # Machines of all workers are gained and lost at once.
    together: bool = False
    # Other workers take over the streams of preempted ones.
    moving: bool = False


NOTHING = Variation()


class Case(NamedTuple):
    """A case to simulate."""

    setting: Setting
    policy: StreamPolicyName
    change: Variation = NOTHING

    @property
    def name(self) -> str:
        """Unique name of the case."""
        return " ".join(filter(None, (self.setting.key, self.policy, self.change.name)))


def least_cost_share(setting: Setting) -> float:
    """Return the lowest possible cost, with the future known, relative to on-demand machines alone.

    With f = theta / theta_0: until theta, spot runs for alpha theta of a stream's work of theta_0,
    and on-demand machines do the rest: f alpha pi_s / pi_o + 1 - f alpha. From f = 1 / alpha, spot
    suffices: pi_s / pi_o. This is a mean. It assumes equal rates, machines that start at once, and
    one machine per stream, which pauses while it has none.
    """
    on_spot = min(setting.deadline_factor * setting.availability, 1.0)
    return on_spot * min(setting.prices.ratio, 1.0) + (1 - on_spot)


def experiment(
    setting: Setting, policy: StreamPolicyName, change: Variation = NOTHING
) -> Experiment:
    """Return the experiment of a setting under a policy."""
    on_demand_s, spot_s = change.start_up_s
    spot = SpotSpec(
        usd_per_hour=change.usd_per_hour or setting.prices.spot,
        availability=change.availability or setting.availability,
        cycle_s=CYCLE_S,
        together=change.together,
        bid_usd_per_hour=change.bid_usd_per_hour,
        start_up_s=spot_s,
        billing=change.billing,
    )
    factor = setting.deadline_factor if change.deadline_s is None else None
    return Experiment(
        name=Case(setting, policy, change).name,
        workers=WORKERS,
        rates=RATE_PER_S if setting.rates == "equal" else DRAWN,
        group_size=setting.group_size,
        batch_size=BATCH_SIZE,
        updates=change.updates,
        deadline_s=change.deadline_s,
        deadline_factor=factor,
        gradient=GradientSpec(mean_s=change.gradient_s),
        on_preemption="reassign" if change.moving else "hold",
        on_demand=OnDemandSpec(
            usd_per_hour=setting.prices.on_demand,
            start_up_s=on_demand_s,
            billing=change.billing,
        ),
        spot=(spot,),
        policy=PolicySpec(name=policy, spot=change.spot),
    )
