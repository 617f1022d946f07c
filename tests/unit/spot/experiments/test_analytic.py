"""Times of updates, compared with records drawn one by one and with the paper's equations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from common.spot.experiments.analytic import Conditions, simulate_analytically
from common.spot.experiments.policy_driver import Givens, Priors
from common.spot.experiments.preemption import TwoStateChain
from common.spot.experiments.prices import ConstantPrices
from common.spot.experiments.results import RunsSummary
from common.spot.policies.fixed import OnDemandOnly, Static
from common.spot.theory.estimates import RatePrior
from common.spot.theory.provisioning import plan_of
from common.spot.theory.work import Pool, Work, market
from tests.unit.spot.experiments.decisions import ON_DEMAND, SPOT, Scripted, always

if TYPE_CHECKING:
    from common.spot.experiments.results import SimulatedRun
    from common.spot.machines import PriceHistory

Array: TypeAlias = npt.NDArray[np.float64]

ON_DEMAND_USD, SPOT_USD, ALPHA = 0.286, 0.158, 0.9
POOLS = (Pool("on-demand", ON_DEMAND_USD), Pool("spot", SPOT_USD, ALPHA))


def givens(rates: Array, updates: int, theta: float = 1.05, k: int = 20, b: int = 256) -> Givens:
    undisturbed_s = updates * k * b / rates.sum(axis=1)
    return Givens(POOLS, rates, k, b, updates, theta * undisturbed_s, 0.01)


@dataclass
class Drawn:
    """Offers that are drawn with one character per step. The last character repeats."""

    timeline: str
    shape: tuple[int, int]
    steps: int = field(default=0, init=False)

    def __call__(self, now_s: float) -> npt.NDArray[np.bool_]:
        """Return the offers of a step."""
        assert now_s == 2.0 * self.steps
        self.steps += 1
        at = min(self.steps, len(self.timeline)) - 1
        return np.full(self.shape, self.timeline[at] == "#")


@dataclass
class Jump:
    """A price that jumps once."""

    runs: int
    at_s: float
    before: float
    after: float

    @property
    def mean_usd_per_hour(self) -> float:
        """Return any price: these tests do not use the mean."""
        return self.before

    def at(self, now_s: float) -> Array:
        """Return the price."""
        return np.full(self.runs, self.before if now_s < self.at_s else self.after)

    def changed(self, before_s: float, now_s: float) -> npt.NDArray[np.bool_]:
        """Return True for all runs if the price jumped since `before_s`."""
        return np.full(self.runs, before_s < self.at_s <= now_s)

    def past(self, run: int, ahead_s: float, most_s: float) -> PriceHistory:
        """Return the history of a constant price."""
        return ConstantPrices(self.before, self.runs).past(run, ahead_s, most_s)


def prices(runs: int) -> tuple[ConstantPrices, ConstantPrices]:
    return ConstantPrices(ON_DEMAND_USD, runs), ConstantPrices(SPOT_USD, runs)


def steady(runs: int, workers: int, timeline: str = "#") -> Conditions:
    """Return constant prices, and offers by a timeline."""
    return Conditions(prices(runs), (None, Drawn(timeline, (runs, workers))))


def chained(runs: int, workers: int, cycle_s: float = 100.0) -> Conditions:
    """Return the paper's market, ten times as fast."""
    chain = TwoStateChain(ALPHA, cycle_s, (runs, workers), np.random.default_rng(3))
    return Conditions(prices(runs), (None, chain))


def runtimes_s(runs: tuple[SimulatedRun, ...]) -> Array:
    return np.array([run.runtime_s for run in runs])


def test_on_demand_only_takes_theta_0_at_its_price() -> None:
    runs, workers = 200, 64
    job = givens(np.full((runs, workers), 125.0), updates=200)
    done = simulate_analytically(job, OnDemandOnly(), steady(runs, workers), seed=1)
    # When the last update is complete, each of the other workers has half a batch left on average.
    expected_s = job.undisturbed_s[0] + (workers - 1) * 255 / 2 / (workers * 125)
    error_s = runtimes_s(done).std() / np.sqrt(runs)
    assert runtimes_s(done).mean() == pytest.approx(expected_s, abs=5 * error_s)
    assert runtimes_s(done).mean() == pytest.approx(job.undisturbed_s[0], rel=0.01)
    for run in done:
        usd = run.runtime_s * workers * ON_DEMAND_USD / 3600
        assert run.cost_usd == pytest.approx(usd)
        assert (run.finished, run.updates, run.spot_share, run.changes) == (True, 200, 0, 0)
        assert run.cost_ratio == pytest.approx(run.runtime_s / job.undisturbed_s[0])


def test_static_split_costs_what_equation_16_says() -> None:
    runs, workers = 200, 64
    job = givens(np.full((runs, workers), 125.0), updates=1000)
    done = RunsSummary.of(simulate_analytically(job, Static(), chained(runs, workers), seed=1))
    work = Work(job.rates_per_s[0], 20, 256, 1000, job.deadline_s[0])
    expected = plan_of(work, market(ON_DEMAND_USD, SPOT_USD, ALPHA), 30)
    assert done.cost_usd.mean == pytest.approx(expected.expected_cost_usd, rel=0.01)
    assert done.runtime_s.mean == pytest.approx(expected.expected_runtime_s, rel=0.01)
    assert done.spot_share == pytest.approx(30 * ALPHA / (34 + 30 * ALPHA), rel=0.01)


def record_by_record(
    rates: Array, work: tuple[int, int, int], gaps: tuple[float, int], rng: np.random.Generator
) -> float:
    """Draw every record, and return the time at which K J batches are complete.

    Args:
        rates: (workers,) records per second.
        work: K, b and J.
        gaps: Shape of the Gamma distribution, and number of gaps.
        rng: Source of random numbers.
    """
    k, b, updates = work
    shape, count = gaps
    times_s = rng.gamma(shape, 1 / (shape * rates[:, np.newaxis]), (len(rates), count)).cumsum(
        axis=1
    )
    end_s = np.sort(times_s[:, b - 1 :: b], axis=None)[k * updates - 1]
    assert end_s < times_s[:, -1].min()  # enough were drawn
    return float(end_s)


@pytest.mark.parametrize("shape", [1.0, 4.0])
def test_last_update_time_agrees_with_record_by_record_simulation(shape: float) -> None:
    # Records are few and rates differ, so partial batches are a tenth of the work.
    k, b, updates, runs = 3, 8, 12, 500
    rates = np.array([3.0, 1.0, 2.0, 0.5])
    rng = np.random.default_rng(5)
    slow = [record_by_record(rates, (k, b, updates), (shape, 400), rng) for _ in range(runs)]
    job = givens(np.tile(rates, (runs, 1)), updates, k=k, b=b)
    # Steps are short enough that the update's place in a step does not matter.
    conditions = replace(steady(runs, 4), variation=shape**-0.5, offers=(None, None), step_s=0.25)
    done = runtimes_s(simulate_analytically(job, OnDemandOnly(), conditions, seed=6))
    assert stats.ks_2samp(done, slow).pvalue > 0.001
    assert done.mean() == pytest.approx(np.mean(slow), abs=5 * np.std(slow) / np.sqrt(runs / 2))


# With variation 0, records arrive evenly. Only the timeline and the phases of the streams determine
# the time of the last update.
EVEN = 0.0


def one_worker(timeline: str, gradient_s: float = 0.01) -> tuple[Givens, Conditions]:
    """Return a job of two updates of 100 records. At 5 records a second it takes 40 s."""
    job = replace(givens(np.array([[5.0]]), updates=2, k=10, b=10), gradient_s=gradient_s)
    return job, replace(steady(1, 1, timeline), variation=EVEN)


def test_paused_stream_is_delayed_by_the_outage_of_its_worker() -> None:
    # up       |--- 10 s ---|   20 s   |--- 30 s ---|
    job, conditions = one_worker("#" * 5 + "." * 10 + "#")
    (run,) = simulate_analytically(job, Static(1), conditions, seed=1)
    assert run.runtime_s == pytest.approx(60.0, abs=2.0)
    assert run.cost_usd == pytest.approx((run.runtime_s - 20) * SPOT_USD / 3600)


def test_kept_records_with_fast_gradients_cause_no_delay() -> None:
    job, conditions = one_worker("#" * 5 + "." * 10 + "#")
    (run,) = simulate_analytically(job, Static(1), replace(conditions, stream="keep"), seed=1)
    assert run.runtime_s == pytest.approx(40.0, abs=2.0)


def test_kept_records_are_processed_at_the_speed_of_gradients() -> None:
    # The worker can compute 10 records a second, and 5 a second arrive.
    # up       |- 10 s -|  20 s  |--- 20 s ---|
    # waiting  0        0 ... 100 ........... 0     the backlog is done at 50 s
    job, conditions = one_worker("#" * 5 + "." * 10 + "#", gradient_s=1.0)
    longer = replace(job, updates=3)
    conditions = replace(conditions, stream="keep")
    (at_50_s,) = simulate_analytically(replace(job, updates=2), Static(1), conditions, seed=1)
    conditions = replace(conditions, offers=steady(1, 1, "#" * 5 + "." * 10 + "#").offers)
    (run,) = simulate_analytically(longer, Static(1), conditions, seed=1)
    # 50 records are computed in the first 10 s, and 150 in the 15 s after the outage.
    assert at_50_s.runtime_s == pytest.approx(45.0, abs=2.0)
    assert run.runtime_s == pytest.approx(60.0, abs=2.0)


def test_policies_see_the_waiting_updates_of_kept_records() -> None:
    # 5 records a second arrive, and 100 make an update. The worker is away from 10 s to 30 s, when
    # half an update is made. At 28 s, a policy plans for the other 1.5 of two updates if the stream
    # pauses. If records are kept, about 0.6 updates are left to arrive: a gradient of 10 ms takes
    # next to no time.
    job, conditions = one_worker("#" * 5 + "." * 10 + "#")
    expected: dict[Literal["pause", "keep"], float] = {"pause": 1.5, "keep": 0.55}
    for stream, left in expected.items():
        offers = steady(1, 1, "#" * 5 + "." * 10 + "#").offers
        policy = Scripted(always([SPOT]), review_s=2.0)
        changed = replace(conditions, stream=stream, offers=offers)
        simulate_analytically(job, policy, changed, seed=1)
        (asked,) = (each for each in policy.asked if each.now_s == 28.0)
        assert asked.waiting is None
        assert asked.work.updates == pytest.approx(left, abs=0.1)

    job = givens(np.full((1, 4), 5.0), updates=20, k=10, b=10)
    slow = replace(steady(1, 4), stream="reassign", capacity_per_s=lambda machines: 0.1 * machines)
    reassign = Scripted(always([SPOT, -1, -1, -1]), review_s=10.0, plans_backlog=True)
    simulate_analytically(job, reassign, slow, seed=1)
    (asked,) = (each for each in reassign.asked if each.now_s == 50.0)
    assert asked.waiting == pytest.approx((0.2 - 0.1) * 50, abs=0.7)
    assert asked.work.updates == pytest.approx(20 - 0.1 * 50, abs=0.7)


def test_reassigned_streams_lose_no_records_during_an_outage() -> None:
    # machines  4 4 4 4 0 0 0 0 0 4 ...
    # Each machine can make 0.1 updates a second. The records of 0.2 updates a second arrive.
    job = givens(np.full((1, 4), 5.0), updates=20, k=10, b=10)
    conditions = replace(
        steady(1, 4, "####.....#"),
        stream="reassign",
        variation=EVEN,
        capacity_per_s=lambda machines: 0.1 * machines,
    )
    (run,) = simulate_analytically(job, Static(4), conditions, seed=1)
    # The records of the outage are caught up afterwards.
    assert run.runtime_s == pytest.approx(100.0, abs=3.0)


def test_reassigned_streams_are_limited_by_machine_capacity() -> None:
    job = givens(np.full((1, 4), 5.0), updates=20, k=10, b=10)
    conditions = replace(
        steady(1, 4), stream="reassign", capacity_per_s=lambda machines: 0.1 * machines
    )
    policy = Scripted(always([SPOT, -1, -1, -1]))
    (run,) = simulate_analytically(job, policy, conditions, seed=1)
    assert run.runtime_s == pytest.approx(20 / 0.1, abs=4.0)
    assert run.pools[SPOT].machine_s == pytest.approx(run.runtime_s)


def test_last_round_adds_its_time_and_cost() -> None:
    runs = 2
    job = givens(np.full((runs, 4), 5.0), updates=5, k=10, b=10)
    conditions = replace(steady(runs, 4), variation=EVEN)
    before = simulate_analytically(job, OnDemandOnly(), conditions, seed=1)
    conditions = replace(steady(runs, 4), variation=EVEN, last_round_s=7.0)
    after = simulate_analytically(job, OnDemandOnly(), conditions, seed=1)
    for one, other in zip(before, after, strict=True):
        assert other.runtime_s == pytest.approx(one.runtime_s + 7)
        assert other.cost_usd == pytest.approx(one.cost_usd + 4 * 7 * ON_DEMAND_USD / 3600)


def test_run_without_any_machine_gives_up_at_no_cost() -> None:
    job = givens(np.full((3, 4), 5.0), updates=5, k=10, b=10)
    conditions = replace(steady(3, 4, "."), give_up_after=2.0)
    for run in simulate_analytically(job, Static(4), conditions, seed=1):
        assert (run.finished, run.met, run.cost_usd, run.launches) == (False, False, 0, 0)
        assert run.runtime_s == pytest.approx(2 * run.deadline_s)
        assert run.updates == 0


def test_current_prices_are_paid_and_shown_to_policies() -> None:
    # The price of a spot machine is 0.1 USD an hour for 10 s, and then 0.3.
    job = givens(np.full((1, 4), 5.0), updates=5, k=10, b=10)
    conditions = replace(steady(1, 4), prices=(prices(1)[0], Jump(1, 10.0, 0.1, 0.3)))
    policy = Scripted(always([SPOT] * 4))
    (run,) = simulate_analytically(job, policy, conditions, seed=1)
    assert [situation.now_s for situation in policy.asked] == [0.0, 10.0]
    assert policy.asked[1].pools[SPOT].usd_per_hour == 0.3
    assert policy.asked[1].work.updates == pytest.approx(5 - 10 * 20 / 100 + 4 * 4.5 / 100)
    assert run.cost_usd == pytest.approx(4 * (10 * 0.1 + (run.runtime_s - 10) * 0.3) / 3600)


def test_rates_are_learned_from_observed_records() -> None:
    rates = np.array([[2.0, 40.0, 5.0, 100.0]] * 50)
    job = givens(rates, updates=500, k=4, b=8)
    policy = Scripted(always([SPOT, SPOT, ON_DEMAND, ON_DEMAND]), review_s=60.0)
    beliefs = Priors(RatePrior(1.0, 0.1))
    simulate_analytically(job, policy, chained(50, 4), seed=1, beliefs=beliefs)
    first, later = policy.asked[0], [one for one in policy.asked if one.now_s == 60.0]
    assert first.work.rates_per_s.tolist() == [10.0] * 4
    learnt = np.array([one.work.rates_per_s for one in later])
    error = np.sqrt(rates[0] / (ALPHA * 60) / len(later))
    assert (np.abs(learnt.mean(axis=0) - rates[0]) < 6 * error + 0.2).all()
    assert learnt.std(axis=0).min() > 0


def test_policies_see_progress_from_arrived_records() -> None:
    # 20 records/s arrive, and an update takes 10. At 1,200 s, 24,000 ± 155 records have arrived.
    runs = 200
    job = givens(np.full((runs, 4), 5.0), updates=10_000, k=2, b=5)
    policy = Scripted(always([ON_DEMAND] * 4), review_s=600.0)
    simulate_analytically(job, policy, steady(runs, 4), seed=1)
    left = np.array([one.work.updates for one in policy.asked if one.now_s == 1200.0])
    assert left.mean() == pytest.approx(10_000 - 2_400, rel=0.001)
    assert left.std() == pytest.approx(15.5, rel=0.2)


def test_frequent_reviews_do_not_change_the_runtime_distribution() -> None:
    # Repeated lookups return the same records as a single draw.
    runs = 300
    job = givens(np.full((runs, 4), 5.0), updates=12, k=5, b=10)
    once = simulate_analytically(job, OnDemandOnly(), steady(runs, 4), seed=1)
    nosy = Scripted(always([ON_DEMAND] * 4), review_s=2.0)
    often = simulate_analytically(
        job, nosy, steady(runs, 4), seed=2, beliefs=Priors(RatePrior(1.0, 0.2))
    )
    assert stats.ks_2samp(runtimes_s(once), runtimes_s(often)).pvalue > 0.001


def test_double_pace_halves_the_runtime() -> None:
    job = givens(np.full((1, 4), 5.0), updates=50, k=10, b=10)
    conditions = replace(steady(1, 4), variation=EVEN, pace=lambda _: np.full(1, 2.0))
    (run,) = simulate_analytically(job, OnDemandOnly(), conditions, seed=1)
    assert run.runtime_s == pytest.approx(job.undisturbed_s[0] / 2, abs=1.0)


def test_same_seed_gives_the_same_runs() -> None:
    job = givens(np.full((5, 8), 5.0), updates=50, k=10, b=10)
    one, other = (simulate_analytically(job, Static(), chained(5, 8), seed=4) for _ in range(2))
    assert one == other
    assert [run.index for run in one] == list(range(5))


def test_progress_rises_to_one() -> None:
    job = givens(np.full((2, 4), 5.0), updates=50, k=10, b=10)
    shares = list[float]()
    simulate_analytically(job, OnDemandOnly(), steady(2, 4), seed=1, progress=shares.append)
    # The job takes 250 s, plus the rest of some batches: 125 steps or a few more. Progress is
    # reported after 50 steps, after 100 steps and at the end.
    assert len(shares) == 3
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.4, abs=0.02)
    assert shares[-1] == 1.0
