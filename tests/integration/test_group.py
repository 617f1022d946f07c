"""Groups of workers that hold the weights, as processes: each record counts once despite kills."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from msgspec import UNSET

from common.config.synchronisation import SLICES as SLICES_OF_ALL
from common.core.messages import Lead, ModelId, TriggerId, UpdateTrigger
from common.data.codecs import codec_of
from common.embedded.process import Child
from common.jobs.build import trainer_of
from common.jobs.job_file import parse_job
from common.jobs.models import on_board
from common.jobs.operations import JobOperations
from common.kafka.names import updates_topic
from common.kafka.opening import open_log
from common.kafka.read import read_decoded
from common.learning.checkpoint import weights_in
from common.learning.gradients import GradientComputer
from common.learning.tasks import build_model, task_of
from common.redis.exchange import open_leader_boards
from common.wire import messages as wire
from load.harness.counting import CountingJob
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    from msgspec import UnsetType

    from common.config.settings import Settings
    from common.storage.snapshot_file import FoundSnapshot
    from tests.integration.cluster import Cluster
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

GROUP = """
            aggregation: {mode: group}
            checkpoint: {every_s: 0.5}
"""


SLICES = """
            aggregation: {mode: group, layout: slices, servers: 2, owners: %d, wire: bfloat16}
            checkpoint: {every_s: 0.5}
"""


@pytest.fixture
def settings(embedded: Settings) -> Settings:
    return embedded


def assert_each_record_counts_once(cluster: Cluster, records: int) -> None:
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), records, 0)


def started(
    make: Make,
    name: str,
    records: int,
    *names: str,
    options: str = "",
    group: str = GROUP,
    produced: int | None = None,
) -> Cluster:
    cluster = make(name, records, group + options, seconds=0.01)
    for each in names:
        cluster.start("coordinator" if each.startswith("c") else "worker", each)
    cluster.produce(produced or records)
    return cluster


def await_updates(cluster: Cluster, more: int) -> None:
    after = cluster.version() + more
    await_condition(lambda: cluster.version() >= after, f"{more} more updates")


def produce_and_await_updates(cluster: Cluster, records: int) -> None:
    """Produce records, and wait for three updates since the beginning of this call."""
    before = cluster.version()
    cluster.produce(records)
    await_condition(lambda: cluster.version() >= before + 3, "3 more updates")


def test_dying_member_loses_only_its_own_part_of_an_update(make: Make) -> None:
    # w0       cannot join, and says so
    # w1..w3   ██████████████████████████
    # w4       ████ killed    ████ another under its name
    # c1       ██████████ killed
    # c2       ░░░░░░░░░░███████████████
    judged = "            evaluation: {stream: group-test, every_updates: 5}\n"
    cluster = started(make, "group", 3000, "c1", "w1", "w2", "w3", "w4", options=judged)
    cluster.start("worker", "w0", advertise="192.0.2.1")  # another machine's address
    await_condition(lambda: cluster.version() >= 10, "ten updates")

    def offered() -> ModelId | None:
        found = cluster.board.offered_model()
        return None if found is None or found[0].version % 5 else found[0]

    await_condition(lambda: offered() is not None, "a version is offered to evaluators")
    cluster.start("coordinator", "c2")
    cluster.kill("w4")
    await_condition(lambda: "worker w0" in cluster.board.unable(), "w0 reports why it cannot join")
    before = cluster.version()
    await_condition(lambda: cluster.version() >= before + 10, "ten more without w4")
    cluster.start("worker", "w4")
    cluster.kill("c1")
    assert_each_record_counts_once(cluster, 3000)
    assert cluster.audit().taken_back == 0
    last = cluster.audit().updates[-1]

    def shared() -> list[FoundSnapshot]:
        found = on_board(cluster.board, print)
        made = ModelId(last.epoch, last.version)
        return [each for each in found if each.has_weights and each.snapshot.made == made]

    await_condition(lambda: bool(shared()), "a member has left the last weights on the board")
    weights, _ = weights_in(shared()[0].trainer())
    assert np.flatnonzero(weights != -1.0).tolist() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_group_on_gpus_survives_a_killed_member(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All members share a GPU. NCCL refuses that for processes on one machine, so each worker gets
    # another host id.
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    nccl = GROUP.replace("group}", "group, transport: nccl}")
    cluster = started(make, "nccl", 2000, "c1", group=nccl)
    for name in ("w1", "w2", "w3"):
        monkeypatch.setenv("NCCL_HOSTID", name)
        cluster.start("worker", name)
    await_updates(cluster, 10)
    cluster.kill("w3")
    await_updates(cluster, 10)
    cluster.start("worker", "w3")
    assert_each_record_counts_once(cluster, 2000)
    assert cluster.audit().taken_back == 0


def test_group_weights_match_those_of_a_single_process(settings: Settings, tmp_path: Path) -> None:
    spec = parse_job("""
name: tables
streams: [tables-a]
records: {codec: tensor, fields: {features: {dtype: float32, shape: [6]}, label: {dtype: int64}}}
task: {name: logistic-regression, classes: 3, normalise: true}
batch_size: 8
group_size: 4
optimizer: {name: adam, learning_rate: 0.05, clip_norm: 0.5}
stop: {updates: 12}
aggregation: {mode: group}
""")
    log, random = open_log(settings), np.random.default_rng(1)
    records: dict[str, npt.NDArray[Any]] = {
        "features": random.normal(size=(500, 6)).astype(np.float32),
        "label": random.integers(0, 3, 500),
    }
    job = CountingJob(spec, settings, log, partitions=2)
    with closing(log.writer()) as writer:
        for number, value in enumerate(codec_of(spec.records).encode(records)):
            writer.append("tables-a", value, partition=number % 2)
        assert writer.flush(30.0)
    environment = {**os.environ, **settings.model_copy(update={"threads": 1}).environ()}
    with ExitStack() as started:
        for name in ("c1", "w1", "w2"):
            service = "coordinator" if name == "c1" else "worker"
            command = [sys.executable, "-m", f"services.{service}", "--name", name]
            child = Child(command, tmp_path / f"{name}.log", environment, forks=True)
            started.callback(child.kill)
        await_condition(lambda: len(job.audit().updates) == 12, "twelve updates")
        found = job.weights(job.audit())
        # The coordinator writes the end of the job after the last update.
        with closing(JobOperations(log)) as job_store:
            await_condition(lambda: job_store.read()["tables"].wanted == "stopped", "it has ended")

    task = task_of(spec, ())
    computer = GradientComputer(task, build_model(task, spec.seed), torch.device("cpu"))
    trainer = trainer_of(spec, ())()
    for update in job.audit().updates:
        computer.load(trainer.weights())
        for batch in update.batches:
            rows = [
                n for s in batch.address for n in range(2 * s.start + s.partition, 2 * s.end, 2)
            ]
            each = computer.compute([{name: of[rows] for name, of in records.items()}])
            trainer.add(0, each.vector, each.samples)
        trainer.apply(0)
    alone = np.frombuffer(trainer.weights(), np.float32)
    assert np.abs(alone).max() > 0.1  # it has learned something
    np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)
    log.close()


def test_unstored_updates_are_learned_again_after_all_members_die(make: Make) -> None:
    # w1, w2   ████████ killed
    # w3               ████████ left
    # w4                         █████████
    local_steps = "            synchronisation: {mode: averaging, local_rate: 0.5}\n"
    cluster = started(make, "all-die", 2000, "c1", "w1", "w2", options=local_steps)
    await_condition(lambda: cluster.version() >= 20, "twenty updates")
    for name in ("w1", "w2"):
        cluster.kill(name)
    cluster.start("worker", "w3")
    await_condition(lambda: cluster.version() >= 30, "thirty updates")
    # The worker gets notice, and first stores its part.
    cluster.stop("w3")
    taken_back = cluster.audit().taken_back
    cluster.start("worker", "w4")
    assert_each_record_counts_once(cluster, 2000)
    assert cluster.audit().taken_back == taken_back


def switch(cluster: Cluster, **aggregation: str) -> None:
    with closing(open_log(cluster.settings)) as log, closing(JobOperations(log)) as job_store:
        job_store.patch(cluster.job, "test", changed={"aggregation": {**aggregation}})


def held_by(cluster: Cluster, slices: int | UnsetType) -> bool:
    """Return True if the workers of the newest leader hold the weights in this number of slices."""
    records = read_decoded(cluster.log, updates_topic(cluster.job), wire.decode_audit)
    return [lead.slices for _, lead in records if isinstance(lead, Lead)][-1] == slices


def test_switching_between_board_and_group_takes_no_update_back(make: Make) -> None:
    # held by   the coordinator │ members │ owners of slices │ members │ the coordinator
    cluster = started(make, "switched", 6000, "c1", "w1", "w2", "w3", group="", produced=1200)
    await_condition(lambda: cluster.version() >= 5, "five updates")
    for slices, block in (
        (0, {"mode": "group"}),
        (SLICES_OF_ALL, {"mode": "group", "layout": "slices"}),
        (0, {"mode": "group"}),
        (UNSET, {"mode": "board"}),
    ):
        switch(cluster, **block)
        await_condition(lambda: held_by(cluster, slices), f"a leader of {block}")  # noqa: B023
        produce_and_await_updates(cluster, 1200)
    assert_each_record_counts_once(cluster, 6000)
    assert cluster.audit().taken_back == 0


def test_leader_killed_during_switch_of_weight_holders_loses_no_record(make: Make) -> None:
    # c1   leads ██ switch requested ██ killed
    # c2   stands by                    ░░ leads, and completes the switch ██
    cluster = started(make, "switch-killed", 3600, "c1", "w1", "w2", group="", produced=1200)
    await_condition(lambda: cluster.version() >= 5, "five updates")
    for leader, block in (("c1", {"mode": "group"}), ("c2", {"mode": "board"})):
        other = "c2" if leader == "c1" else "c1"
        cluster.start("coordinator", other)
        switch(cluster, **block)
        cluster.kill(leader)
        slices: int | UnsetType = UNSET if block["mode"] == "board" else 0
        await_condition(lambda: held_by(cluster, slices), f"a leader of {block}")  # noqa: B023
        produce_and_await_updates(cluster, 1200)
    assert_each_record_counts_once(cluster, 3600)


def test_members_keep_their_weights_after_a_forged_trigger(make: Make) -> None:
    # The forged trigger says that the coordinator holds the weights, in an epoch without a leader.
    cluster = started(make, "forged", 2000, "c1", "w1", "w2")
    await_condition(lambda: cluster.version() >= 10, "ten updates")
    leader_status = cluster.leader_status()
    assert leader_status is not None
    forged = UpdateTrigger(TriggerId(2**60, 1), ModelId(2**60, 1), ())
    with closing(open_leader_boards(cluster.settings)) as boards:
        assert boards.board(cluster.job).post_trigger(forged, leader_status.triggers)
    assert_each_record_counts_once(cluster, 2000)
    assert cluster.audit().taken_back == 0


def test_dead_owner_of_replicated_slices_loses_no_update(make: Make) -> None:
    # Two workers own the slices, each of them all. A worker dies and is replaced, and then another.
    cluster = started(make, "slices", 3000, "c1", "w1", "w2", "w3", "w4", group=SLICES % 2)
    await_condition(lambda: cluster.version() >= 10, "ten updates")
    for name in ("w1", "w2"):
        cluster.kill(name)
        await_updates(cluster, 5)
        cluster.start("worker", name)
    assert_each_record_counts_once(cluster, 3000)
    assert cluster.audit().taken_back == 0


def test_updates_after_slice_backup_are_learned_again_if_owners_die(
    make: Make,
) -> None:
    # Two workers own the slices, and each slice has one owner. At least one of the two is among the
    # three that die, so a part of the optimizer's state is lost.
    cluster = started(make, "slices-die", 2500, "c1", "w1", "w2", "w3", "w4", group=SLICES % 1)
    await_condition(lambda: cluster.version() >= 30, "thirty updates, and a backup at twenty")
    for name in ("w1", "w2", "w3"):
        cluster.kill(name)
    cluster.start("worker", "w5")
    assert_each_record_counts_once(cluster, 2500)
