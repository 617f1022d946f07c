"""Virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.simulation.experiments.clock import VirtualTime

TIMES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]), max_size=20)


@given(TIMES)
def test_things_happen_in_order_and_those_of_one_moment_in_the_order_of_asking(
    times: list[float],
) -> None:
    time, happened = VirtualTime(), list[tuple[float, int]]()
    for index, at in enumerate(times):
        time.at(at, lambda index=index: happened.append((time.now, index)))

    time.run()

    assert happened == sorted(zip(times, range(len(times)), strict=True))


def test_what_should_have_happened_before_happens_now() -> None:
    time, happened = VirtualTime(), list[float]()
    time.at(2.0, lambda: time.at(1.0, lambda: happened.append(time.now)))

    time.run()

    assert happened == [2.0]


def test_nothing_happens_after_a_stop_until_it_runs_again() -> None:
    time, happened = VirtualTime(), list[float]()
    time.at(1.0, time.stop)
    time.at(1.0, happened.append, 1.0)

    time.run()
    stopped = list(happened)
    time.run()

    assert (stopped, happened) == ([], [1.0])
