"""`doll job`: what is posted, asked for and shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from common.core.messages import GENESIS, Batch, Lead, Standing, UpdateApplied, WorkerId
from common.core.spans import Partition, Span
from common.wire import encode_audit
from services.cli import exits
from services.cli.watching import JobView, lag_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import World

JOB = """
name: digits
streams: [clinic-a]
records: {codec: tensor, fields: {image: {dtype: uint8, shape: [1, 8, 8]}, label: {dtype: int64}}}
task: {name: image-classifier, classes: 10}
batch_size: 2
group_size: 1
optimizer: {name: adam, learning_rate: 2e-3}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "digits.yaml"
    path.write_text(JOB)
    return str(path)


def submitted(world: World) -> None:
    world.log.create_topic("clinic-a", 1)
    world.run("job", "submit", "-", typed=JOB)


def test_a_job_file_becomes_a_job(world: World, file: str) -> None:
    world.log.create_topic("clinic-a", 3)
    result = world.run("job", "submit", file)
    assert result.stdout == "job digits submitted: 3 partitions of clinic-a, from earliest on\n"
    listed = world.run("job", "list").stdout
    assert "digits" in listed
    assert "running" in listed
    shown = json.loads(world.run("job", "show", "digits").stdout)
    assert shown["spec"]["batch_size"] == 2
    assert shown["first"] == [["clinic-a", 0, 0], ["clinic-a", 1, 0], ["clinic-a", 2, 0]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch_size:", "batchsize:", 'unknown field "batchsize" (did you mean "batch_size"?)'),
        ("group_size: 1", "group_size: 0", "group_size: must be at least 1, got 0"),
        ("clinic-a", "clinic-x", 'streams: there is no topic "clinic-x"'),
        ("classes: 10", "classes: ten", "task 'image-classifier': Expected `int`, got `str`"),
        ("classes: 10", "classes: 10, width: 9", "change the field or the options of the task"),
        ("classes: 10", "clases: 10", "its options are classes, channels, height, width, network"),
    ],
)
def test_a_bad_job_is_refused_by_name_and_nothing_is_posted(
    world: World, old: str, new: str, message: str
) -> None:
    world.log.create_topic("clinic-a", 1)
    result = world.run("job", "submit", "-", typed=JOB.replace(old, new), code=exits.REFUSED)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "no jobs yet" in world.run("job", "list").stdout


def test_a_job_file_that_cannot_be_read_is_named(world: World, tmp_path: Path) -> None:
    result = world.run("job", "submit", str(tmp_path / "gone.yaml"), code=exits.REFUSED)
    assert "gone.yaml: there is no such file" in result.stderr
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    result = world.run("job", "submit", str(tmp_path / "binary"), code=exits.REFUSED)
    assert "cannot be read as text" in result.stderr


def test_a_job_is_paused_resumed_and_stopped(world: World) -> None:
    submitted(world)
    world.run("job", "pause", "digits", "--reason", "prices are high")
    assert "prices are high" in world.run("job", "list").stdout
    world.run("job", "resume", "digits")
    assert "running" in world.run("job", "list").stdout
    world.run("job", "stop", "digits")
    assert "stopped" in world.run("job", "list").stdout
    world.run("job", "resume", "digits")
    assert "running" in world.run("job", "list").stdout


def test_a_job_is_changed_with_its_reason(world: World) -> None:
    submitted(world)
    options = ("--deadline", "60", "--group-size", "4", "--batch-size", "8")
    result = world.run(
        "job", "change", "digits", *options, "--learning-rate", "0.5", "--reason", "it is late"
    )
    told = "deadline_s 60, group_size 4, batch_size 8, learning_rate 0.5"
    assert result.stdout == f"job digits is to have {told} (revision 1): it is late\n"
    shown = json.loads(world.run("job", "show", "digits").stdout)
    assert (shown["revision"], shown["changes"][0]["reason"]) == (1, "it is late")
    assert shown["spec"]["stop"]["deadline_s"] == 60.0
    result = world.run("job", "change", "digits", "--no-deadline")
    assert "is to have deadline_s none (revision 2): changed by a person" in result.stdout
    result = world.run("job", "change", "digits", "--group-size", "4")
    assert result.stdout == "job digits is so already: nothing was changed\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to change: give --deadline, --no-deadline, --group-size"),
        (("--deadline", "60", "--no-deadline"), "either --deadline or --no-deadline, not both"),
        (("--group-size", "0"), "change: group_size: must be at least 1, got 0"),
        (("--learning-rate", "nan"), "change: learning_rate: must be a finite number"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    world: World, options: tuple[str, ...], message: str
) -> None:
    submitted(world)
    assert message in world.run("job", "change", "digits", *options, code=exits.REFUSED).stderr
    assert "revision" not in json.loads(world.run("job", "show", "digits").stdout)


def test_only_a_stopped_job_is_deleted(world: World) -> None:
    submitted(world)
    result = world.run("job", "delete", "digits", code=exits.REFUSED)
    assert "is running: stop it first, with `doll job stop digits`" in result.stderr
    world.run("job", "stop", "digits")
    assert "job digits is deleted" in world.run("job", "delete", "digits").stdout
    assert "no jobs yet" in world.run("job", "list").stdout


def test_a_job_that_is_not_there_is_refused(world: World) -> None:
    for command in ("show", "pause", "resume", "stop", "delete", "watch"):
        result = world.run("job", command, "digit", code=exits.REFUSED)
        assert 'there is no job "digit"' in result.stderr


def update(epoch: int, version: int, samples: int = 2) -> UpdateApplied:
    batch = Batch(version - 1, WorkerId("w1"), (Span("clinic-a", 0, 0, 2),), samples)
    return UpdateApplied(epoch, version, (batch,), samples, 0.25, {"accuracy": 0.5})


def test_watch_shows_updates_workers_and_lag(world: World) -> None:
    submitted(world)
    world.write("clinic-a", *[b"record"] * 5)
    world.write(
        "doll.digits.updates", encode_audit(Lead(-1, GENESIS, "c")), encode_audit(update(0, 1))
    )
    board = world.board("digits")
    place = Partition("clinic-a", 0)
    board.put_standing(Standing(0, 1, {place: 4}, 1, 7, 2, {place: 2}))
    board.beat(WorkerId("w1"), "alive", 60.0)
    board.beat(WorkerId("w2"), "leaving", 60.0)
    shown = world.run("job", "watch", "digits", "--once").stdout
    assert "is to be running (submitted)" in shown
    assert "workers 1 (+1 leaving)" in shown
    assert "lag 3" in shown
    assert "batches waiting 7" in shown
    assert "accuracy" in shown
    assert "0.2500" in shown


def test_watch_goes_on_without_redis(world: World) -> None:
    submitted(world)
    world.redis.kill()
    shown = world.run("job", "watch", "digits", "--once").stdout
    assert "Redis is away" in shown
    assert "no update yet" in shown


def test_an_update_that_a_later_leader_took_back_is_not_shown() -> None:
    view = JobView()
    for epoch, version in ((0, 1), (0, 2), (0, 3), (9, 2), (0, 4)):
        view.feed(update(epoch, version), None)
    assert [(each.epoch, each.version) for each in view.updates] == [(0, 1), (9, 2)]


def test_records_per_second_are_those_of_late() -> None:
    view = JobView()
    view.feed(update(0, 1), None)
    assert view.samples_per_s(0.0) is None
    for second in range(20):
        view.feed(update(0, 2 + second, samples=50), float(second))
    assert view.samples_per_s(19.0) == pytest.approx(50.0)
    assert view.samples_per_s(40.0) is None


def test_lag_is_unknown_while_nobody_leads() -> None:
    assert lag_of(None, {}) is None
