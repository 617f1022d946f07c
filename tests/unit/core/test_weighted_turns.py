"""Turns: shares by weight, with a minimum share and no unlimited credit or debt."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.weighted_turns import FLOOR, MOST_TURNS, Turns, level

weights = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", "e"]), st.floats(0.01, 1000), min_size=1
)


def served(turns: Turns, shares: dict[str, float], count: int) -> str:
    """Return the names that `count` turns in a row serve."""
    order = ""
    for _ in range(count):
        chosen = turns.choose(shares, shares)
        assert chosen is not None
        turns.pay({chosen: 1}, shares)
        order += chosen
    return order


def test_turns_of_light_keys_are_spread_among_those_of_heavy_ones() -> None:
    assert served(Turns(), {"a": 2, "b": 1}, 9) == "aba" * 3


def test_choose_returns_none_without_weights() -> None:
    turns = Turns()
    turns.pay({"a": 1}, {})

    assert turns.choose({}, []) is None
    assert turns.choose({"a": 0}, ["a"]) is None
    assert turns.choose({"a": 1}, among=["b"]) is None
    assert level({}) == {}


@given(weights, st.integers(1, 300))
def test_every_key_is_served_its_share_at_any_time(shares: dict[str, float], count: int) -> None:
    total = sum(shares.values())

    for key, times in Counter(served(Turns(), shares, count)).items():
        assert abs(times - count * shares[key] / total) < len(shares)


@given(weights, st.integers(1, 50), st.randoms())
def test_order_of_keys_does_not_matter(
    shares: dict[str, float], count: int, random: Random
) -> None:
    names = list(shares)
    random.shuffle(names)

    assert served(Turns(), shares, count) == served(Turns(), {n: shares[n] for n in names}, count)


def test_absent_key_saves_up_no_credit() -> None:
    turns = Turns()
    served(turns, {"a": 1, "b": 1}, 3)
    served(turns, {"a": 1, "b": 0}, 100)

    assert Counter(served(turns, {"a": 1, "b": 1}, 10)) == {"a": 5, "b": 5}


def test_excluded_key_does_not_take_all_turns_afterwards() -> None:
    turns, shares = Turns(), {"a": 1.0, "b": 1.0}
    for _ in range(100):
        assert turns.choose(shares, among=["a"]) == "a"
        turns.pay({"a": 1}, shares)

    order = served(turns, shares, 30)
    assert order[-10:] == "ab" * 5
    assert order.index("a") <= 2 * MOST_TURNS


def test_turn_may_be_shared() -> None:
    turns, shares = Turns(), {"a": 1.0, "b": 1.0, "c": 1.0}
    turns.pay({"a": 0.5, "b": 0.5}, shares)
    assert turns.choose(shares, shares) == "c"


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 10**6), min_size=1))
def test_level_gives_at_least_a_fifth_of_an_even_share(backlogs: dict[str, int]) -> None:
    shares = level(backlogs)
    total = sum(shares.values())

    for key, share in shares.items():
        assert share / total >= FLOOR / len(shares) * (1 - 1e-9)
        assert share / total == pytest.approx(
            (1 - FLOOR) * backlogs[key] / max(sum(backlogs.values()), 1) + FLOOR / len(shares)
            if any(backlogs.values())
            else 1 / len(shares)
        )
