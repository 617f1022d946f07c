"""The `StreamReader` port in groups: each record has one reader, even if members come and go."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.core.spans import Assigned, Revoked
from common.errors import OutsideError
from common.kafka.port import Fetched, NewTopic
from tests.contract.log_fixtures import PATIENCE_S, eventually, on_kafka

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.core.spans import Partition
    from common.kafka.port import StreamLog, Writer
    from tests.contract.log_fixtures import Rig

pytest_plugins = ["tests.servers", "tests.contract.log_fixtures"]

_PARTITIONS = 6


class Member:
    """Reads its partitions from the group's `frontier`, and checks every rule."""

    def __init__(
        self,
        log: StreamLog,
        topic: str,
        name: str,
        frontier: dict[Partition, int],
        *,
        hold: bool = False,
    ) -> None:
        self.reader = log.stream(f"{topic}-group", [topic], name, hold=hold)
        self.owned: set[Partition] = set()
        self._frontier = frontier

    def step(self) -> None:
        """Poll once and process the events as a worker does."""
        for event in self.reader.poll(50, 0.02):
            if isinstance(event, Assigned):
                assert not self.owned & set(event.partitions), "assigned twice"
                self.owned.update(event.partitions)
                self.reader.place({each: self._frontier[each] for each in event.partitions})
            elif isinstance(event, Revoked):
                assert self.owned >= set(event.partitions), "took what was not owned"
                self.owned.difference_update(event.partitions)
            else:
                assert isinstance(event, Fetched)
                assert event.partition in self.owned, "a record after its partition was revoked"
                # Another member may have read these records before this one noticed the revocation.
                assert event.offsets[0] <= self._frontier[event.partition], "a record was left out"
                assert event.offsets == list(range(event.offsets[0], event.offsets[-1] + 1))
                reached = max(self._frontier[event.partition], event.offsets[-1] + 1)
                self._frontier[event.partition] = reached


class Company:
    """A topic, and the members of its group, stepped in turn."""

    def __init__(self, log: StreamLog, topic: str) -> None:
        log.create_topics([NewTopic(topic, _PARTITIONS)])
        self._log = log
        self._topic = topic
        self._frontier = dict.fromkeys(log.partitions(topic), 0)
        self._appended = 0

    def join(self, name: str, *, hold: bool = False) -> Member:
        """Let a member join."""
        return Member(self._log, self._topic, name, self._frontier, hold=hold)

    def append(self, writer: Writer, each: int) -> None:
        """Append this many records to every partition."""
        for partition in self._frontier:
            for _ in range(each):
                writer.append(self._topic, b"", partition=partition.index)
        self._appended += each
        assert writer.flush(PATIENCE_S)

    def everything_is_read(self) -> bool:
        """Return True if every record was read by a member."""
        return set(self._frontier.values()) == {self._appended}

    def shares(self, *members: Member) -> list[int]:
        """Return each member's number of partitions, or [] unless each partition has one owner."""
        owned = [partition for member in members for partition in member.owned]
        complete = len(owned) == len(set(owned)) == _PARTITIONS
        return sorted(len(member.owned) for member in members) if complete else []


def step_until(condition: Callable[[], object], members: Iterable[Member]) -> None:
    def stepped() -> bool:
        for member in members:
            member.step()
        return bool(condition())

    eventually(stepped, 30.0)


def test_members_share_all_partitions_and_read_every_record(group_rig: Rig, fresh: str) -> None:
    company = Company(group_rig.log, fresh)
    one = company.join("one")
    company.append(group_rig.writer, 20)
    step_until(company.everything_is_read, [one])
    assert company.shares(one) == [6]

    two = company.join("two")
    company.append(group_rig.writer, 20)
    step_until(lambda: company.shares(one, two) == [3, 3], [one, two])

    three = company.join("three")
    company.append(group_rig.writer, 20)
    step_until(lambda: company.shares(one, two, three) == [2, 2, 2], [one, two, three])
    step_until(company.everything_is_read, [one, two, three])

    two.reader.close()
    company.append(group_rig.writer, 20)
    step_until(lambda: company.shares(one, three) == [3, 3], [one, three])
    step_until(company.everything_is_read, [one, three])
    one.reader.close()
    three.reader.close()


def test_member_that_dies_silently_is_replaced(group_rig: Rig, fresh: str) -> None:
    company = Company(group_rig.log, fresh)
    survivor = company.join("survivor")
    with closing(survivor.reader):
        step_until(lambda: company.shares(survivor) == [6], [survivor])
        group_rig.kill_member(f"{fresh}-group", fresh, survivor.step)
        company.append(group_rig.writer, 20)
        step_until(lambda: company.shares(survivor) == [6], [survivor])
        step_until(company.everything_is_read, [survivor])


def test_paused_member_keeps_its_membership_across_a_rebalance(group_rig: Rig, fresh: str) -> None:
    company = Company(group_rig.log, fresh)
    one = company.join("one")
    with closing(one.reader):
        step_until(lambda: company.shares(one) == [6], [one])
        one.reader.pause()
        company.append(group_rig.writer, 20)
        two = company.join("two")
        with closing(two.reader):
            step_until(lambda: company.shares(one, two) == [3, 3], [one, two])
        # `two` is gone, and its partitions return to `one` paused.
        step_until(lambda: company.shares(one) == [6], [one])
        assert [one.reader.poll(100, 0.02) for _ in range(5)] == [()] * 5
        one.reader.resume()
        step_until(company.everything_is_read, [one])


def test_poll_for_zero_records_still_serves_rebalances(rig: Rig, fresh: str) -> None:
    company = Company(rig.log, fresh)
    idle = company.join("idle")
    with closing(idle.reader):
        owned: set[Partition] = set()

        def complete() -> bool:
            for event in idle.reader.poll(0, 0.05):
                assert isinstance(event, Assigned)
                owned.update(event.partitions)
            return len(owned) == _PARTITIONS

        eventually(complete)


@on_kafka
def test_partitions_of_static_member_wait_for_its_return(rig: Rig, fresh: str) -> None:
    company = Company(rig.log, fresh)
    stays, leaves = company.join("stays", hold=True), company.join("leaves", hold=True)
    with closing(stays.reader):
        step_until(lambda: company.shares(stays, leaves) == [3, 3], [stays, leaves])
        held, kept = set(leaves.owned), set(stays.owned)
        leaves.reader.close()
        company.append(rig.writer, 10)
        for _ in range(50):
            stays.step()
        assert stays.owned == kept
        returned = company.join("leaves", hold=True)
        with closing(returned.reader):
            step_until(company.everything_is_read, [stays, returned])
            assert (stays.owned, returned.owned) == (kept, held)


@on_kafka
def test_static_member_is_fenced_by_another_of_its_name(rig: Rig, fresh: str) -> None:
    company = Company(rig.log, fresh)
    first = company.join("same", hold=True)
    with closing(first.reader):
        step_until(lambda: company.shares(first) == [6], [first])
        second = company.join("same", hold=True)
        with closing(second.reader), pytest.raises(OutsideError):
            step_until(lambda: False, [first, second])


def test_group_can_be_deleted_once_it_has_no_members(owned_rig: Rig, fresh: str) -> None:
    owned_rig.log.create_topics([NewTopic(fresh, _PARTITIONS)])
    member = Member(owned_rig.log, fresh, "w1", dict.fromkeys(owned_rig.log.partitions(fresh), 0))
    groups = [f"{fresh}-group", f"{fresh}-absent"]

    def has_joined() -> bool:
        member.step()
        return len(member.owned) == _PARTITIONS

    eventually(has_joined)
    with pytest.raises(OutsideError, match=f"deleting consumer group {fresh}-group"):
        owned_rig.log.delete_groups(groups)
    member.reader.close()
    owned_rig.log.delete_groups(groups)
    owned_rig.log.delete_groups(groups)
