"""A job file is posted unchanged, and each error names its line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.admin.conftest import problem

if TYPE_CHECKING:
    import httpx2

    from tests.unit.admin.conftest import World

FILE = """\
# two clinics
name: digits
streams: [clinic-a, clinic-b]
records:
  codec: tensor
  fields:
    image: {dtype: uint8, shape: [1, 8, 8]}
    label: {dtype: int64}
task: {name: image-classifier, classes: 10}
batch_size: 64
group_size: 4
optimizer:
  name: adam
  learning_rate: 2.0e-3
"""


def post(world: World, text: str | bytes, key: str = "operator", **headers: str) -> httpx2.Response:
    world.streams("clinic-a", "clinic-b")
    sent = {"Content-Type": "application/yaml", **headers}
    return world.ask("POST", "/v1/jobs", key=key, content=text, headers=sent)


def test_job_file_in_yaml_creates_a_job(world: World) -> None:
    answer = post(world, FILE, **{"Content-Type": "application/yaml; charset=utf-8"})

    assert answer.status_code == 201, answer.text
    assert world.get("/v1/jobs/digits")["spec"]["optimizer"]["learning_rate"] == 0.002


@pytest.mark.parametrize(
    ("old", "new", "field", "line"),
    [
        ("group_size: 4", "group_size: -3", "body.group_size", 11),
        ("[1, 8, 8]", "[1, 8, no]", "body.records", 7),
        ("learning_rate: 2.0e-3", "learning_rte: 2.0e-3", "body.optimizer.learning_rte", 14),
        ("batch_size: 64\n", "", "body.batch_size", 1),
        ("classes: 10", "classes: -1", "body.task", 9),
        ("name: digits", "name: [digits", "body", 3),
        ("batch_size: 64", "batch_size: 64\nname: two", "body", 11),
    ],
)
def test_error_in_a_job_file_names_its_line(
    world: World, old: str, new: str, field: str, line: int
) -> None:
    answer = post(world, FILE.replace(old, new))

    problem(answer, 422)
    errors: list[dict[str, Any]] = answer.json()["errors"]
    assert [each["line"] for each in errors if each["field"].startswith(field)] == [line], errors


def test_body_that_is_neither_yaml_nor_json_is_rejected(world: World) -> None:
    assert "application/yaml" in problem(post(world, FILE, **{"Content-Type": "text/plain"}), 422)
    assert "UTF-8" in problem(post(world, b"name: \xff"), 422)
    assert "must be a mapping" in problem(post(world, "- digits"), 422)
    assert problem(post(world, "name: [digits", key="viewer"), 403)
    assert world.get("/v1/jobs")["jobs"] == []


def test_errors_of_a_job_in_json_have_no_lines(world: World) -> None:
    answer = world.ask("POST", "/v1/jobs", json={"name": "digits"})

    assert problem(answer, 422)
    assert not any("line" in each for each in answer.json()["errors"])
