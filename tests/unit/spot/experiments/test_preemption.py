"""The chain has the paper's distribution, and traces and bids preempt at the right times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.errors import UserError
from common.spot.experiments.preemption import STEP_S, TwoStateChain, offers_of
from common.spot.experiments.prices import ConstantPrices, TracePrices
from common.spot.experiments.spec import SpotSpec
from common.spot.theory.errors import ParameterError
from common.spot.traces.spec import TraceSpec
from common.spot.traces.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

    from common.spot.experiments.preemption import Offers
    from common.spot.traces.trace import Bools


def history(offers: Offers, steps: int) -> Bools:
    """Return (steps, R, N) states of an offer."""
    return np.array([offers(STEP_S * step) for step in range(steps)])


def step_by_step(
    availability: float, cycle_s: float, shape: tuple[int, int], steps: int, seed: int
) -> Bools:
    """Sample the chain by its definition, with a random number per machine and step."""
    rng = np.random.default_rng(seed)
    up = rng.random(shape) < availability
    states = [up]
    lost, back = STEP_S / (availability * cycle_s), STEP_S / ((1 - availability) * cycle_s)
    for _ in range(steps - 1):
        up = np.where(up, rng.random(shape) >= lost, rng.random(shape) < back)
        states.append(up)
    return np.array(states)


def test_chain_is_in_equilibrium_at_every_step() -> None:
    shape, steps = (400, 50), 300
    states = history(TwoStateChain(0.8, 100, shape, np.random.default_rng(1)), steps)
    error = np.sqrt(0.8 * 0.2 / (shape[0] * shape[1]))
    for step in (0, 1, 7, 50, 299):
        assert states[step].mean() == pytest.approx(0.8, abs=5 * error)


def test_chain_has_the_transition_probabilities_of_a_step() -> None:
    states = history(TwoStateChain(0.7, 60, (200, 50), np.random.default_rng(2)), 200)
    before, after = states[:-1], states[1:]
    for was, expected in ((True, STEP_S / (0.7 * 60)), (False, STEP_S / (0.3 * 60))):
        moved = (after != was)[before == was]
        error = np.sqrt(expected * (1 - expected) / moved.size)
        assert moved.mean() == pytest.approx(expected, abs=5 * error)


def test_chain_has_the_requested_mean_cycle() -> None:
    steps, machines = 2000, 500
    states = history(TwoStateChain(0.9, 200, (machines, 1), np.random.default_rng(3)), steps)
    preemptions = np.count_nonzero(states[:-1] & ~states[1:])
    expected = (steps - 1) * STEP_S / 200 * machines
    assert preemptions == pytest.approx(expected, abs=5 * np.sqrt(expected))


def test_chain_agrees_with_a_step_by_step_simulation() -> None:
    shape, steps = (300, 20), 120
    fast = history(TwoStateChain(0.75, 80, shape, np.random.default_rng(4)), steps)
    slow = step_by_step(0.75, 80, shape, steps, seed=5)
    # Distribution of a machine's uptime, and correlation of states over some distances.
    for states in (fast, slow):
        assert states.shape == (steps, *shape)
    times_up = [np.sort(states.mean(axis=0).ravel()) for states in (fast, slow)]
    grid = np.linspace(0, 1, 60)
    laws = [np.searchsorted(times, grid) / times.size for times in times_up]
    # Two-sample Kolmogorov-Smirnov: 1.95 at a level of 0.001.
    assert np.abs(laws[0] - laws[1]).max() < 1.95 * np.sqrt(2 / times_up[0].size)
    for lag in (1, 5, 20):
        together = [(states[lag:] & states[:-lag]).mean(axis=0) for states in (fast, slow)]
        error = np.hypot(*(part.std() / np.sqrt(part.size) for part in together))
        assert together[0].mean() == pytest.approx(together[1].mean(), abs=5 * error)


def test_machines_of_a_chain_are_independent() -> None:
    states = history(TwoStateChain(0.5, 40, (40, 10), np.random.default_rng(6)), 1500)
    walks = states.reshape(1500, -1).astype(np.float64)
    correlation = np.array(np.corrcoef(walks.T))
    apart = correlation[~np.eye(len(correlation), dtype=np.bool_)]
    # Consecutive samples are correlated, so the bounds are those of fewer independent samples.
    assert abs(apart.mean()) < 0.005
    assert apart.std() < 0.15


def test_chain_is_reproducible_by_seed() -> None:
    chains = [TwoStateChain(0.9, 100, (3, 4), np.random.default_rng(7)) for _ in range(2)]
    np.testing.assert_array_equal(history(chains[0], 200), history(chains[1], 200))


def test_chain_is_constant_between_steps_and_mixes_over_many() -> None:
    chain = TwoStateChain(0.5, 20, (2, 500), np.random.default_rng(8))
    state = chain(0)
    np.testing.assert_array_equal(chain(1.9), state)
    # In the long run the first state does not matter, so that half of the machines agree with it.
    assert (chain(4000) == state).mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(1000))
    # The array belongs to the caller, who may change it.
    state[:] = True
    assert not chain(4000).all()


@pytest.mark.parametrize("availability", [0, 1])
def test_availability_of_0_or_1_is_never_or_always_up(availability: float) -> None:
    states = history(TwoStateChain(availability, 100, (5, 5), np.random.default_rng(9)), 500)
    assert (states == bool(availability)).all()


@pytest.mark.parametrize(
    ("availability", "cycle_s", "found"),
    [
        (0.999, 1000, "cycle_s: 1000 s makes the outages 1 s .* must be at least 2000 s"),
        (0.1, 10, "cycle_s: 10 s makes the stays 1 s"),
    ],
)
def test_chain_with_stays_shorter_than_a_step_is_rejected(
    availability: float, cycle_s: float, found: str
) -> None:
    with pytest.raises(ParameterError, match=found):
        TwoStateChain(availability, cycle_s, (1, 1), np.random.default_rng(1))


def made(folder: Path, spot: SpotSpec, shape: tuple[int, int], seed: int = 1) -> Offers:
    prices = ConstantPrices(0.1, shape[0])
    return offers_of(spot, prices, folder, *shape, np.random.default_rng(seed))


def test_shared_count_trace_serves_the_first_workers(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("seconds,count\n0,3\n2,0\n4,1\n6,5\n")
    spec = TraceSpec(file="n.csv", start_s=0)
    spot = SpotSpec(usd_per_hour=0.1, availability=spec, together=True)
    states = history(made(tmp_path, spot, (2, 4)), 5)
    assert states.sum(axis=2).tolist() == [[3, 3], [0, 0], [1, 1], [4, 4], [3, 3]]
    assert states[2].tolist() == [[True, False, False, False]] * 2


def test_shared_availability_trace_serves_all_workers_or_none(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("seconds,available\n0,1\n2,0\n4,1\n")
    spec = TraceSpec(file="n.csv", start_s=0)
    spot = SpotSpec(usd_per_hour=0.1, availability=spec, together=True)
    states = history(made(tmp_path, spot, (1, 3)), 3)
    assert states[:, 0].tolist() == [[True] * 3, [False] * 3, [True] * 3]


def test_separate_workers_read_their_own_part_of_the_trace(tmp_path: Path) -> None:
    rows = "".join(f"{seconds},{int(seconds % 40 < 30)}\n" for seconds in range(0, 400, 10))
    (tmp_path / "n.csv").write_text("seconds,available\n" + rows)
    spot = SpotSpec(usd_per_hour=0.1, availability=TraceSpec(file="n.csv"))
    states = history(made(tmp_path, spot, (50, 40)), 200)
    assert states[0].mean() == pytest.approx(0.75, abs=5 * np.sqrt(0.75 * 0.25 / 2000))
    np.testing.assert_allclose(states.mean(axis=0), 0.75, atol=0.01)  # each in its time
    assert len(np.unique(states.reshape(200, -1), axis=1).T) == 20  # all phases of 40 s / 2 s


def test_separate_workers_have_a_place_in_a_count_trace(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("seconds,count\n0,2\n1000,1\n")
    spot = SpotSpec(usd_per_hour=0.1, availability=TraceSpec(file="n.csv"))
    shares = history(made(tmp_path, spot, (100, 4)), 1000).mean(axis=(0, 1))
    assert shares.tolist() == [1, 0.5, 1, 0.5]  # places 0, 1, 0, 1 of the two


def test_start_s_for_separate_workers_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("seconds,count\n0,2\n1000,1\n")
    spot = SpotSpec(usd_per_hour=0.1, availability=TraceSpec(file="n.csv", start_s=5))
    with pytest.raises(UserError, match="start_s: conflicts with `together: false`"):
        made(tmp_path, spot, (1, 1))


def test_bid_keeps_machines_while_the_price_is_at_most_the_bid(tmp_path: Path) -> None:
    trace = Trace(np.array([0.0, 2, 4]), np.array([0.1, 0.2, 0.3]), 6.0)
    prices, spot = (
        TracePrices(trace, np.array([0.0, 2.0])),
        SpotSpec(usd_per_hour=0.1, bid_usd_per_hour=0.2),
    )
    bid = offers_of(spot, prices, tmp_path, 2, 3, np.random.default_rng(1))
    states = history(bid, 3)
    assert states.all(axis=2).tolist() == [[True, True], [True, False], [False, True]]
    assert (states.all(axis=2) == states.any(axis=2)).all()


def test_bid_and_chain_both_preempt_machines(tmp_path: Path) -> None:
    trace = Trace(np.array([0.0, 2, 4]), np.array([0.1, 0.2, 0.3]), 6.0)
    prices, shape = TracePrices(trace, np.zeros(50)), (50, 20)
    spot = SpotSpec(usd_per_hour=0.1, availability=0.8, cycle_s=50, bid_usd_per_hour=0.2)
    offers = offers_of(spot, prices, tmp_path, *shape, np.random.default_rng(1))
    states = history(offers, 6)
    chain = history(TwoStateChain(0.8, 50, shape, np.random.default_rng(1)), 6)
    chain[[2, 5]] = False
    np.testing.assert_array_equal(states, chain)


def test_bid_alone_decides_without_a_chain_or_trace(tmp_path: Path) -> None:
    spot = SpotSpec(usd_per_hour=0.1, bid_usd_per_hour=0.05)
    assert not made(tmp_path, spot, (2, 2))(0).any()
    always = SpotSpec(usd_per_hour=0.1)
    assert made(tmp_path, always, (2, 2))(0).all()
