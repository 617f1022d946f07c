"""A spare's worker takes its slot's name once it is assigned, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import FutureFormatError
from common.jobs.spec import job_from_json
from common.jobs.store import JobRecord
from common.kafka.memory import MemoryLog
from common.kafka.names import plans_topic
from common.kafka.port import NewTopic
from common.spot.plans import encode_plan
from common.spot.provisioning.fleet_ledger import FleetLedger, Instance
from common.spot.provisioning.records import (
    Ended,
    LaunchRequested,
    Left,
    ProvisionerLead,
    Settled,
    SlotAssigned,
    Started,
)
from services.worker.member_name import SLOT_RECORD, SlotLedger, await_member_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.spot.provisioning.records import PlanRecord

ORDERED: list[PlanRecord] = [
    ProvisionerLead(-1, "p1", 1.0),
    LaunchRequested(0, 1, 1.0, 0, "spot", "digits-w0"),
    LaunchRequested(0, 2, 1.0, None, "spot", "digits-m2"),
    LaunchRequested(0, 3, 1.0, None, "spot", "digits-m3"),
    Started(0, 2, 2.0, "m-2"),
    Started(0, 3, 2.0, "m-3"),
]


def assigned(slot: int, launch: int) -> SlotAssigned:
    return SlotAssigned(0, 3.0, slot, launch, f"digits-w{slot}")


def record(on_preemption: str = "hold") -> JobRecord:
    asked = {
        "name": "digits",
        "streams": ["a"],
        "records": {"codec": "tensor", "fields": {"id": {"dtype": "int64"}}},
        "task": {"entrypoint": "common.testing.counting:CountingTask", "records": 10},
        "batch_size": 2,
        "group_size": 1,
        "optimizer": {"name": "sgd", "learning_rate": 1.0},
        "on_preemption": on_preemption,
        "provisioning": {"workers": 2},
    }
    return JobRecord(job_from_json(msgspec.json.encode(asked)), "running", {}, "", 0.0)


class Topic:
    """A plans topic with records that arrive while a worker waits."""

    def __init__(self, records: list[PlanRecord]) -> None:
        self.log = MemoryLog()
        self.log.create_topics([NewTopic(plans_topic("digits"), 1)])
        self._writer = self.log.writer()
        self.write(*records)

    def write(self, *records: PlanRecord | bytes) -> None:
        """Append records."""
        for record in records:
            data = record if isinstance(record, bytes) else encode_plan(record)
            self._writer.append(plans_topic("digits"), data)

    def wait(self, name: str, *steps: Callable[[], None]) -> str | None:
        """Let a worker wait, with one step per poll; after the last step, it must leave."""
        left = [lambda: None, *steps]

        def stays() -> bool:
            if left:
                left.pop(0)()
                return True
            return False

        return await_member_name(record(), name, self.log, stays)


def test_spare_waits_for_a_slot_and_takes_its_name() -> None:
    topic = Topic(ORDERED)
    steps = lambda: topic.write(assigned(0, 3)), lambda: topic.write(assigned(1, 3))
    # Slot 0 has a machine of its own.
    assert topic.wait("digits-m3", *steps[:1]) is None
    assert topic.wait("digits-m3", *steps) == "digits-w1"
    assert topic.wait("digits-m2") is None


def test_worker_that_is_no_waiting_spare_keeps_its_own_name() -> None:
    topic = Topic(ORDERED)
    for name in ("digits-w0", "digits-m9", "by-hand"):
        assert topic.wait(name) == name
    assert (
        await_member_name(record("reassign"), "digits-m3", topic.log, lambda: False) == "digits-m3"
    )
    assert await_member_name(record(), "digits-m3", MemoryLog(), lambda: False) == "digits-m3"


def test_lost_machine_loses_its_slot() -> None:
    lost = Ended(0, 2, 4.0, "lost")
    topic = Topic([*ORDERED, assigned(1, 2), lost, assigned(1, 3)])
    assert topic.wait("digits-m2") is None
    assert topic.wait("digits-m3") == "digits-w1"
    topic.write(Left(0, 5.0, 3))
    assert topic.wait("digits-m3") is None


def test_unparsable_plan_records_are_ignored_and_later_formats_raise() -> None:
    topic = Topic(ORDERED)
    topic.write(b"what?", assigned(1, 3))
    assert topic.wait("digits-m3") == "digits-w1"
    topic.write(b'{"type":"slot-assigned","format":99}')
    with pytest.raises(FutureFormatError):
        topic.wait("digits-m2")


_RECORDS: st.SearchStrategy[PlanRecord] = st.one_of(
    st.builds(ProvisionerLead, st.integers(-1, 12), st.just("p1"), st.just(1.0)),
    st.builds(
        lambda term, launch, slot, worker: LaunchRequested(term, launch, 1.0, slot, "spot", worker),
        st.integers(0, 3),
        st.integers(1, 3),
        st.none() | st.integers(0, 1),
        st.sampled_from(["m1", "m2"]),
    ),
    st.builds(Started, st.integers(0, 3), st.integers(1, 3), st.just(2.0), st.just("i-1")),
    st.builds(
        lambda term, slot, launch: SlotAssigned(term, 3.0, slot, launch, f"w{slot}"),
        st.integers(0, 3),
        st.integers(0, 1),
        st.integers(1, 3),
    ),
    st.builds(Left, st.integers(0, 3), st.just(4.0), st.integers(1, 3)),
    st.builds(Ended, st.integers(0, 3), st.integers(1, 3), st.just(4.0), st.just("lost")),
    st.builds(
        lambda term: Settled(term, 5.0, "over", 1.0, 1.0, None),
        st.integers(0, 3),
    ),
)


@given(st.lists(_RECORDS, max_size=25))
def test_worker_finds_the_slot_that_the_fleet_ledger_assigns(later: list[PlanRecord]) -> None:
    records = [*ORDERED[:1], LaunchRequested(0, 1, 1.0, None, "spot", "m1"), *later]
    fleet, slots = FleetLedger(), {name: SlotLedger(name) for name in ("m1", "m2")}
    newest = dict[str, Instance]()
    for offset, each in enumerate(records):
        if fleet.feed(offset, each) and isinstance(each, LaunchRequested):
            newest[each.worker] = fleet.machines[each.launch]
        for name, ledger in slots.items():
            ledger.feed(offset, SLOT_RECORD.decode(encode_plan(each)))
            expected, own = newest.get(name), ledger.own
            assert (own is None) == (expected is None)
            if own and expected:
                assert own.has_slot == expected.has_slot
                assert own.worker == expected.member
