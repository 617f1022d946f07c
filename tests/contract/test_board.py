"""The notice board's contract, on memory, on the embedded Redis and on the system's Redis."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
import redis

from common.core.liveness import Device, Heartbeat
from common.core.messages import (
    Assignment,
    Batch,
    Failed,
    Gradient,
    MetricSum,
    ModelId,
    TriggerId,
    UpdateTrigger,
    WorkerId,
)
from common.core.spans import Span
from common.errors import UnavailableError
from common.redis.access import RedisAccess
from common.redis.exchange import RedisLeaderBoard
from common.redis.memory import MemoryBoard, MemoryRedis
from common.redis.port import LiveStatus, live_status
from common.redis.server import RedisServer, connect
from common.wire import messages as wire
from tests.contract.board_fixtures import (
    LONG_S,
    REPLICA,
    WORKER,
    Server,
    eventually,
    leader_status,
    statuses,
)
from tests.fakes.clock import ManualClock

if TYPE_CHECKING:
    from common.embedded.redis import EmbeddedRedis
    from common.redis.port import LeaderBoard, LeaderBoards, Replies

pytest_plugins = ["tests.redis_servers", "tests.contract.board_fixtures"]

OTHER = WorkerId("w2")
MODEL = ModelId(3, 17)


# --- messages ------------------------------------------------------------------------------------


def batch(offset: int) -> Batch:
    return Batch(offset, WORKER, (Span("clicks", 0, 10 * offset, 10 * offset + 10),), 10)


def trigger(epoch: int, number: int) -> UpdateTrigger:
    return UpdateTrigger(TriggerId(epoch, number), MODEL, (Assignment(WORKER, (batch(7),)),))


def failure(offset: int = 7, epoch: int = 3) -> Failed:
    return Failed(WORKER, ModelId(epoch, 17), (offset,), "raised", "no such column")


def gradient(vector: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Gradient:
    return Gradient(
        WORKER, MODEL, (7, 8), 20, 3.5, {"accuracy": MetricSum(12.0, 20)}, 0.02, vector=vector
    )


# --- models --------------------------------------------------------------------------------------


def test_published_model_is_read_back_unchanged(board: LeaderBoard) -> None:
    weights = np.arange(300_000, dtype=np.float32)
    board.put_model(MODEL, weights.data)
    assert board.get_model(MODEL) == weights.tobytes()


def test_models_of_different_leaders_are_separate(board: LeaderBoard) -> None:
    board.put_model(ModelId(3, 17), b"mine")
    board.put_model(ModelId(9, 17), b"hers")
    assert board.get_model(ModelId(3, 17)) == b"mine"
    assert board.get_model(ModelId(9, 17)) == b"hers"
    assert board.get_model(ModelId(10, 17)) is None


def test_only_last_four_versions_of_a_leader_are_kept(board: LeaderBoard) -> None:
    board.put_model(ModelId(2, 1), b"another leader's")
    for version in range(10):
        board.put_model(ModelId(3, version), b"weights")
    kept = [version for version in range(10) if board.get_model(ModelId(3, version))]
    assert kept == [6, 7, 8, 9]
    assert board.get_model(ModelId(2, 1)) == b"another leader's"


def test_only_last_offered_model_is_kept(server: Server) -> None:
    board = server.board()
    assert board.offered_model() is None
    weights = np.arange(5, dtype=np.float32)
    board.offer_model(ModelId(3, 16), b"older")
    board.offer_model(MODEL, weights.data)
    for each in (board, server.board()):
        assert each.offered_model() == (MODEL, weights.tobytes())
        assert each.offered_model(ModelId(3, 16)) == (MODEL, weights.tobytes())
        assert each.offered_model(MODEL) is None
    # Workers do not need this version.
    assert board.get_model(MODEL) is None


# --- triggers ------------------------------------------------------------------------------------


def test_triggers_are_read_in_order_and_once(board: LeaderBoard) -> None:
    posted = [trigger(0, 1), trigger(0, 2), trigger(5, 1)]
    assert [board.post_trigger(each) for each in posted] == [True, True, True]
    assert board.triggers(TriggerId(-1, 0), 0) == posted
    assert board.triggers(TriggerId(0, 1), LONG_S) == posted[1:]
    assert board.triggers(TriggerId(5, 1), 0) == []


def test_two_readers_receive_the_same_trigger(server: Server) -> None:
    server.board().post_trigger(trigger(3, 1))
    assert server.board().triggers(TriggerId(0, 0), LONG_S) == [trigger(3, 1)]
    assert server.board().triggers(TriggerId(0, 0), LONG_S) == [trigger(3, 1)]


def test_trigger_of_deposed_leader_is_rejected(server: Server) -> None:
    older, newer = server.board(), server.board()
    assert older.post_trigger(trigger(3, 8))
    assert newer.post_trigger(trigger(5, 1))
    assert not older.post_trigger(trigger(3, 9))
    assert newer.triggers(TriggerId(3, 8), 0) == [trigger(5, 1)]


def test_posting_same_trigger_twice_succeeds(board: LeaderBoard) -> None:
    """The answer to the first call may be lost."""
    assert board.post_trigger(trigger(3, 1))
    assert board.post_trigger(trigger(3, 1))
    assert board.triggers(TriggerId(0, 0), 0) == [trigger(3, 1)]


def test_posting_different_trigger_under_used_id_fails(board: LeaderBoard) -> None:
    forged = UpdateTrigger(TriggerId(3, 1), MODEL, ())
    assert board.post_trigger(forged)
    assert not board.post_trigger(trigger(3, 1))


def test_reader_of_one_trigger_stream_ignores_other_streams(board: LeaderBoard) -> None:
    board.post_trigger(trigger(3, 1), "other")
    assert board.triggers(TriggerId(0, 0), 0.02) == []
    assert board.triggers(TriggerId(0, 0), LONG_S, "other") == [trigger(3, 1)]


def test_only_last_100_triggers_are_kept(board: LeaderBoard) -> None:
    for number in range(1, 131):
        board.post_trigger(trigger(3, number))
    kept = board.triggers(TriggerId(0, 0), 0)
    assert [each.id.number for each in kept] == list(range(31, 131))


def test_small_model_travels_inside_its_trigger(board: LeaderBoard) -> None:
    posted = UpdateTrigger(TriggerId(3, 1), MODEL, (), bytes(400))
    board.post_trigger(posted)
    assert board.triggers(TriggerId(0, 0), 0) == [posted]


def test_waiting_for_triggers_times_out_empty(board: LeaderBoard) -> None:
    assert board.triggers(TriggerId(0, 0), 0) == []
    assert board.triggers(TriggerId(0, 0), 0.0001) == []
    assert board.triggers(TriggerId(0, 0), 0.02) == []


def test_waiting_reader_wakes_on_next_trigger(server: Server) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.board().triggers, TriggerId(3, 1), LONG_S)
        board = server.board()
        board.post_trigger(trigger(3, 1))
        board.post_trigger(trigger(3, 2))
        assert waiting.result(LONG_S) == [trigger(3, 2)]


# --- replies -------------------------------------------------------------------------------------


def test_replies_are_popped_in_order_once_and_with_their_job(
    server: Server, board: LeaderBoard, boards: LeaderBoards, replies: Replies
) -> None:
    other = boards.board("another")
    sent = [(server.job, failure(offset)) for offset in range(4)]
    for _, reply in sent[:3]:
        board.push_reply(reply, REPLICA)
    other.push_reply(failure(7), REPLICA)
    board.push_reply(sent[3][1], REPLICA)
    assert replies.pop(3, LONG_S) == sent[:3]
    assert replies.pop(1, LONG_S) == [("another", failure(7))]
    assert replies.pop(9, 0) == sent[3:]
    assert replies.pop(9, 0) == []


def test_one_pop_returns_many_replies(board: LeaderBoard, replies: Replies) -> None:
    for offset in range(50):
        board.push_reply(failure(offset), REPLICA)
    assert len(replies.pop(100, LONG_S)) == 50


def test_gradient_arrives_as_read_only_view(board: LeaderBoard, replies: Replies) -> None:
    vector = np.arange(300_000, dtype=np.float32)
    board.push_reply(gradient(vector), REPLICA)
    [(_, received)] = replies.pop(10, LONG_S)
    assert isinstance(received, Gradient)
    assert np.array_equal(received.vector, vector)
    assert not received.vector.flags.writeable
    assert received.vector.base is not None


def test_each_replica_has_its_own_replies(board: LeaderBoard, boards: LeaderBoards) -> None:
    board.push_reply(failure(1), "c1")
    board.push_reply(failure(2), "c2")
    assert [reply for _, reply in boards.replies("c2").pop(10, LONG_S)] == [failure(2)]
    assert [reply for _, reply in boards.replies("c1").pop(10, LONG_S)] == [failure(1)]


def test_waiting_for_replies_times_out_empty(replies: Replies) -> None:
    assert replies.pop(10, 0) == []
    assert replies.pop(10, 0.0001) == []
    assert replies.pop(1, 0.02) == []


def test_waiting_replica_wakes_on_first_reply(server: Server, replies: Replies) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(replies.pop, 10, LONG_S)
        server.board().push_reply(failure(), REPLICA)
        assert waiting.result(LONG_S) == [(server.job, failure())]


def test_unread_replies_expire(embedded_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(embedded_redis.url) as client:
        RedisLeaderBoard(embedded_redis.url, "a").push_reply(failure(), "ghost")
        assert 0 < client.pttl("doll:{ghost}:replies") <= 600_000


def test_waiting_call_does_not_block_other_calls(
    server: Server, boards: LeaderBoards, replies: Replies
) -> None:
    board = boards.board(server.job)
    with ThreadPoolExecutor() as pool:
        for_trigger = pool.submit(board.triggers, TriggerId(0, 0), LONG_S)
        for_reply = pool.submit(replies.pop, 10, LONG_S)
        board.put_leader_status(leader_status(4))
        assert board.get_leader_status() == leader_status(4)
        assert not for_trigger.done()
        assert not for_reply.done()
        board.push_reply(failure(), REPLICA)
        assert for_reply.result(LONG_S) == [(server.job, failure())]
        board.post_trigger(trigger(3, 1))
        assert for_trigger.result(LONG_S) == [trigger(3, 1)]


# --- leader's status, liveness -------------------------------------------------------------------


def test_newest_leader_status_is_read(board: LeaderBoard) -> None:
    assert board.get_leader_status() is None
    board.put_leader_status(leader_status(4))
    board.put_leader_status(leader_status(5))
    assert board.get_leader_status() == leader_status(5)


def test_unchanged_leader_status_is_not_decoded_again(
    embedded_redis: EmbeddedRedis,
) -> None:
    writer, reader = (RedisLeaderBoard(embedded_redis.url, "still") for _ in range(2))
    writer.put_leader_status(leader_status(4))
    found = reader.get_leader_status()
    writer.put_leader_status(leader_status(4))
    assert reader.get_leader_status() is found
    for each in (5, 4):
        writer.put_leader_status(leader_status(each))
        assert reader.get_leader_status() == leader_status(each)


def test_put_leader_status_reports_whether_one_existed(server: Server) -> None:
    board = server.board()
    assert not board.put_leader_status(leader_status(4))
    assert board.put_leader_status(leader_status(5))
    # The existing status may be equal to the new one.
    assert board.put_leader_status(leader_status(5))
    server.kill()
    server.restart()
    assert not board.put_leader_status(leader_status(5))
    assert board.get_leader_status() == leader_status(5)


def test_unchanged_leader_status_replaces_another_leaders_status(server: Server) -> None:
    board, other = server.board(), server.board()
    for _ in range(3):
        other.put_leader_status(leader_status(5))
        assert board.put_leader_status(leader_status(4))
        assert other.get_leader_status() == leader_status(4)


def test_worker_is_alive_until_its_heartbeat_expires(board: LeaderBoard) -> None:
    board.beat(WORKER, "alive", LONG_S * 10)
    board.beat(OTHER, "alive", 0.03)
    eventually(lambda: statuses(board) == {WORKER: "alive"})
    board.beat(OTHER, "alive", LONG_S * 10)
    assert statuses(board) == {WORKER: "alive", OTHER: "alive"}


def test_heartbeat_carries_the_status_of_a_worker(board: LeaderBoard) -> None:
    board.beat(WORKER, "alive", LONG_S * 10)
    board.beat(WORKER, "waiting", LONG_S * 10)
    assert statuses(board) == {WORKER: "waiting"}
    board.beat(WORKER, "too-few", LONG_S * 10)
    assert statuses(board) == {WORKER: "too-few"}
    board.beat(WORKER, "leaving", LONG_S * 10, "0123456789abcdef")
    assert statuses(board) == {WORKER: "leaving"}
    assert board.heartbeats() == {WORKER: Heartbeat("leaving", "0123456789abcdef")}


def test_heartbeat_carries_the_device_and_the_process_of_a_worker(server: Server) -> None:
    gpu = Device("cuda", "NVIDIA A100-SXM4-40GB", 40 << 30, "580.65.06", "8.0")
    cpu = Device("cpu", "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz", 16 << 30)
    board, seen = server.board(), server.board()
    board.beat(WORKER, "alive", LONG_S * 10, "0123456789abcdef", gpu)
    board.beat(OTHER, "alive", LONG_S * 10, "", cpu, "fedcba9876543210")
    assert seen.heartbeats() == {
        WORKER: Heartbeat("alive", "0123456789abcdef", gpu),
        OTHER: Heartbeat("alive", "", cpu, "fedcba9876543210"),
    }
    status = live_status(seen)
    assert isinstance(status, LiveStatus)
    assert status.devices == {WORKER: gpu, OTHER: cpu}


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (b"", None),
        (b" cpu;x", None),
        (b" cuda;" + 65 * b"x" + b";1;;", None),
        (b" cuda;\xff\n;1;;", None),
        (b" cpu;x;12345678901234567;;", None),
        (b" cpu;x;12;;", Device("cpu", "x", 12)),
        (b" @0123456789abcdef", None),
    ],
)
def test_heartbeat_with_unknown_device_counts_without_it(
    embedded_redis: EmbeddedRedis, text: bytes, device: Device | None
) -> None:
    board = RedisLeaderBoard(embedded_redis.url, "unknown-device")
    board.beat(WORKER, "alive", LONG_S * 10)
    with redis.Redis.from_url(embedded_redis.url) as client:
        client.set("doll:{unknown-device}:alive:w1", b"alive 0123456789abcdef" + text)
    assert board.heartbeats() == {WORKER: Heartbeat("alive", "0123456789abcdef", device)}


def test_odd_name_of_a_device_is_readable(embedded_redis: EmbeddedRedis) -> None:
    board = RedisLeaderBoard(embedded_redis.url, "odd-device")
    board.beat(WORKER, "alive", LONG_S * 10, "", Device("cpu", "a;b\n\u00e9" + 70 * "x", 0))
    assert board.heartbeats()[WORKER].device == Device("cpu", "a?b??" + 59 * "x", 0)


def test_closed_board_removes_its_heartbeats(server: Server) -> None:
    one, two = server.board(), server.board()
    one.beat(WORKER, "alive", LONG_S * 10)
    two.beat(OTHER, "alive", LONG_S * 10)
    assert statuses(two) == {WORKER: "alive", OTHER: "alive"}
    one.close()
    eventually(lambda: statuses(two) == {OTHER: "alive"})


def test_worker_returning_under_its_name_is_alive_at_once(server: Server) -> None:
    one, two = server.board(), server.board()
    one.beat(WORKER, "alive", LONG_S * 10)
    one.close()
    eventually(lambda: statuses(two) == {})
    again = server.board()
    again.beat(WORKER, "alive", LONG_S * 10)
    assert statuses(two) == {WORKER: "alive"}


def test_workers_that_send_heartbeats_never_look_dead(server: Server) -> None:
    """Names of dead workers are removed while other workers of these names return."""
    names = [WorkerId(f"w{number}") for number in range(8)]
    boards = [server.board() for _ in names]
    stop = threading.Event()

    def look() -> None:
        board = server.board()
        while not stop.is_set():
            statuses(board)

    def come_and_go(board: LeaderBoard, name: WorkerId) -> None:
        for _ in range(20):
            board.beat(name, "alive", 0.001)
        board.beat(name, "alive", LONG_S * 10)

    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        list(pool.map(come_and_go, boards, names))
        stop.set()
        looking.result(LONG_S)
    assert statuses(server.board()) == dict.fromkeys(names, "alive")


def test_lease_has_one_holder_at_a_time(server: Server) -> None:
    one, two = server.board(), server.board()
    assert one.hold_lease("one", LONG_S * 10)
    assert not two.hold_lease("two", LONG_S * 10)
    assert one.hold_lease("one", LONG_S * 10)
    two.release_lease("two")
    assert not two.hold_lease("two", LONG_S * 10)
    one.release_lease("one")
    assert two.hold_lease("two", LONG_S * 10)


def test_lease_expires(server: Server) -> None:
    one, two = server.board(), server.board()
    assert one.hold_lease("one", 0.03)
    eventually(lambda: two.hold_lease("two", LONG_S * 10))
    assert not one.hold_lease("one", LONG_S)


@pytest.mark.parametrize("lasts_s", [None, 1e6])
def test_foreign_lease_without_holder_does_not_block_election(
    server: Server, lasts_s: float | None
) -> None:
    board = server.board()
    assert board.hold_lease("one", 1.0)
    server.lease_to("somebody", lasts_s)
    assert board.hold_lease("one", 1.0)


def test_is_leased_reports_current_lease(server: Server) -> None:
    holder, visitor = server.board(), server.board()
    assert not visitor.is_leased()
    holder.hold_lease("one", LONG_S * 10)
    assert visitor.is_leased()
    holder.release_lease("one")
    assert not visitor.is_leased()
    holder.hold_lease("one", 0.03)
    eventually(lambda: not visitor.is_leased())


def test_reason_of_unable_replica_is_readable_until_it_expires(server: Server) -> None:
    one, two, visitor = server.board(), server.board(), server.board()
    assert visitor.unable() == {}
    one.put_unable("c1", "task x is not in DOLL_TASKS", LONG_S * 10)
    two.put_unable("c2", "its task cannot be imported: \N{SNOWMAN}", LONG_S * 10)
    one.put_unable("c1", "task y is not in DOLL_TASKS", LONG_S * 10)
    assert visitor.unable() == {
        "c1": "task y is not in DOLL_TASKS",
        "c2": "its task cannot be imported: \N{SNOWMAN}",
    }
    one.put_unable("c1", "for a moment", 0.03)
    eventually(lambda: "c1" not in visitor.unable())
    one.put_unable("c1", "again", LONG_S * 10)
    assert visitor.unable()["c1"] == "again"


def test_lease_renewal_counts_from_now(server: Server) -> None:
    one, two = server.board(), server.board()
    assert one.hold_lease("one", LONG_S * 10)
    assert one.hold_lease("one", 0.03)
    eventually(lambda: two.hold_lease("two", LONG_S * 10))


def test_lease_race_has_one_winner(server: Server) -> None:
    names = [f"c{number}" for number in range(8)]
    boards = [server.board() for _ in names]
    start = threading.Barrier(len(names))

    def race(board: LeaderBoard, name: str) -> bool:
        start.wait(LONG_S)
        return board.hold_lease(name, LONG_S * 10)

    with ThreadPoolExecutor(len(names)) as pool:
        assert sum(pool.map(race, boards, names)) == 1


# --- snapshots -----------------------------------------------------------------------------------


def test_newest_snapshot_of_each_of_last_three_leaders_is_kept(board: LeaderBoard) -> None:
    assert board.snapshots() == []
    for epoch in (0, 3, 5, 12):
        for data in (b"old", b"new"):
            board.put_snapshot(epoch, b"%d %s" % (epoch, data), "c1")
    assert board.snapshots() == [b"12 new", b"5 new", b"3 new"]
    assert board.snapshots(most=4) == [b"12 n", b"5 ne", b"3 ne"]
    assert board.snapshots(5) == [b"5 new"]
    assert board.snapshots(0) == []


def test_snapshot_of_much_older_leader_is_not_kept(board: LeaderBoard) -> None:
    for epoch in (3, 5, 7, 12):
        board.put_snapshot(epoch, b"%d" % epoch, "c1")
    board.put_snapshot(3, b"3", "c1")
    assert board.snapshots() == [b"12", b"7", b"5"]


def test_put_snapshot_fails_once_another_holds_the_lease(board: LeaderBoard) -> None:
    # A candidate that has read the snapshots must not miss a later one of its predecessors.
    assert board.hold_lease("old", LONG_S * 10)
    assert board.put_snapshot(3, b"1", "old")
    board.release_lease("old")
    assert board.put_snapshot(3, b"2", "old")  # no successor yet
    assert board.hold_lease("new", LONG_S * 10)
    assert not board.put_snapshot(3, b"3", "old")
    assert board.snapshots() == [b"2"]
    assert board.put_snapshot(5, b"4", "new")
    assert board.snapshots() == [b"4", b"2"]


@pytest.mark.parametrize("free", [b"old", None])
def test_ask_while_skips_request_if_key_was_just_taken(
    embedded_redis: EmbeddedRedis, free: bytes | None
) -> None:
    key = "doll:{taken}:lease"
    with closing(connect(embedded_redis.url, RedisAccess())) as client:
        server = RedisServer(client, "doll:", pytest.fail)
        server.ask(("UNLINK", key, "doll:{taken}:a"))
        if free is not None:
            server.ask(("SET", key, free))

        class Free(tuple[bytes | None, ...]):
            """Allowed values. When the server's value is found here, another process changes it."""

            __slots__ = ()

            def __contains__(self, value: object) -> bool:
                if found := super().__contains__(value):
                    server.ask(("SET", key, b"new"))
                return found

        assert not server.ask_while(key, Free((free,)), ("SET", "doll:{taken}:a", b"late"))
        assert server.ask(("GET", "doll:{taken}:a")) == [None]
        assert server.ask_while(key, (b"new",), ("SET", "doll:{taken}:a", b"in time"))
        assert server.ask(("GET", "doll:{taken}:a")) == [b"in time"]


def test_complete_snapshot_of_a_member_is_found_with_weights(board: LeaderBoard) -> None:
    for epoch in (2, 3, 5):
        board.put_snapshot(epoch, b"%d" % epoch, "c1")
    for data in (b"older", b"3 with weights"):
        board.put_whole_snapshot(3, data)
    assert board.snapshots() == [b"5", b"3", b"2"]
    assert board.snapshots(whole=True) == [b"5", b"3 with weights", b"2"]
    assert board.snapshots(whole=True, most=4) == [b"5", b"3 wi", b"2"]
    assert board.snapshots(3, whole=True) == [b"3 with weights"]
    for epoch in (7, 12):
        board.put_snapshot(epoch, b"%d" % epoch, "c1")
    board.put_snapshot(3, b"3", "c1")
    # The leader of epoch 3 is long gone.
    assert board.snapshots(3, whole=True) == []


# --- lost data -----------------------------------------------------------------------------------


def write_everything(board: LeaderBoard) -> None:
    board.put_model(MODEL, b"weights.")
    board.offer_model(MODEL, b"offered.")
    board.post_trigger(trigger(3, 1))
    board.put_unable("c2", "task x is not in DOLL_TASKS", LONG_S)
    board.put_leader_status(leader_status(4))
    board.beat(WORKER, "alive", LONG_S * 10)
    board.hold_lease("one", LONG_S * 10)
    board.put_snapshot(3, b"snapshot", "one")


def read_everything(board: LeaderBoard) -> tuple[object, ...]:
    return (
        board.get_model(MODEL),
        board.offered_model(),
        board.triggers(TriggerId(0, 0), 0),
        board.unable(),
        board.get_leader_status(),
        statuses(board),
        board.snapshots(),
    )


NOTHING: tuple[object, ...] = (None, None, [], {}, None, {}, [])
EVERYTHING = (
    b"weights.",
    (MODEL, b"offered."),
    [trigger(3, 1)],
    {"c2": "task x is not in DOLL_TASKS"},
    leader_status(4),
    {WORKER: "alive"},
    [b"snapshot"],
)


def test_wiped_board_is_empty_and_usable(board: LeaderBoard) -> None:
    write_everything(board)
    board.wipe()
    assert read_everything(board) == NOTHING
    assert board.hold_lease("two", LONG_S)
    board.wipe()
    write_everything(board)
    assert read_everything(board) == EVERYTHING


def test_wipe_leaves_other_jobs_unchanged(embedded_redis: EmbeddedRedis) -> None:
    others = [RedisLeaderBoard(embedded_redis.url, job) for job in ("a", "abc", "a*c", "[abc]")]
    for other in others:
        write_everything(other)
    RedisLeaderBoard(embedded_redis.url, "a*").wipe()
    RedisLeaderBoard(embedded_redis.url, "a*c").wipe()
    found = [read_everything(other) for other in others]
    assert found == [EVERYTHING, EVERYTHING, NOTHING, EVERYTHING]


def test_trigger_ids_continue_after_wipe(board: LeaderBoard) -> None:
    board.post_trigger(trigger(3, 8))
    board.wipe()
    assert board.post_trigger(trigger(3, 9))
    assert board.triggers(TriggerId(3, 8), LONG_S) == [trigger(3, 9)]


def test_waiting_reader_receives_trigger_posted_after_wipe(server: Server) -> None:
    board = server.board()
    board.post_trigger(trigger(3, 1))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.board().triggers, TriggerId(3, 1), LONG_S)
        board.wipe()
        board.post_trigger(trigger(3, 2))
        assert waiting.result(LONG_S) == [trigger(3, 2)]


def test_killed_server_is_unavailable_until_restarted(server: Server) -> None:
    board = server.board()
    write_everything(board)
    server.kill()
    for call in (write_everything, read_everything):
        with pytest.raises(UnavailableError):
            call(board)
    server.restart()
    assert read_everything(board) == NOTHING
    write_everything(board)
    assert read_everything(board) == EVERYTHING


def test_waiting_reader_gets_error_when_server_is_killed(server: Server) -> None:
    with ThreadPoolExecutor() as pool:
        board = server.board()
        board.put_leader_status(leader_status(4))
        for_trigger = pool.submit(board.triggers, TriggerId(0, 0), LONG_S)
        replies = server.boards().replies(REPLICA)
        for_reply = pool.submit(replies.pop, 10, LONG_S)
        server.kill()
        assert isinstance(for_trigger.exception(LONG_S), UnavailableError)
        assert isinstance(for_reply.exception(LONG_S), UnavailableError)
    server.restart()


# --- garbage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe garbage", b"{}"])
def test_garbage_is_skipped_and_logged(
    server: Server, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    board = server.board()
    write_everything(board)
    server.litter(garbage)
    assert read_everything(board) == (
        b"weights.",
        None,
        [trigger(3, 1)],
        {"c2": "task x is not in DOLL_TASKS"},
        None,
        {},
        [b"snapshot"],
    )
    assert caplog.text.count("rejected kind=") >= 3


def test_garbage_alone_does_not_end_a_wait(
    server: Server, replies: Replies, caplog: pytest.LogCaptureFixture
) -> None:
    board = server.board()
    board.put_leader_status(leader_status(4))
    server.litter(b"garbage")
    with ThreadPoolExecutor() as pool:
        for_reply = pool.submit(replies.pop, 10, LONG_S)
        for_trigger = pool.submit(board.triggers, TriggerId(0, 0), LONG_S)
        eventually(lambda: "kind=trigger" in caplog.text and "kind=reply" in caplog.text)
        board.push_reply(failure(), REPLICA)
        assert for_reply.result(LONG_S) == [(server.job, failure())]
        board.post_trigger(UpdateTrigger(TriggerId(2**61, 1), MODEL, ()))
        assert [each.id.epoch for each in for_trigger.result(LONG_S)] == [2**61]


def test_garbage_with_high_id_blocks_only_its_own_stream(server: Server) -> None:
    board = server.board()
    board.put_leader_status(leader_status(4))
    server.litter(b"garbage")
    assert not board.post_trigger(trigger(3, 1))
    assert board.post_trigger(trigger(3, 1), "other")
    assert board.triggers(TriggerId(0, 0), 0) == []
    assert board.triggers(TriggerId(0, 0), 0, "other") == [trigger(3, 1)]


def test_only_first_garbage_of_a_kind_is_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    board = server.board()
    board.put_leader_status(leader_status(4))
    server.litter(b"garbage")
    for _ in range(5):
        board.get_leader_status()
    assert len(caplog.records) == 1
    assert "kind=leader status" in caplog.text


def test_trigger_under_false_id_is_skipped(
    embedded_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    board = RedisLeaderBoard(embedded_redis.url, "forged")
    with redis.Redis.from_url(embedded_redis.url) as client:
        forged = wire.encode_trigger(trigger(3, 1))
        client.xadd("doll:{forged}:triggers", {"trigger": forged}, "9-1")
    assert board.triggers(TriggerId(0, 0), 0) == []
    assert "kind=trigger id" in caplog.text


@pytest.mark.parametrize("number", [2**64 - 1, 2**62])
def test_highest_possible_id_does_not_block_other_streams(
    likest_redis: EmbeddedRedis, number: int
) -> None:
    board = RedisLeaderBoard(likest_redis.url, f"highest-{number}")
    with redis.Redis.from_url(likest_redis.url) as client:
        client.xadd(f"doll:{{highest-{number}}}:triggers", {"x": b""}, f"{number}-{number}")
    assert not board.post_trigger(trigger(3, 1))
    assert board.post_trigger(trigger(3, 1), "other")
    assert board.triggers(TriggerId(-1, 0), 0, "other") == [trigger(3, 1)]


def test_unused_trigger_streams_expire(embedded_redis: EmbeddedRedis) -> None:
    RedisLeaderBoard(embedded_redis.url, "vanishing").post_trigger(trigger(3, 1), "other")
    with redis.Redis.from_url(embedded_redis.url) as client:
        assert client.pttl("doll:{vanishing}:triggers:other") > 0


def test_worker_of_killed_process_disappears_at_once(embedded_redis: EmbeddedRedis) -> None:
    made = f"RedisLeaderBoard({embedded_redis.url!r}, 'killed')"
    beat = f"board = {made}\nboard.beat('w1', 'alive', 600.0)\ninput()"
    code = f"from common.redis.exchange import RedisLeaderBoard\n{beat}"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)  # noqa: S603 -- our own
    board = RedisLeaderBoard(embedded_redis.url, "killed")
    eventually(lambda: statuses(board) == {WORKER: "alive"})
    process.kill()
    process.communicate()
    eventually(lambda: statuses(board) == {})


def test_worker_that_lost_its_connection_returns_with_next_heartbeat(
    embedded_redis: EmbeddedRedis,
) -> None:
    board = RedisLeaderBoard(embedded_redis.url, "cut")
    board.beat(WORKER, "alive", LONG_S * 10)
    with redis.Redis.from_url(embedded_redis.url) as client:
        client.client_kill_filter(_type="pubsub")
    assert statuses(board) == {}

    def back() -> bool:
        board.beat(WORKER, "alive", LONG_S * 10)
        return statuses(board) == {WORKER: "alive"}

    eventually(back)


def test_liveness_uses_heartbeats_alone_if_channels_are_forbidden(
    embedded_redis: EmbeddedRedis,
) -> None:
    with redis.Redis.from_url(embedded_redis.url) as client:
        client.execute_command(
            "ACL", "SETUSER", "narrow", "on", ">pass", "~*", "+@all", "resetchannels"
        )
    url = embedded_redis.url.replace("unix://", "unix://narrow:pass@")
    board = RedisLeaderBoard(url, "narrow")
    board.beat(WORKER, "alive", LONG_S * 10)
    assert statuses(board) == {WORKER: "alive"}


def test_keys_of_wrong_type_are_treated_as_garbage(
    embedded_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    board = RedisLeaderBoard(embedded_redis.url, "types")
    write_everything(board)
    with redis.Redis.from_url(embedded_redis.url) as client:
        for key in list(client.scan_iter("doll:{types}:*")):
            client.delete(key)
            client.hset(key, "field", "value")
    assert read_everything(board) == NOTHING
    assert "kind=type" in caplog.text
    write_everything(board)
    assert read_everything(board) == EVERYTHING


# --- memory only ---------------------------------------------------------------------------------


def test_memory_board_expires_heartbeats_and_leases_by_given_clock() -> None:
    clock = ManualClock()
    board = MemoryBoard(MemoryRedis(clock), "job")
    board.beat(WORKER, "alive", 2.0)
    assert board.hold_lease("one", 3.0)
    clock.advance(1.999)
    assert statuses(board) == {WORKER: "alive"}
    clock.advance(0.001)
    assert statuses(board) == {}
    assert not board.hold_lease("two", 3.0)
    clock.advance(1.0)
    assert board.hold_lease("two", 3.0)
