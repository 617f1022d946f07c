"""Updates continue despite forged values in a group's Redis and a second process of the same name.

The table in docs/howto/security.md lists the effect of each forgery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import redis
from msgspec import UNSET

from common.core.liveness import Heartbeat
from common.core.messages import (
    AttemptId,
    Broken,
    GradientReady,
    ModelId,
    Reduced,
    StateReport,
    Stored,
    TriggerId,
    UpdateTrigger,
    WorkerId,
)
from common.storage.snapshot_file import SnapshotFile, from_bytes, to_bytes
from common.wire import messages as wire
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.config.settings import Settings
    from common.core.messages import GroupReply, Member
    from tests.integration.cluster import Cluster
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

GROUP = """
            aggregation: {mode: group}
            checkpoint: {every_s: 0.5}
"""
FORGER = WorkerId("forger")
GOES_ON_S = 30.0  # 10 s on an idle machine
UPDATES = 5
RECORDS_OF_A_CASE = 2 * UPDATES * 32


@pytest.fixture
def settings(embedded: Settings) -> Settings:
    return embedded


@pytest.fixture
def admin(settings: Settings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.redis) as client:
        yield client


def assert_updates_continue(cluster: Cluster, what: str) -> None:
    version = cluster.version()
    cluster.produce(RECORDS_OF_A_CASE)
    await_condition(
        lambda: cluster.version() >= version + UPDATES, f"updates after {what}", GOES_ON_S
    )
    assert cluster.ended() == []


def assert_each_record_counts_once(cluster: Cluster, records: int) -> None:
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), records, 0)


def newest(cluster: Cluster) -> UpdateTrigger:
    """Return the last posted trigger."""
    status = cluster.leader_status()
    assert status is not None
    found = cluster.board.triggers(TriggerId(-1, 0), 0.0, status.triggers)
    return found[-1]


def member(trigger: UpdateTrigger, worker: str) -> Member:
    assert trigger.group is not UNSET
    return next(each for each in trigger.group.membership.members if each.worker == worker)


def state(trigger: UpdateTrigger, **changes: Any) -> StateReport:  # noqa: ANN401 -- fields of all kinds
    """Return an unknown worker's report, with the counting model's number of weights."""
    report = StateReport(FORGER, trigger.model, 99, trigger.id, None, address="127.0.0.1:1")
    return msgspec.structs.replace(report, **changes)


def made(trigger: UpdateTrigger) -> ModelId:
    assert trigger.group is not UNSET
    return trigger.group.made


def attempt(trigger: UpdateTrigger) -> AttemptId:
    """Return the next attempt, or the one in progress."""
    assert trigger.group is not UNSET
    return AttemptId(
        trigger.id.epoch, trigger.group.membership.number, trigger.group.made.version + 1
    )


REPORTS: dict[str, tuple[Callable[[UpdateTrigger], GroupReply], str]] = {
    "2^62 numbers": (
        lambda t: state(t, numbers=2**62),
        "numbers: the reported model has more than",
    ),
    "more numbers than the others have": (
        lambda t: state(t, numbers=2**39),
        "but those of most workers have",
    ),
    "a negative number": (lambda t: state(t, numbers=-1), ""),
    "a start time that is not a number": (lambda t: state(t, began_s=float("nan")), ""),
    "an unknown version": (
        lambda t: state(t, made=ModelId(t.id.epoch, 10**6)),
        "made: the report names version 1000000",
    ),
    "an unknown trigger": (
        lambda t: state(t, last_trigger=TriggerId(t.id.epoch, 2**62)),
        "heard: the report names a trigger",
    ),
    "another leader's trigger": (
        lambda t: state(t, last_trigger=TriggerId(t.id.epoch + 1, 1)),
        "heard: the report names a trigger",
    ),
    "the newest version at an unknown member": (lambda t: state(t, made=made(t)), ""),
    "an unknown slice": (
        lambda t: state(t, slices=(99,)),
        "slices: the report names slice 99",
    ),
    "another process under a member's name": (
        lambda t: state(t, worker=WorkerId("w1"), made=made(t)),
        "two processes run as worker w1",
    ),
    "an old report of a member": (
        lambda t: state(
            t,
            worker=WorkerId("w1"),
            life=member(t, "w1").life,
            last_trigger=TriggerId(t.id.epoch, 1),
        ),
        "",
    ),
    "a result that others do not have": (
        lambda t: Reduced(WorkerId("w1"), t.model, member(t, "w1").life, attempt(t), digest=1),
        "",
    ),
    "a sum that is not finite": (
        lambda t: Broken(WorkerId("w1"), t.model, member(t, "w1").life, attempt(t), "not_finite"),
        "",
    ),
    "a gradient of 30 years": (
        lambda t: GradientReady(WorkerId("w1"), t.model, (0,), 8, 1e308, {}, 1e9, life=99),
        "",
    ),
    "a version in storage": (lambda t: Stored(WorkerId("w1"), t.model, 99, made(t)), ""),
}


@pytest.mark.timeout(900)
def test_group_ignores_forged_reports_and_logs_the_reason(make: Make, admin: redis.Redis) -> None:
    records, beats = RECORDS_OF_A_CASE * (len(REPORTS) + 1), dict[WorkerId, Heartbeat]()
    cluster = make("forged-group", records, GROUP, seconds=0.01)
    for name in ("c1", "w1", "w2"):
        cluster.start("coordinator" if name == "c1" else "worker", name)
    assert_updates_continue(cluster, "the start")
    for case, (forge, reason) in REPORTS.items():

        def is_reported(
            forge: Callable[[UpdateTrigger], GroupReply] = forge, reason: str = reason
        ) -> bool:
            """Forge again: a report counts only if it answers the newest request."""
            trigger = newest(cluster)
            raw = msgspec.Raw(msgspec.msgpack.encode(forge(trigger)))  # unchecked
            said = wire.frame(msgspec.msgpack.encode((cluster.job, raw)), b"")
            admin.rpush(f"doll:{{{trigger.reply_to}}}:replies", said)
            return reason in cluster.said("c1")

        # The heartbeat may have expired on a busy machine.
        await_condition(lambda: beats.update(cluster.board.heartbeats()) or "w1" in beats, "a beat")
        digest = beats[WorkerId("w1")].digest
        cluster.board.beat(FORGER, "alive", 600.0, digest)
        await_condition(is_reported, f"{case}: the log says why")
        assert_updates_continue(cluster, case)
    assert_each_record_counts_once(cluster, records)
    assert cluster.audit().taken_back == 0


@pytest.mark.parametrize("mode", ["group", "board"])
def test_job_ignores_forged_hot_snapshot_ahead_of_kafka(
    make: Make, admin: redis.Redis, mode: str
) -> None:
    # c1   █████ killed
    #            forged snapshots: one of c1's epoch, and one of a later epoch
    # c2               ███████
    options = GROUP if mode == "group" else "\n            checkpoint: {every_updates: 1}\n"
    records = 3 * RECORDS_OF_A_CASE
    cluster = make(f"forged-hot-{mode}", records, options, seconds=0.01)
    for name in ("c1", "w1", "w2"):
        cluster.start("coordinator" if name == "c1" else "worker", name)
    assert_updates_continue(cluster, "the start")
    await_condition(cluster.drained, "everything is settled")
    cluster.kill("c1")
    own = from_bytes(cluster.board.snapshots()[0])
    far = own.snapshot.control_position + 10**6
    for epoch in (own.snapshot.by, own.snapshot.by + 2**40):
        ahead = msgspec.structs.replace(
            own.snapshot, by=epoch, control_position=far, updates_position=far
        )
        saved = to_bytes(SnapshotFile(ahead, own.trainer), "another secret")
        admin.set(f"doll:{{{cluster.job}}}:snapshot:{epoch}", saved)
        admin.sadd(f"doll:{{{cluster.job}}}:snapshots", epoch)
    cluster.start("coordinator", "c2")

    assert_updates_continue(cluster, "a forged hot snapshot")
    assert cluster.wanted() == "running"
    await_condition(lambda: "hot_snapshot_forged" in cluster.said("c2"), "the log gives the reason")
    cluster.produce(RECORDS_OF_A_CASE)
    assert_each_record_counts_once(cluster, records)


def test_only_one_of_two_processes_of_one_name_becomes_member(
    make: Make,
) -> None:
    # w1          ███████████████████ killed
    # w1-double         ░░░░░░░░░░░░░░░░░░░████████
    records = 5 * RECORDS_OF_A_CASE
    cluster = make("double", records, GROUP, seconds=0.01)
    for name in ("c1", "w1", "w2"):
        cluster.start("coordinator" if name == "c1" else "worker", name)
    assert_updates_continue(cluster, "the start")
    double = cluster.start_double("w1")

    def status_says() -> str:
        status = cluster.leader_status()
        assert status is not None
        assert status.group is not UNSET
        return status.group.left_out.get(WorkerId("w1"), "")

    def members() -> set[Member]:
        trigger = newest(cluster)
        return set() if trigger.group is UNSET else {*trigger.group.membership.members}

    await_condition(
        lambda: status_says().startswith("two processes run as worker w1"), "the status reports it"
    )
    await_condition(lambda: "left_out" in cluster.said("c1"), "the leader logs it")
    await_condition(
        lambda: "another process with this worker name" in cluster.said(double),
        "the second process logs it",
    )
    first = member(newest(cluster), "w1")
    for _ in range(2):
        assert_updates_continue(cluster, "a second process of a name")
        assert first in members()

    cluster.kill("w1")
    assert_updates_continue(cluster, "the first process of a name is killed")

    def lives() -> set[int]:
        return {each.life for each in members() if each.worker == "w1"}

    await_condition(
        lambda: lives() != set() and first.life not in lives(), "the other process is a member"
    )
    assert_updates_continue(cluster, "the other process of a name is a member")
    await_condition(lambda: status_says() == "", "the status no longer reports it")
    assert_each_record_counts_once(cluster, records)
    assert cluster.audit().taken_back == 0


def test_two_processes_of_one_name_count_each_record_once_in_board_mode(
    make: Make,
) -> None:
    # Orders name a worker, so both processes compute them, and the first gradient counts.
    records = 4 * RECORDS_OF_A_CASE
    cluster = make("double-board", records, seconds=0.01)
    for name in ("c1", "w1", "w2"):
        cluster.start("coordinator" if name == "c1" else "worker", name)
    assert_updates_continue(cluster, "the start")
    double = cluster.start_double("w1")
    await_condition(lambda: "worker_joins" in cluster.said(double), "the second process joins")
    assert_updates_continue(cluster, "a second process of a name")
    cluster.kill("w1")
    assert_updates_continue(cluster, "the first process of a name is killed")
    cluster.produce(RECORDS_OF_A_CASE)
    assert_each_record_counts_once(cluster, records)
