"""A job's quarantine over HTTP: its batches, and their release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.messages import GENESIS, Lead, Quarantined, Replayed, Requeued
from common.core.spans import Partition
from common.kafka.port import NewTopic
from common.wire.messages import decode_audit, encode_audit
from services.admin.routes.requests import JOB
from tests.unit.admin.conftest import World, problem
from tests.unit.cli.test_requeue import BAD, GONE, POISON, QUARANTINE, UPDATES

if TYPE_CHECKING:
    from common.core.messages import AuditRecord

SHOW, REQUEUE = "/v1/jobs/digits/quarantine", "/v1/jobs/digits/requeue"


@pytest.fixture
def held(world: World) -> World:
    """A job with three quarantined batches. One of them has expired."""
    world.streams("clinic-a", "clinic-b")
    assert world.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    world.log.create_topics([NewTopic(UPDATES)])
    write(world, *QUARANTINE)
    return world


def write(world: World, *audit: AuditRecord) -> None:
    writer = world.log.writer()
    for record in audit:
        writer.append(UPDATES, encode_audit(record))
    assert writer.flush(1.0)


def written(world: World) -> list[AuditRecord]:
    """Return the records of the updates topic that follow the quarantines."""
    records = world.log.tail(Partition(UPDATES, 0), len(QUARANTINE)).read(100, 0.0)
    return [decode_audit(record.value or b"") for record in records]


def outcomes(world: World, batches: object) -> dict[int, str]:
    answer = world.ask("POST", REQUEUE, json={"batches": batches})
    assert answer.status_code == 200, answer.text
    return {each["batch"]: each["outcome"] for each in answer.json()["batches"]}


def test_quarantine_is_listed_in_pages_with_possible_actions(held: World) -> None:
    first = held.get(f"{SHOW}?limit=2")
    assert first["batches"][1] == {
        "batch": 1,
        "records": 3,
        "spans": [["clinic-a", 0, 2, 7]],
        "reason": "poison: its workers died while they computed it",
        "final": "",
    }
    rest = held.get(f"{SHOW}?limit=2&after={first['next']}")
    assert [(each["batch"], each["final"]) for each in rest["batches"]] == [(2, "expired")]
    assert rest["next"] is None


def test_quarantine_of_a_job_without_leader_is_empty(world: World) -> None:
    world.streams("clinic-a", "clinic-b")
    assert world.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    assert world.get(SHOW) == {"batches": [], "next": None}
    assert outcomes(world, "all") == {}


def test_requeue_all_releases_every_possible_batch_and_records_the_key(held: World) -> None:
    assert outcomes(held, "all") == {0: "requeued", 1: "requeued"}
    first, second = written(held)
    assert isinstance(first, Requeued)
    assert isinstance(second, Requeued)
    assert (first.batch, second.batch, first.by) == (POISON, BAD, "olga")
    assert [each["batch"] for each in held.get(SHOW)["batches"]] == [GONE.offset]


def test_requeue_is_recorded_once_in_the_changes_of_the_job(held: World) -> None:
    for _ in range(2):
        assert outcomes(held, [0, 1])
    last = held.get("/v1/jobs/digits")["changes"]
    shown = [(each["action"], each["by"], each["role"], each["reason"]) for each in last[1:]]
    assert shown == [("requeued", "olga", "operator", "2 batches: 0, 1")]


def test_repeated_requeue_releases_a_batch_once(held: World) -> None:
    assert outcomes(held, [1]) == {1: "requeued"}
    assert outcomes(held, [0, 1, 1]) == {0: "requeued", 1: "before"}
    assert len(written(held)) == 2


def test_batch_quarantined_again_can_be_requeued_again(held: World) -> None:
    assert outcomes(held, [0]) == {0: "requeued"}
    write(held, Quarantined(0, POISON, "poison: again"))
    assert outcomes(held, [0]) == {0: "requeued"}


@pytest.mark.parametrize(
    ("batch", "said"),
    [(GONE.offset, "expired: its records are deleted"), (7, "is not quarantined")],
)
def test_requeue_with_an_impossible_batch_is_rejected_as_a_whole(
    held: World, batch: int, said: str
) -> None:
    answer = held.ask("POST", REQUEUE, json={"batches": [0, batch]})
    assert said in problem(answer, 409)
    assert written(held) == []


def test_replayed_batch_cannot_be_requeued(held: World) -> None:
    write(held, Replayed(POISON, "ada", 1.0))
    assert held.get(SHOW)["batches"][0]["final"] == "replayed"
    assert "was replayed" in problem(held.ask("POST", REQUEUE, json={"batches": [0]}), 409)


def test_quarantine_is_unknown_if_the_topic_lost_its_beginning(held: World) -> None:
    held.log.expire(Partition(UPDATES, 0), 1)
    assert "begins at offset 1" in problem(held.ask("GET", SHOW), 409)
    assert "begins at offset 1" in problem(held.ask("POST", REQUEUE, json={"batches": "all"}), 409)


@pytest.mark.parametrize(
    "body", [{}, {"batches": []}, {"batches": ["1"]}, {"batches": "some"}, {"batches": [-1]}]
)
def test_requeue_without_valid_batches_is_rejected(held: World, body: dict[str, object]) -> None:
    assert problem(held.ask("POST", REQUEUE, json=body), 422)
    assert written(held) == []


def test_quarantine_of_an_unknown_job_returns_404(world: World) -> None:
    assert problem(world.ask("GET", SHOW), 404) == 'there is no job "digits"'
    assert problem(world.ask("POST", REQUEUE, json={"batches": "all"}), 404)


def test_progress_contains_the_number_of_requeueable_batches(held: World) -> None:
    def numbers() -> tuple[int, int]:
        progress = held.get("/v1/jobs/digits")["progress"]
        return progress["quarantined"], progress["requeueable"]

    while numbers() != (3, 2):
        pass  # pytest's timeout is the limit
    assert outcomes(held, [1]) == {1: "requeued"}
    while numbers() != (2, 1):
        pass
    write(held, Replayed(POISON, "ada", 1.0), Lead(0, GENESIS, "c2", 6))
    while numbers() != (2, 0):
        pass
