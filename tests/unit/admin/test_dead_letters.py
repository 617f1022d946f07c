"""A job's dead letters over HTTP: counts per reason, and positions of the newest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.messages import Skipped
from common.core.spans import Partition
from common.kafka.dead_letters import Note, TopicIdPartition, encode_dead_letter
from services.admin.routes.requests import JOB
from tests.unit.admin.conftest import World, problem

if TYPE_CHECKING:
    from common.kafka.dead_letters import EncodedDeadLetter
    from common.kafka.port import NewRecord

PATH = "/v1/jobs/digits/dead-letters"


def bad(offset: int, reason: str, job: str = "digits") -> EncodedDeadLetter:
    return encode_dead_letter(job, Skipped("clinic-a", 0, offset, reason), offset, b"?")


def write(world: World, *dead_letters: EncodedDeadLetter | NewRecord) -> None:
    writer = world.log.writer()
    for each in dead_letters:
        writer.append(each.topic, each.value, key=each.key, headers=each.headers)
    assert writer.flush(1.0)


def test_dead_letters_are_counted_by_reason_with_the_newest_addresses(world: World) -> None:
    world.streams("clinic-a", "clinic-b", "clinic-a.dlq")
    assert world.ask("POST", "/v1/jobs", json=JOB).status_code == 201
    assert world.get(PATH) == {"reasons": [], "others": 0}

    write(world, bad(3, "too short"), bad(4, "too short"), bad(5, "no label"))
    write(world, bad(6, "too short", job="another"), bad(4, "too short"))
    place = TopicIdPartition("", Partition("clinic-a", 0))
    write(world, Note(place, 3, 4, "clinic-a", frozenset({"digits"})).record)

    page = world.get(f"{PATH}?limit=1")
    assert page["others"] == 1
    assert page["reasons"] == [
        {
            "stream": "clinic-a",
            "reason": "too short",
            "records": 2,
            "batches": 0,
            "replayed": 1,
            "newest": [
                {"partition": 0, "offset": 4, "end": 5},
                {"partition": 0, "offset": 3, "end": 4},
            ],
        }
    ]


def test_dead_letters_of_an_unknown_job_return_404(world: World) -> None:
    assert "no job" in problem(world.ask("GET", PATH, key="viewer"), 404)


def test_me_returns_the_name_and_role_of_the_caller(world: World) -> None:
    assert world.get("/v1/me") == {"name": "eve", "role": "viewer"}
    assert world.ask("GET", "/v1/me").json() == {"name": "olga", "role": "operator"}
