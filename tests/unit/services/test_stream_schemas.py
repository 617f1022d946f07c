"""A stream waits for the schemas of its records: none is lost, skipped or claimed meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.messages import Schema, Skipped
from common.errors import LateError, RefusedError, UnavailableError, UnreachableError
from services.worker.effects.schemas import ABSENT_S
from tests.contract.board_fixtures import statuses
from tests.unit.kafka.test_schemas import Registry, written
from tests.unit.services.replicas import until
from tests.unit.services.test_stream import LINGER_S, Bench, P, W

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD = '{"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}'
SEVEN = {7: Schema("AVRO", RECORD)}


def framed(*ids: int, schema: int = 7) -> list[bytes]:
    return [b"\0" + schema.to_bytes(4) + bytes([2 * each]) for each in ids]


def turn_until(bench: Bench, condition: Callable[[], bool], what: str) -> None:
    """Turn, with little time per turn, until another thread meets the condition."""

    def turned() -> bool:
        bench.turn(1, step_s=1e-3)
        return condition()

    until(turned, what)


def waiting(registry: Registry, *ids: int) -> Bench:
    """Return a stream whose first records wait for the unavailable registry."""
    registry.schemas = None
    bench = Bench(registry)
    bench.produce(*framed(*ids))
    bench.stand(control_position=0, claimed=0)
    turn_until(bench, lambda: registry.asked > 0, "the registry receives a request")
    bench.clock.advance(LINGER_S)
    bench.turn()
    assert bench.claims() == []
    return bench


def claimed(bench: Bench) -> None:
    """Let the linger pass, so that all waiting records are claimed."""
    bench.clock.advance(LINGER_S)
    bench.turn()


def test_records_wait_and_the_worker_lives_while_the_registry_is_unavailable() -> None:
    registry = Registry()
    bench = waiting(registry, 1, 2, 3)
    bench.clock.advance(60.0)
    bench.turn()
    assert statuses(bench.board) == {W: "waiting"}
    assert bench.claims() == []
    bench.produce(*framed(4))
    registry.schemas = dict(SEVEN)
    turn_until(bench, lambda: bool(written(bench.log)), "the schema is found")
    bench.turn()
    claimed(bench)
    [claim] = bench.claims()
    assert (claim.address[0].start, claim.address[0].end, claim.samples) == (0, 4, 4)
    assert statuses(bench.board) == {W: "alive"}
    rows = bench.cache.get(claim.address)
    assert rows is not None
    assert rows["id"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LateError("a"), "registry-late"),
        (RefusedError("a"), "registry-refuses"),
        (UnreachableError("a"), "registry-unreachable"),
        (UnavailableError("a"), "waiting"),
        (AttributeError("a"), "waiting"),
    ],
)
def test_heartbeat_contains_the_reason_of_a_missing_schema(error: Exception, status: str) -> None:
    class Raising(Registry):
        def schema(self, number: int) -> Schema | None:
            try:
                return super().schema(number)
            except UnavailableError:
                raise error from None

    registry = Raising()
    bench = waiting(registry, 1)
    turn_until(bench, lambda: statuses(bench.board) == {W: status}, "the reason is on the board")
    registry.schemas = dict(SEVEN)
    turn_until(bench, lambda: bool(written(bench.log)), "the schema is found")
    turn_until(bench, lambda: statuses(bench.board) == {W: "alive"}, "no schema is missing")


def test_records_waiting_for_a_schema_are_dropped_if_the_position_moves_ahead() -> None:
    """While records 0 to 2 wait, another worker claims up to offset 2. Reading continues there."""
    registry = Registry()
    bench = waiting(registry, 1, 2, 3)
    bench.stand(control_position=5, claimed=2)
    bench.clock.advance(1.0)
    bench.turn()
    registry.schemas = dict(SEVEN)
    turn_until(bench, lambda: bool(written(bench.log)), "the schema is found")
    bench.turn()
    claimed(bench)
    [claim] = bench.claims()
    assert (claim.address[0].start, claim.address[0].end, claim.samples) == (2, 3, 1)


def test_records_waiting_for_a_schema_are_read_again_if_the_position_goes_back() -> None:
    """The waiting records do not begin at the new position, so they are dropped and read again."""
    registry = Registry()
    registry.schemas = dict(SEVEN)
    bench = Bench(registry)
    bench.produce(*framed(1, 2), *framed(3, schema=8))
    registry.schemas = None
    bench.stand(control_position=0, claimed=2)
    turn_until(bench, lambda: registry.asked > 0, "the registry receives a request")
    bench.stand(control_position=5, claimed=0)
    bench.clock.advance(1.0)
    bench.turn()
    registry.schemas = {**SEVEN, 8: SEVEN[7]}
    turn_until(bench, lambda: len(written(bench.log)) == 2, "both schemas are found")
    bench.turn()
    claimed(bench)
    [claim] = bench.claims()
    assert (claim.address[0].start, claim.address[0].end, claim.samples) == (0, 3, 3)


def test_records_of_an_unknown_schema_id_are_skipped_until_it_exists() -> None:
    registry = Registry()
    registry.schemas = dict(SEVEN)
    bench = Bench(registry)
    bench.produce(*framed(1), *framed(2, schema=8), *framed(3))
    bench.stand(control_position=0, claimed=0)
    turn_until(bench, lambda: registry.asked == 2, "both ids are requested")
    bench.turn()
    claimed(bench)
    turn_until(bench, lambda: bool(bench.claims()), "the batch is claimed")
    [claim] = bench.claims()
    assert (claim.samples, claim.skipped) == (
        2,
        (Skipped(*P, 1, "the schema registry has no schema with the record's id"),),
    )
    bench.stand(control_position=1, claimed=3)
    bench.turn()
    registry.schemas = {8: SEVEN[7]}
    bench.clock.advance(ABSENT_S)
    bench.produce(*framed(4, schema=8))
    turn_until(bench, lambda: len(written(bench.log)) == 2, "the id is requested again")
    bench.turn()
    claimed(bench)
    turn_until(bench, lambda: len(bench.claims()) == 2, "the next batch is claimed")
    assert bench.claims()[1].samples == 1


def test_leaving_worker_claims_no_waiting_records() -> None:
    registry = Registry()
    bench = waiting(registry, 1, 2)
    bench.stream.leave()
    registry.schemas = dict(SEVEN)
    turn_until(bench, lambda: bool(written(bench.log)), "the schema is found")
    claimed(bench)
    assert bench.claims() == []


def test_empty_offsets_behind_waiting_records_are_not_claimed() -> None:
    registry = Registry()
    registry.schemas = None
    bench = Bench(registry)
    bench.produce(*framed(1), b"aborted")
    bench.log.punch(P, 1)
    bench.stand(control_position=0, claimed=0)
    turn_until(bench, lambda: registry.asked > 0, "the registry receives a request")
    for _ in range(3):
        claimed(bench)
    assert bench.claims() == []
    registry.schemas = dict(SEVEN)
    turn_until(bench, lambda: bool(written(bench.log)), "the schema is found")
    for _ in range(3):
        claimed(bench)
    spans = [(each.address[0].start, each.address[0].end, each.samples) for each in bench.claims()]
    assert spans in ([(0, 2, 1)], [(0, 1, 1), (1, 2, 0)])
