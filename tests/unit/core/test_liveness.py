"""Liveness of workers by heartbeats that may all vanish at once."""

from hypothesis import given
from hypothesis import strategies as st

from common.core.liveness import ALIVE, LEAVING, Departures, Heartbeat, Liveness
from common.core.messages import WorkerId
from tests.unit.core.examples import A, B, C

GRACE_S = 1.5
NOBODY = Departures(frozenset(), frozenset())


def alive(*workers: WorkerId, digest: str = "") -> dict[WorkerId, Heartbeat]:
    return dict.fromkeys(workers, Heartbeat(ALIVE, digest))


def test_worker_whose_heartbeat_expires_is_lost() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B), now=0.0)

    assert liveness.observe(alive(B), now=1.0) == Departures(frozenset({A}), frozenset())
    assert liveness.live == {B}


def test_leaving_worker_gets_no_work_and_is_not_lost() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B), now=0.0)

    assert liveness.observe({A: Heartbeat(LEAVING), B: Heartbeat(ALIVE)}, now=1.0) == NOBODY
    assert liveness.live == {B}
    assert liveness.observe(alive(B), now=2.0) == Departures(frozenset(), frozenset({A}))


def test_worker_with_another_process_has_left_and_is_alive() -> None:
    liveness = Liveness(GRACE_S)
    first, second = Heartbeat(ALIVE, life="1"), Heartbeat(ALIVE, life="2")
    assert liveness.observe({A: first, B: Heartbeat(ALIVE)}, now=0.0) == NOBODY
    assert (liveness.life(A), liveness.life(B), liveness.life(C)) == ("1", "", "")

    both = {A: second, B: Heartbeat(ALIVE, life="3")}
    assert liveness.observe(both, now=1.0) == Departures(frozenset(), frozenset({A}))
    assert liveness.live == {A, B}
    assert liveness.life(A) == "2"
    assert liveness.observe(both, now=2.0) == NOBODY


def test_wiped_board_loses_no_worker() -> None:
    # beats   a b     -       a       a b
    # at      0.0     1.0     1.3     1.6
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B), now=0.0)

    assert liveness.observe({}, now=1.0) == NOBODY
    assert liveness.observe(alive(A), now=1.3) == NOBODY
    assert liveness.observe(alive(A, B), now=1.6) == NOBODY
    assert liveness.live == {A, B}


def test_workers_that_do_not_return_after_a_wipe_are_lost() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B), now=0.0)
    liveness.observe({}, now=1.0)

    assert liveness.observe(alive(A), now=1.0 + GRACE_S).lost == {B}


def test_all_workers_are_lost_if_none_returns_within_the_grace_period() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B), now=0.0)
    liveness.observe({}, now=1.0)

    assert liveness.observe({}, now=1.0 + GRACE_S).lost == {A, B}
    assert liveness.live == frozenset()


statuses = st.dictionaries(
    st.sampled_from([A, B, C]), st.sampled_from([Heartbeat(ALIVE), Heartbeat(LEAVING)])
)


@given(st.lists(st.tuples(statuses, st.floats(0.01, 1.0)), max_size=30))
def test_worker_with_heartbeat_is_never_lost(
    looks: list[tuple[dict[WorkerId, Heartbeat], float]],
) -> None:
    liveness, now, known = Liveness(GRACE_S), 0.0, set[WorkerId]()
    for seen, wait_s in looks:
        now += wait_s
        departures = liveness.observe(seen, now)
        gone = departures.lost | departures.left
        assert gone <= known - seen.keys()
        known = (known | seen.keys()) - gone
        assert liveness.live <= known
        assert {worker for worker, beat in seen.items() if beat.status != LEAVING} <= liveness.live


def test_suspected_member_is_trusted_after_it_answers_or_time_has_passed() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B, C), now=0.0)
    liveness.suspect([A], 0.0)
    liveness.suspect([B], 0.5)
    assert liveness.trusted(1.0) == {C}
    assert liveness.trusted(GRACE_S) == {A, C}
    liveness.clear(B)
    assert liveness.trusted(GRACE_S) == {A, B, C}


def test_all_members_are_trusted_if_all_are_suspected() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B), now=0.0)
    liveness.suspect([A], 0.0)
    liveness.suspect([B], 0.0)
    assert liveness.trusted(0.1) == {A, B}


def test_worker_that_returns_after_its_loss_is_trusted() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B), now=0.0)
    liveness.suspect([A], 0.0)
    liveness.observe(alive(B), now=0.1)
    liveness.observe(alive(A, B), now=0.2)
    assert liveness.trusted(0.3) == {A, B}


def test_leaving_message_removes_worker_until_its_next_heartbeat() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B), now=0.0)
    liveness.leave(A)
    liveness.leave(C)  # unknown worker
    assert liveness.live == {B}
    # A's leaving message was that of an earlier process of this name.
    liveness.observe(alive(A, B), now=1.0)
    assert liveness.live == {A, B}


def test_partial_heartbeats_after_a_wipe_lose_no_worker() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, B), now=0.0)
    liveness.wiped(1.0)
    assert liveness.observe(alive(A), now=1.1) == NOBODY
    assert liveness.observe(alive(A), now=1.0 + GRACE_S).lost == {B}


OWN, OTHER = "a" * 16, "b" * 16


def test_worker_of_another_model_is_left_out_and_its_departure_is_noticed() -> None:
    liveness = Liveness(GRACE_S, OWN)
    beats = alive(A, digest=OWN) | alive(B, digest=OTHER) | alive(C)
    assert liveness.observe(beats, now=0.0) == NOBODY
    assert liveness.live == liveness.there == {A}
    assert liveness.left_out.keys() == {B, C}
    assert f"(layout {OTHER}, expected {OWN})" in liveness.left_out[B]
    assert "(layout unknown," in liveness.left_out[C]
    assert liveness.observe(alive(A, digest=OWN), now=1.0).lost == {B, C}
    assert liveness.left_out == {}


def test_worker_restarted_with_another_model_gets_no_work() -> None:
    liveness = Liveness(GRACE_S, OWN)
    liveness.observe(alive(A, B, digest=OWN), now=0.0)
    liveness.observe(alive(A, digest=OWN) | alive(B, digest=OTHER), now=1.0)
    assert liveness.live == {A}
    liveness.observe(alive(A, B, digest=OWN), now=2.0)
    assert liveness.live == {A, B}
    assert liveness.left_out == {}


def test_most_common_model_of_members_is_chosen_once() -> None:
    # beats    A: other, B and C: own    A: other    A: other, B and C: own
    # chosen   own                       other       other
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, digest=OTHER) | alive(B, C, digest=OWN), now=0.0)
    liveness.choose()
    assert liveness.live == {B, C}
    liveness.observe(alive(A, digest=OTHER), now=1.0)
    assert liveness.live == frozenset()
    liveness.choose()
    assert liveness.live == {A}
    liveness.observe(alive(A, digest=OTHER) | alive(B, C, digest=OWN), now=2.0)
    liveness.choose()
    assert liveness.live == {A}


def test_model_of_first_expected_holder_is_chosen() -> None:
    liveness = Liveness(GRACE_S)
    liveness.observe(alive(A, digest=OWN) | alive(B, digest=OTHER), now=0.0)
    assert liveness.live == {A, B}
    liveness.expect(C)  # no heartbeat yet
    liveness.expect(A)
    assert liveness.live == {A}
    # The model is already chosen, so a later holder changes nothing.
    liveness.expect(B)
    assert liveness.live == {A}
