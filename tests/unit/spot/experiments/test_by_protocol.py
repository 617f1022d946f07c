"""Assignment of streams to workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from common.spot.experiments.by_protocol import TAKEOVER_S, HeldStreams, Reassign
from tests.unit.spot.experiments.protocols import Bench

if TYPE_CHECKING:
    from common.spot.experiments.protocol import SimulatedMachine

STREAMS = 7


def shares(machines: dict[int, SimulatedMachine]) -> list[int]:
    return sorted(len(machine.streams) for machine in machines.values())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
@settings(max_examples=25)
def test_reassignment_shares_streams_evenly_and_moves_few(flips: list[int]) -> None:
    bench = Bench(STREAMS, updates=10_000)
    group = Reassign(bench.time, bench.streams)
    machines = dict[int, "SimulatedMachine"]()
    for slot in flips:
        owners = {p: m.id for m in machines.values() for p in m.streams}
        if slot in machines:
            group.leave(slot, machines[slot])
            bench.protocol.preempt(machines.pop(slot))
        else:
            machines[slot] = bench.protocol.join(1.0)
            group.join(slot, machines[slot])
        bench.time.at(bench.time.now + TAKEOVER_S, bench.time.stop)
        bench.time.run()
        if not machines:
            continue

        owned = [p for machine in machines.values() for p in machine.streams]
        assert sorted(owned) == [stream.partition for stream in bench.streams]
        assert shares(machines)[-1] - shares(machines)[0] <= 1
        staying = {machine.id for machine in machines.values()}
        now = {p: m.id for m in machines.values() for p in m.streams}
        moved = [p for p, owner in owners.items() if owner in staying and now[p] != owner]
        assert len(moved) <= -(-STREAMS // len(machines))  # at most what a newcomer gets


def test_held_stream_belongs_to_its_slot() -> None:
    bench = Bench(2, updates=10_000)
    group = HeldStreams(bench.time, bench.streams, pause=True)
    first, second, again = (bench.protocol.join(1.0) for _ in range(3))

    group.join(0, first)
    group.join(1, second)
    group.leave(0, first)
    group.join(0, again)

    assert list(again.streams) == [bench.streams[0].partition]
    assert list(second.streams) == [bench.streams[1].partition]
