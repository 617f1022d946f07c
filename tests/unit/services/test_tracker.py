"""A tracker's view of a job despite failures, refusals and crashes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from common.config.settings import Settings
from common.core.messages import Evaluated, Lead, ModelId
from common.core.snapshots import Snapshot
from common.core.spans import Partition
from common.errors import NotFoundError, UnavailableError
from common.jobs.job_file import parse_job
from common.redis.memory import MemoryBoard
from common.storage.memory import MemoryBlobs
from common.storage.port import open_blobs
from common.storage.snapshot_file import SnapshotFile, to_parts
from common.storage.store import CheckpointStore
from common.telemetry.logging import event_logger, fields_of
from services.evaluator.__main__ import tracks
from services.evaluator.tracker import JobTracker, TrackerProcess, TrackingPace
from tests.fakes.tracking import MemoryTracking
from tests.unit.services.test_evaluator import JOB, NAME, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.jobs.store import JobRecord
    from common.storage.port import Blobs
    from common.tracking.port import Tracking

TRACKED = f"{JOB}tracking: {{register: {NAME}}}\n"
URL = "http://mlflow:5000"
PACE = TrackingPace(look_s=1e6, away_s=2e6, refused_s=3e6, quiet_s=0.0, every_updates=2)


@dataclass
class Tracked:
    """A job, its checkpoints, a tracking server, and successive trackers."""

    world: World = field(default_factory=partial(World, TRACKED))
    tracking: Tracking | None = None  # None: `server`
    server: MemoryTracking = field(default_factory=MemoryTracking)
    blobs: Blobs = field(default_factory=MemoryBlobs)
    url: str = "s3://bucket/models"
    begun: list[JobTracker] = field(default_factory=list)
    record: JobRecord | None = None

    def __post_init__(self) -> None:
        self.record = self.world.job_store.get(NAME)
        self.store = CheckpointStore(self.blobs, NAME)

    def start(self, settings: Settings | None = None) -> JobTracker:
        """Return a tracker as a new process has it."""
        used = settings or Settings(blobs=self.url, mlflow=URL)
        process = TrackerProcess(
            used,
            "e1",
            self.world.log,
            partial(MemoryBoard, self.world.redis),
            lambda: self.tracking or self.server if used.mlflow else None,
            partial(open_blobs, used) if settings else lambda: self.blobs,
            self.world.metrics,
            event_logger("evaluator"),
            PACE,
        )
        self.begun.append(JobTracker(process, lambda: self.record, lambda: None))
        return self.begun[-1]

    def learn(self, *versions: int) -> None:
        """Make versions, and evaluate each."""
        for version in versions:
            self.world.update(version)
            self.evaluate(version)

    def evaluate(self, version: int) -> None:
        """Evaluate a version."""
        model = ModelId(self.world.epoch, version)
        self.world.write(Evaluated(model, 50.0 + version, 60, {"loss": 1.0 / version}))

    def save(self, version: int, loss: float = 0.5, keep: int = 2) -> None:
        """Make a checkpoint of a version."""
        name = ModelId(self.world.epoch, version)
        claimed = {Partition("left", 0): 8 * version, Partition("left", 1): 4}
        place = self.world.log.bounds(Partition(f"doll.{NAME}.updates", 0)).end
        snapshot = Snapshot(name.epoch, name, place, 0, claimed, samples=8, losses=(loss,))
        parts = to_parts(SnapshotFile(snapshot, b"weights"))
        self.store.save(name, parts, 100.0, samples=8, loss=loss)
        self.store.keep(keep, name)

    def losses(self) -> list[tuple[int, float]]:
        """Return the server's points of the test loss."""
        [run] = self.server.runs.values()
        return [(each.step, each.value) for each in run.metrics if each.name == "test/loss"]

    def count(self, name: str) -> float | None:
        """Return a metric of the process."""
        registry = self.world.metrics.registry
        return registry.get_sample_value(f"doll_tracking_{name}", {"job_name": NAME})

    def versions(self) -> dict[str, str]:
        """Return the registered versions with their checkpoints."""
        found = self.server.models.get(NAME, {})
        return {number: each.tags["doll.version"] for number, each in found.items()}


@pytest.fixture
def tracked() -> Iterator[Tracked]:
    tracked = Tracked()
    yield tracked
    for tracker in tracked.begun:
        tracker.close()
    tracked.world.end()


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the `reason` of each "tracking_unavailable" event in the log."""
    records = [each for each in caplog.records if each.getMessage() == "tracking_unavailable"]
    return [str(fields_of(each)["reason"]) for each in records]


def test_run_contains_job_settings_curves_and_position(tracked: Tracked) -> None:
    tracked.learn(1, 2)
    due = tracked.start().turn()
    assert due is not None
    [run] = tracked.server.runs.values()
    assert (run.name, run.status, run.parameters["optimizer.learning_rate"]) == (
        NAME,
        "RUNNING",
        "0.1",
    )
    assert not any(name.startswith("tracking") for name in run.parameters)
    assert tracked.losses() == [(1, 1.0), (2, 0.5)]
    assert [each.step for each in run.metrics if each.name == "train/loss"] == [2]
    # The Lead, two updates, two evaluations.
    assert run.tags["doll.position"] == "5"
    assert (tracked.count("points_total"), tracked.count("waiting_records")) == (3.0, 0.0)


def test_tracker_sends_everything_after_an_outage_of_the_server(
    tracked: Tracked, caplog: pytest.LogCaptureFixture
) -> None:
    # sent       1       |  outage  ....  | recovery
    # evaluated  1   2   3          4     |
    caplog.set_level("INFO")
    tracker = tracked.start()
    tracked.learn(1)
    tracker.turn()
    tracked.server.error = UnavailableError("MLflow does not answer")
    tracked.learn(2, 3)
    for _ in range(3):
        tracker.turn()
    tracked.learn(4)
    tracker.turn()
    assert (tracked.count("waiting_records"), tracked.count("failures_total")) == (6.0, 4.0)
    tracked.server.error = None
    while tracked.count("waiting_records"):
        tracker.turn()
    assert tracked.losses() == [(n, 1.0 / n) for n in (1, 2, 3, 4)]
    assert complaints(caplog) == ["MLflow does not answer"]
    assert any(each.getMessage() == "tracking_recovered" for each in caplog.records)


def test_next_tracker_continues_the_run_of_a_dead_one(tracked: Tracked) -> None:
    tracked.learn(1)
    tracked.start().turn()
    sent = [tracked.count("points_total")]
    tracked.learn(2)
    tracked.start().turn()
    sent.append(tracked.count("points_total"))
    assert tracked.losses() == [(1, 1.0), (2, 0.5)]
    # The evaluation of version 1 was not sent again.
    assert sent == [1.0, 2.0]


def test_points_whose_answer_was_lost_are_stored_once(tracked: Tracked) -> None:
    tracked.learn(1, 2)
    tracked.save(2)
    tracker = tracked.start()
    tracked.server.loses_answers = True
    # Each call takes effect, and the next turn repeats it.
    for _ in range(8):
        tracker.turn()
    tracked.server.loses_answers = False
    tracked.start().turn()
    assert tracked.losses() == [(1, 1.0), (2, 0.5)]
    assert tracked.versions() == {"1": "2"}
    assert tracked.server.aliases == {(NAME, "newest"): "1", (NAME, "best"): "1"}


def test_two_trackers_of_a_job_share_one_run_without_duplicate_points(tracked: Tracked) -> None:
    both = [tracked.start(), tracked.start()]
    for version in (1, 2, 3):
        tracked.learn(version)
        for tracker in both:
            tracker.turn()
    assert tracked.losses() == [(n, 1.0 / n) for n in (1, 2, 3)]


def test_resubmitted_job_has_its_own_run(tracked: Tracked) -> None:
    tracker = tracked.start()
    tracker.turn()
    assert tracked.record is not None
    tracked.record = replace(tracked.record, submitted_s=tracked.record.submitted_s + 1)
    assert tracker.turn() is None
    tracked.start().turn()
    assert [run.status for run in tracked.server.runs.values()] == ["KILLED", "RUNNING"]


def test_new_tracker_sends_no_requests_while_it_reads_a_long_topic(
    tracked: Tracked,
) -> None:
    for version in range(1, 1501):
        tracked.world.update(version)
    tracker = tracked.start()
    while tracked.count("waiting_records") != 0:
        tracker.turn()
    calls = tracked.server.calls
    again = tracked.start()
    again.turn()
    again.turn()
    # The new tracker requests only its run.
    assert tracked.server.calls == calls + 1


def test_rejected_request_is_reported_once_and_retried(
    tracked: Tracked, caplog: pytest.LogCaptureFixture
) -> None:
    tracked.server.experiments.clear()
    tracked.learn(1)
    tracker = tracked.start()
    first, second = tracker.turn(), tracker.turn()
    assert first is not None
    assert second is not None
    assert complaints(caplog) == ['there is no experiment "Default"']
    tracked.server.experiments.add("Default")
    tracker.turn()
    assert tracked.losses() == [(1, 1.0)]


def test_missing_server_setting_is_named_in_log_and_job_state(
    tracked: Tracked, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = tracked.start(Settings(blobs=tracked.url))
    for _ in range(2):
        assert tracker.turn() is not None
    why = "DOLL_MLFLOW: is not set for this evaluator, but the job has `tracking`; set it to"
    [said] = complaints(caplog)
    assert said.startswith(why)
    assert tracked.world.board.unable() == {"evaluator e1": said}


def test_deleted_run_is_created_again_with_all_its_points(tracked: Tracked) -> None:
    tracker = tracked.start()
    tracked.learn(1, 2)
    tracker.turn()
    tracked.server.runs.clear()
    tracked.learn(3)
    for _ in range(3):
        tracker.turn()
    assert tracked.losses() == [(n, 1.0 / n) for n in (1, 2, 3)]


@pytest.mark.parametrize(("finished", "status"), [(True, "FINISHED"), (False, "KILLED")])
def test_run_ends_with_its_job_and_continues_if_the_job_is_resumed(
    tracked: Tracked, status: str, *, finished: bool
) -> None:
    tracked.learn(1, 2, 3)
    tracker = tracked.start()
    tracker.turn()
    running = tracked.record
    assert running is not None
    tracked.record = replace(running, wanted="stopped", finished=finished)
    # A late evaluator reports the last version.
    tracked.evaluate(3)
    assert tracker.turn() is None
    [run] = tracked.server.runs.values()
    assert run.status == status
    train = [each.step for each in run.metrics if each.name == "train/loss"]
    # All updates are there, including those of the last half window.
    assert train == [2, 3]
    tracked.record = running
    tracked.start().turn()
    assert run.status == "RUNNING"


def test_run_continues_while_the_leader_of_a_stopped_job_still_writes(tracked: Tracked) -> None:
    assert tracked.record is not None
    tracked.record = replace(tracked.record, wanted="stopped")
    tracked.world.board.hold_lease("c1", 60.0)
    assert tracked.start().turn() is not None


# --- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_become_versions_with_aliases_and_tags(tracked: Tracked) -> None:
    tracker = tracked.start()
    for version, loss in ((1, 0.25), (2, 0.5), (3, 0.75)):
        tracked.learn(version)
        tracked.save(version, loss)
        tracker.turn()
    assert tracked.versions() == {"1": "1", "2": "2", "3": "3"}
    assert tracked.server.aliases == {(NAME, "newest"): "3", (NAME, "best"): "1"}
    last = tracked.server.models[NAME]["3"]
    epoch = tracked.world.epoch
    folder = f"{NAME}/checkpoints/{epoch:020}-{3:012}/"
    assert last.source == f"s3://bucket/models/{folder}"
    assert f"{folder}trainer.safetensors" in tracked.blobs.names("")
    assert last.run in tracked.server.runs
    assert last.tags["doll.checkpoint"] == f"{epoch}-3"
    assert last.tags["doll.epoch"] == str(epoch)
    assert last.tags["doll.offsets"] == '{"left":{"0":24,"1":4}}'
    assert (last.tags["doll.job"], last.tags["doll.incarnation"]) == (NAME, "1")


def test_registered_version_gets_its_test_figures_even_if_they_come_later(
    tracked: Tracked,
) -> None:
    def figures() -> dict[str, object]:
        kept = tracked.server.models[NAME]
        return {n: json.loads(each.tags["doll.metrics"])["test"] for n, each in kept.items()}

    tracker = tracked.start()
    tracked.learn(1)
    tracked.save(1)
    tracked.world.update(2)
    tracked.save(2)
    tracker.turn()
    assert figures() == {"1": {"loss": 1.0}, "2": {}}
    calls = tracked.server.calls
    tracker.turn()
    idle = tracked.server.calls - calls
    tracked.evaluate(2)
    tracker.turn()
    assert figures() == {"1": {"loss": 1.0}, "2": {"loss": 0.5}}
    calls = tracked.server.calls
    tracker.turn()
    # Nothing is left to do.
    assert tracked.server.calls - calls == idle

    tracked.start().turn()
    assert figures() == {"1": {"loss": 1.0}, "2": {"loss": 0.5}}


def test_version_of_a_deleted_checkpoint_is_tagged_as_not_kept(tracked: Tracked) -> None:
    tracker = tracked.start()
    for version in (1, 2, 3, 4):
        tracked.learn(version)
        tracked.save(version, loss=1.0 / version)
        tracker.turn()
    kept = {n: each.tags["doll.kept"] for n, each in tracked.server.models[NAME].items()}
    assert kept == {"1": "false", "2": "false", "3": "true", "4": "true"}


def test_checkpoints_are_registered_once_across_trackers(tracked: Tracked) -> None:
    tracked.learn(1, 2)
    tracked.save(1)
    tracked.save(2)
    for _ in range(3):
        tracked.start().turn()
    assert tracked.versions() == {"1": "1", "2": "2"}


def test_reverted_checkpoint_becomes_no_version(tracked: Tracked) -> None:
    # The first leader stores checkpoints 1 and 2. Its successor begins with 1, and takes 2 back.
    tracked.learn(1, 2)
    tracked.save(1)
    tracked.save(2)
    first = tracked.world.epoch
    tracked.world.epoch = tracked.world.write(Lead(first, ModelId(first, 1), "c2", 5))
    tracked.start().turn()
    assert tracked.versions() == {"1": "1"}
    assert tracked.server.aliases[NAME, "newest"] == "1"


def test_checkpoint_ahead_of_the_topic_read_so_far_is_not_registered(tracked: Tracked) -> None:
    tracked.learn(1)
    tracked.save(1)
    epoch = tracked.world.epoch
    ahead = Snapshot(epoch, ModelId(epoch, 2), 1000, 0, {}, losses=(0.5,))
    tracked.store.save(ModelId(epoch, 2), to_parts(SnapshotFile(ahead, b"w")), 100.0)
    tracked.start().turn()
    assert tracked.versions() == {}


def test_checkpoint_in_a_local_folder_has_a_doll_url_as_its_source(tracked: Tracked) -> None:
    tracked.url = "file:///var/doll"
    tracked.learn(1)
    tracked.save(1)
    tracked.start().turn()
    source = tracked.server.models[NAME]["1"].source
    assert source == f"doll://{NAME}/{tracked.world.epoch}-1"


def test_curves_are_logged_without_object_storage(
    tracked: Tracked, caplog: pytest.LogCaptureFixture
) -> None:
    tracked.learn(1)
    tracked.start(Settings(mlflow=URL)).turn()
    assert tracked.losses() == [(1, 1.0)]
    assert "set DOLL_BLOBS" in complaints(caplog)[0]


def test_tracker_takes_only_jobs_with_tracking(tracked: Tracked) -> None:
    assert tracked.record is not None
    plain = replace(tracked.record, spec=parse_job(JOB))
    stopped = replace(tracked.record, wanted="stopped")
    asked = [
        (None, tracked.record, True),
        (NAME, tracked.record, False),
        ("other", tracked.record, True),
        (None, plain, True),
        (None, stopped, True),
        (None, stopped, False),
    ]
    assert [tracks(*each) for each in asked] == [True, True, False, False, True, False]


def test_tracker_of_a_deleted_job_raises(tracked: Tracked) -> None:
    tracked.record = None
    with pytest.raises(NotFoundError):
        tracked.start()
