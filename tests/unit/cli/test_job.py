"""`doll job`: its requests and its output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from common.core.messages import (
    GENESIS,
    Batch,
    BatchReady,
    Lead,
    LeaderStatus,
    Opened,
    Skipped,
    Synchrony,
    UpdateApplied,
    WorkerId,
)
from common.core.snapshot_search import AWAITED
from common.core.spans import Partition, Span
from common.jobs.store import JobStore
from common.kafka.port import NewTopic
from common.kafka.table import NUMBER
from common.wire.messages import encode_audit, encode_claim
from services.cli import exits
from services.cli.system.api import Api, Picture

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
    world.log.create_topics([NewTopic("clinic-a")])
    world.run("job", "submit", "-", typed=JOB)


def test_submit_creates_a_job_from_a_file(world: World, file: str) -> None:
    world.log.create_topics([NewTopic("clinic-a", 3)])
    result = world.run("job", "submit", file)
    assert result.stdout == "job digits submitted: 3 partitions of clinic-a, starting at earliest\n"
    assert "digits" in world.run("job", "list").stdout
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
        ("classes: 10", "classes: 10, width: 9", "change the field or the task's option"),
        ("classes: 10", "clases: 10", "its options are classes, channels, height, width, network"),
    ],
)
def test_submit_of_an_invalid_job_names_the_field_and_creates_nothing(
    world: World, old: str, new: str, message: str
) -> None:
    world.log.create_topics([NewTopic("clinic-a")])
    result = world.run("job", "submit", "-", typed=JOB.replace(old, new), code=exits.REFUSED)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "no jobs yet" in world.run("job", "list").stdout


def test_submit_of_an_unreadable_file_names_it(world: World, tmp_path: Path) -> None:
    result = world.run("job", "submit", str(tmp_path / "gone.yaml"), code=exits.REFUSED)
    assert "gone.yaml: there is no such file" in result.stderr
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    result = world.run("job", "submit", str(tmp_path / "binary"), code=exits.REFUSED)
    assert "cannot be read as text" in result.stderr
    result = world.run("job", "submit", "-", typed=b"\xff\xfe\xfd", code=exits.REFUSED)
    assert "standard input: cannot be read as text" in result.stderr


def test_job_can_be_paused_resumed_and_stopped(world: World) -> None:
    submitted(world)
    world.run("job", "pause", "digits", "--reason", "prices are high")
    assert "prices are high" in world.run("job", "list").stdout
    assert world.run("job", "pause", "digits").stdout == "job digits is paused: prices are high\n"
    world.run("job", "resume", "digits")
    assert "waiting for a coordinator" in world.run("job", "list").stdout
    world.run("job", "stop", "digits")
    assert "stopped" in world.run("job", "list").stdout
    world.run("job", "resume", "digits")
    assert "waiting for a coordinator" in world.run("job", "list").stdout


def test_change_prints_the_settings_and_records_the_reason(world: World) -> None:
    submitted(world)
    options = ("--deadline", "60", "--group-size", "4", "--batch-size", "8")
    result = world.run(
        "job", "change", "digits", *options, "--learning-rate", "0.5", "--reason", "it is late"
    )
    output = "deadline_s 60, group_size 4, batch_size 8, learning_rate 0.5"
    assert result.stdout == f"job digits changed: {output} (revision 1): it is late\n"
    shown = json.loads(world.run("job", "show", "digits").stdout)
    assert (shown["revision"], shown["changes"][1]["reason"]) == (1, "it is late")
    assert shown["spec"]["stop"]["deadline_s"] == 60.0
    result = world.run("job", "change", "digits", "--deadline", "none")
    assert "changed: deadline_s none (revision 2)\n" in result.stdout
    result = world.run("job", "change", "digits", "--group-size", "4")
    assert result.stdout == "job digits already has these settings; nothing was changed\n"


def test_change_accepts_blocks_of_settings(world: World) -> None:
    submitted(world)
    for options, expected in (
        (("--oom", "hold"), "oom hold"),
        (("--oom", "none"), "oom none"),
        (("--synchronisation", "stale"), 'synchronisation {"mode": "stale"}'),
        (
            ("--synchronisation", "{mode: asynchronous, damped: true}"),
            'synchronisation {"mode": "asynchronous", "damped": true}',
        ),
        (
            ("--synchronisation", "none", "--compression", "{significance: 1.5}"),
            'synchronisation none, compression {"significance": 1.5}',
        ),
        (
            ("--group-size", "4", "--tuner", "{group_size: [2, 40]}"),
            'group_size 4, tuner {"group_size": [2, 40]}',
        ),
        (("--compression", "none", "--aggregation", "group"), 'aggregation {"mode": "group"}'),
        (
            ("--compression", "{significance: 1.5}", "--aggregation", "none"),
            'compression {"significance": 1.5}, aggregation none',
        ),
    ):
        assert f"{expected} (rev" in world.run("job", "change", "digits", *options).stdout
    shown = json.loads(world.run("job", "show", "digits").stdout)
    assert shown["spec"]["compression"]["significance"] == 1.5
    assert "synchronisation" not in shown["spec"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to change: give --deadline, --group-size"),
        (("--deadline", "soon"), "--deadline: must be a number of seconds or none, got 'soon'"),
        (("--group-size", "0"), "group_size: must be at least 1, got 0"),
        (("--learning-rate", "nan"), "learning_rate: must be a number"),
        (("--oom", "retry"), "oom: must be 'chunk' or 'hold'"),
        (("--synchronisation", "late"), "synchronisation.mode: must be 'synchronous', 'stale'"),
        (("--aggregation", "ring"), "aggregation.mode: must be 'board' or 'group'"),
        (("--compression", "1.5"), "compression: must be a mapping of fields to values"),
    ],
)
def test_invalid_change_is_rejected(world: World, options: tuple[str, ...], message: str) -> None:
    submitted(world)
    assert message in world.run("job", "change", "digits", *options, code=exits.REFUSED).stderr
    assert json.loads(world.run("job", "show", "digits").stdout)["revision"] == 0


def test_delete_needs_a_stopped_job(world: World) -> None:
    submitted(world)
    result = world.run("job", "delete", "digits", code=exits.REFUSED)
    assert "is running; stop it first, with `doll job stop digits`" in result.stderr
    world.run("job", "stop", "digits")
    assert "job digits is deleted" in world.run("job", "delete", "digits").stdout
    assert "no jobs yet" in world.run("job", "list").stdout


def test_purge_lists_what_it_removes_asks_and_frees_the_name(world: World) -> None:
    submitted(world)
    world.write("doll.digits.updates", b"{}", b"{}")
    world.blobs.put("digits/checkpoints/1-1/manifest.json", b"{}")
    purge = "job", "delete", "digits", "--purge"
    output = world.run(*purge, code=exits.REFUSED).stderr
    assert "is running; stop it first, with `doll job stop digits`" in output
    world.run("job", "stop", "digits")
    asked = world.run(*purge, typed="n\n", code=1).stdout
    assert "would be removed: topic doll.digits.updates, 2 records" in asked
    assert "would be removed: 1 files in object storage" in asked
    assert "kept: dead letters" in asked
    assert "digits" in world.run("job", "list").stdout
    output = world.run(*purge, typed="y\n").stdout
    assert (
        "the name digits can be used again\nremoved: topic doll.digits.control, 0 records\n"
        in output
    )
    assert world.blobs.content == {}
    submitted(world)
    assert JobStore(world.log).get("digits").id == "digits.I2"
    world.run("job", "stop", "digits")
    assert "doll.digits.I2.updates" in world.run(*purge, "--yes").stdout
    assert (
        "needs --purge" in world.run("job", "delete", "digits", "--yes", code=exits.REFUSED).stderr
    )
    output = world.run("job", "delete", "digit", "--purge", "--yes", code=exits.REFUSED).stderr
    assert 'there is no job "digit", and nothing is left of one' in output


def test_command_for_an_unknown_job_is_rejected(world: World) -> None:
    for command in ("show", "pause", "resume", "stop", "delete", "watch"):
        result = world.run("job", command, "digit", code=exits.REFUSED)
        assert 'there is no job "digit"' in result.stderr


def made(version: int) -> Batch:
    span = Span("clinic-a", 0, 2 * version - 2, 2 * version)
    return Batch(version - 1, WorkerId("w1"), (span,), 2)


def update(epoch: int, version: int) -> UpdateApplied:
    batch = made(version)
    return UpdateApplied(epoch, version, (batch,), 2, 0.25, {"accuracy": 0.5})


def claimed(world: World, *versions: int, skipped: int = 0) -> None:
    """Report that workers hold the batches of updates."""
    for batch in map(made, versions):
        start = batch.address[0].start
        left_out = tuple(Skipped("clinic-a", 0, start + n, "torn") for n in range(skipped))
        claim = BatchReady(batch.worker, batch.address, batch.samples - skipped, left_out)
        world.write("doll.digits.control", encode_claim(claim))


def test_watch_shows_updates_workers_and_lag(world: World) -> None:
    submitted(world)
    world.write("clinic-a", *[b"record"] * 5)
    claimed(world, 1, 2)
    world.write(
        "doll.digits.updates", encode_audit(Lead(-1, GENESIS, "c", 0)), encode_audit(update(0, 1))
    )
    board = world.board("digits")
    place = Partition("clinic-a", 0)
    board.hold_lease("c1", 60.0)
    board.put_leader_status(LeaderStatus(0, 1, {place: 4}, 1, 7, 2, {place: 0}))
    board.beat(WorkerId("w1"), "alive", 60.0)
    board.beat(WorkerId("w2"), "leaving", 60.0)
    shown = world.run("job", "watch", "digits", "--once").stdout
    assert "digits running" in shown
    assert "workers 1 (+1 leaving)" in shown
    assert "lag 3" in shown
    assert "batches waiting 1" in shown
    assert "records skipped 0" in shown
    assert "records expired 0" in shown
    assert "accuracy" in shown
    assert "0.2500" in shown


def test_show_reports_a_single_waiting_record_beside_its_json(
    world: World,
) -> None:
    submitted(world)
    world.write("clinic-a", b"record")
    world.write("doll.digits.updates", encode_audit(Lead(-1, GENESIS, "c", 0)))
    board = world.board("digits")
    board.hold_lease("c1", 60.0)
    place = Partition("clinic-a", 0)
    board.put_leader_status(LeaderStatus(0, 0, {place: 0}, 0, 0, 1, {place: 0}))
    board.beat(WorkerId("w1"), "too-few", 60.0)
    shown = world.run("job", "show", "digits")
    assert json.loads(shown.stdout)["wanted"] == "running"
    why = "1 record waits: batch normalization needs two"
    assert f"digits: waiting for records: {why}\n" in shown.stderr
    assert "workers 1" in world.run("job", "watch", "digits", "--once").stdout


def test_list_json_contains_each_job_and_its_state(world: World) -> None:
    submitted(world)
    found = json.loads(world.run("job", "list", "--json").stdout)
    assert [(each["id"], each["state"]) for each in found["jobs"]] == [
        ("digits", "waiting for a coordinator")
    ]
    assert found["unreadable"] == []


def test_list_in_a_file_is_not_truncated(world: World) -> None:
    submitted(world)
    (line,) = (
        each for each in world.run("job", "list").stdout.splitlines() if each.startswith(" digits ")
    )
    assert line.split()[-2:] == ["image-classifier", "clinic-a"]
    assert "waiting for a coordinator" in line


def test_watch_without_a_terminal_writes_a_line_per_change(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(world)
    look, seen = Api.look, list[Picture]()

    def looked(service: Api, job: str) -> Picture:
        if seen and seen[-1].updates:
            # The command has shown all changes before this one.
            raise KeyboardInterrupt
        if len(seen) == 1:
            claimed(world, 1)
            made = Lead(-1, GENESIS, "c", 0), update(0, 1)
            world.write("doll.digits.updates", *map(encode_audit, made))
        seen.append(look(service, job))
        return seen[-1]

    monkeypatch.setattr(Api, "look", looked)
    monkeypatch.setattr("services.cli.commands.job._EVERY_S", 0.01)
    lines = world.run("job", "watch", "digits").stdout.splitlines()
    assert all(line.startswith("digits  ") for line in lines)
    assert len(set(lines)) == len(lines)
    assert "update" not in lines[0]
    assert "  update 1  " in lines[-1]
    assert "  loss 0.2500  accuracy 0.5000  " in lines[-1]


def test_watch_shows_the_synchronisation_mode(world: World) -> None:
    submitted(world)
    world.run("job", "change", "digits", "--synchronisation", "stale")
    shown = world.run("job", "watch", "digits", "--once").stdout
    assert "synchronisation stale (K 1, s 1)" in shown
    claimed(world, 1, 2)
    synchrony = Synchrony(1, staleness=2)
    made = [update(0, 1), replace(update(0, 2), synchrony=synchrony, base=0, revision=1, rate=5e-4)]
    records = (Lead(-1, GENESIS, "c", 0), *made)
    world.write("doll.digits.updates", *map(encode_audit, records))
    shown = world.run("job", "watch", "digits", "--once").stdout
    assert "synchronisation stale (K 1, s 2)" in shown
    assert "learning rate 0.0005 " in shown
    assert "stale" in next(line for line in shown.splitlines() if "update" in line)


def test_watch_shows_metrics_of_the_last_minute_separately(world: World) -> None:
    submitted(world)
    made = replace(update(0, 1), metrics={"accuracy": 0.25, "auc": 0.75, "f1": 0.5})
    world.write("doll.digits.updates", encode_audit(Lead(-1, GENESIS, "c", 0)), encode_audit(made))
    shown = world.run("job", "watch", "digits", "--once").stdout
    assert "last minute: auc 0.7500   f1 0.5000\n" in shown
    assert shown.count("auc") == 1


def test_watch_and_list_show_expired_records(world: World) -> None:
    submitted(world)
    world.write("clinic-a", *[b"record"] * 5)
    claimed(world, 1)
    world.log.expire(Partition("clinic-a", 0), 4)
    shown = world.run("job", "watch", "digits", "--once").stdout
    # The lag is a batch of two records, and one unclaimed record.
    assert "lag 3 " in shown
    assert "records expired 2 " in shown
    head, line, *_ = world.run("job", "list").stdout.splitlines()
    assert line[head.index("quarantined") :].split()[:2] == ["0", "2"]


def lost_after_training(world: World) -> None:
    """Train clinic-a[0] up to 4, then resume at 3, because its log was cut there."""
    world.write("clinic-a", *[b"record"] * 4)
    claimed(world, 1, 2)
    records = (Lead(-1, GENESIS, "c", 0), update(0, 1), update(0, 2))
    world.write("doll.digits.updates", *map(encode_audit, records))
    opened = Opened(Partition("clinic-a", 0), 0, 9, "", 3, 0)
    world.write("doll.digits.control", encode_claim(opened))


def test_watch_and_list_show_records_trained_and_then_lost(world: World) -> None:
    submitted(world)
    assert "trained, then lost 0\n" in world.run("job", "watch", "digits", "--once").stdout
    lost_after_training(world)
    assert "trained, then lost 1\n" in world.run("job", "watch", "digits", "--once").stdout
    head, line, *_ = world.run("job", "list").stdout.splitlines()
    assert line[head.index("quarantined") :].split()[:3] == ["0", "0", "1"]


def test_watch_shows_the_current_lag_without_a_checkpoint(world: World) -> None:
    submitted(world)
    world.write("clinic-a", *[b"record"] * 4)
    claimed(world, 1, 2)
    records = (Lead(-1, GENESIS, "c", 0), update(0, 1), update(0, 2))
    world.write("doll.digits.updates", *map(encode_audit, records))
    board = world.board("digits")
    board.hold_lease("c1", 60.0)
    # There is no checkpoint.
    board.put_leader_status(LeaderStatus(0, 2, {Partition("clinic-a", 0): 4}, 2, 0, 0, {}))
    assert "lag 0" in world.run("job", "watch", "digits", "--once").stdout
    assert "lag 0" in world.run("job", "watch", "digits", "--once").stdout


def test_watch_works_without_redis(world: World) -> None:
    submitted(world)
    world.redis.kill()
    shown = world.run("job", "watch", "digits", "--once").stdout
    assert "waiting for a server: Redis is unavailable" in shown
    assert "no update yet" in shown


def test_list_shows_the_state_of_each_job_and_its_unused_records(world: World) -> None:
    submitted(world)
    world.write("clinic-a", *[b"record"] * 4)
    claimed(world, 1, skipped=2)
    shown = world.run("job", "list").stdout
    assert "waiting for a coordinator" in shown
    assert "no coordinator leads digits yet; `doll coordinator` starts one" in shown
    world.board("digits").put_unable("c1", "task [x] is not in DOLL_TASKS", 60.0)
    assert "c1: task [x] is not in DOLL_TASKS" in world.run("job", "list").stdout
    world.board("digits").hold_lease("c1", 60.0)
    world.board("digits").put_leader_status(LeaderStatus(0, 1, {}, 1, 0, 0, {}))
    _, line, why = world.run("job", "list").stdout.splitlines()
    assert why.startswith("digits: waiting for workers: ")
    assert line.split()[:7] == ["digits", "waiting", "for", "workers", "2", "2", "0"]
    world.redis.kill()
    assert "Redis is unavailable" in world.run("job", "list").stdout


def test_held_job_shows_its_reason_and_traceback(world: World) -> None:
    submitted(world)
    job_store = JobStore(world.log)
    job_store.hold(
        job_store.get("digits"), "its task raises KeyError", "Traceback:\n  \x1b[31mboom"
    )
    (_, line, why) = world.run("job", "list").stdout.splitlines()
    assert line.split()[1] == "held"
    assert why == "digits: held: its task raises KeyError"
    assert "held: its task raises KeyError" in world.run("job", "watch", "digits", "--once").stdout
    shown = world.run("job", "show", "digits")
    assert json.loads(shown.stdout)["state"] == "held"
    assert shown.stderr == "digits is held: its task raises KeyError\nTraceback:\n  \\x1b[31mboom\n"


def test_stop_of_a_finished_job_leaves_it_finished_and_says_so(world: World) -> None:
    submitted(world)
    JobStore(world.log).finish("digits", "400 updates applied", 0)
    output = world.run("job", "stop", "digits", "--reason", "enough").stdout
    assert output == "job digits has finished and does not change: 400 updates applied\n"
    assert "finished: 400 updates applied" in world.run("job", "list").stdout
    assert "is resumed" in world.run("job", "resume", "digits").stdout
    output = world.run("job", "stop", "digits", "--reason", "enough").stdout
    assert output == "job digits is stopped: enough\n"


def test_job_with_deleted_topics_is_listed_and_watched(world: World) -> None:
    submitted(world)
    world.log.delete_topics(["doll.digits.updates"])
    job_store = JobStore(world.log)
    job_store.hold(job_store.get("digits"), "the topic doll.digits.updates does not exist any more")
    for command in (("job", "list"), ("job", "watch", "digits", "--once")):
        assert "does not exist any more" in world.run(*command).stdout


def test_list_shows_an_unparsable_record_with_its_offset(world: World) -> None:
    submitted(world)
    writer = world.log.writer()
    writer.append("doll.jobs", b'{"spec": {}}', key=b"letters", headers=[(NUMBER, b"1")])
    assert writer.flush(1.0)
    shown = world.run("job", "list").stdout
    assert "digits" in shown
    assert "unreadable: the record of 'letters' at offset 1 of doll.jobs: job record: " in shown


def test_resume_after_loss_needs_a_held_job(world: World) -> None:
    submitted(world)
    refused = world.run("job", "resume", "digits", "--after-loss", code=3)
    assert "is not held" in refused.stderr
    refused = world.run("job", "resume", "digits", "--from-start", code=3)
    assert "needs --after-loss" in refused.stderr
    job_store = JobStore(world.log)
    job_store.hold(job_store.get("digits"), "the updates topic lost records")

    said = world.run("job", "resume", "digits", "--after-loss", "--from-start").stdout

    assert said == "job digits is resumed: resumed after loss by operator\n"
    record = JobStore(world.log).get("digits")
    assert (record.wanted, record.after_loss, record.from_start) == ("running", 1, True)


def test_resume_after_loss_continues_without_the_awaited_checkpoint(world: World) -> None:
    submitted(world)
    world.board("digits").put_unable("c1", f"{AWAITED}7-40, but the list is empty", 60.0)

    world.run("job", "resume", "digits", "--after-loss")

    record = JobStore(world.log).get("digits")
    assert (record.wanted, record.after_loss, record.from_start) == ("running", 1, False)


def test_resume_reads_a_recreated_topic_from_the_given_position(world: World) -> None:
    submitted(world)
    job_store = JobStore(world.log)
    job_store.hold(job_store.get("digits"), "the topic clinic-a was deleted and recreated")
    assert world.run("job", "resume", "digits", "--from", "somewhere", code=2).stderr

    world.run("job", "resume", "digits", "--from", "latest")

    record = JobStore(world.log).get("digits")
    assert (record.wanted, record.after_loss, record.read_from) == ("running", 1, "latest")
