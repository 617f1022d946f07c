"""More records than the built-in Kafka retains are refused, unless the producer tracks the job."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.config.settings import Settings
from common.core.audit import audit
from common.embedded.services import EmbeddedService, environment_of, stop_all
from common.embedded.stack import EmbeddedStack
from common.jobs.store import JobStore
from common.kafka.names import control_topic, updates_topic
from common.kafka.opening import open_log
from common.kafka.read import read_decoded
from common.wire.messages import decode_audit, decode_claim
from services.cli import exits
from tests.integration.cluster import await_condition, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# 792 bytes each: 11 MB in total. Two partitions retain 10 MB.
RECORDS = 14_000
JOB = """
name: large
streams: [large]
records:
  codec: tensor
  fields: {image: {dtype: uint8, shape: [1, 28, 28]}, label: {dtype: int64}}
task: {name: image-classifier, classes: 10, network: cnn-small}
batch_size: 100
group_size: 2
optimizer: {name: adam, learning_rate: 1.0e-3}
batch_linger_s: 0.5
checkpoint: {every_updates: 5}
group_linger_s: 0.5
"""


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    logs = tmp_path / "logs"
    logs.mkdir()
    with EmbeddedStack(Settings(threads=1), blobs=tmp_path / "blobs") as stack:
        services = [
            EmbeddedService("coordinator", "coordinator-1", stack.settings, logs, forks=True),
            EmbeddedService("worker", "worker-1", stack.settings, logs, forks=True),
        ]
        try:
            with served(stack.settings, logs) as settings:
                yield settings
        finally:
            stop_all(services)


def doll(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 -- our own program
        [sys.executable, "-m", "services.cli", *arguments],
        env=environment_of(settings),
        capture_output=True,
        text=True,
        check=False,
    )


def test_produce_refuses_data_larger_than_the_broker_unless_it_tracks_a_job(
    settings: Settings, tmp_path: Path
) -> None:
    chance, data, job = np.random.default_rng(0), tmp_path / "large.npz", tmp_path / "large.yaml"
    images = chance.integers(0, 255, (RECORDS, 1, 28, 28), dtype=np.uint8)
    np.savez(data, image=images, label=chance.integers(0, 10, RECORDS))
    job.write_text(JOB)
    send = ("produce", str(data), "--topic", "large", "--create-partitions", "2")

    refused = doll(settings, *send)
    assert refused.returncode == exits.REFUSED
    assert "do not fit into the built-in Kafka" in refused.stderr
    log = open_log(settings)
    places = log.partitions("large")
    assert [log.bounds(place) for place in places] == [(0, 0), (0, 0)]

    submitted = doll(settings, "job", "submit", str(job))
    assert submitted.returncode == 0, submitted.stderr
    sent = doll(settings, *send, "--job", "large", "--max-lag", "4000")
    assert "sent 14,000 records to large" in sent.stderr

    with closing(JobStore(log)) as job_store:
        record = job_store.get("large")

    def trained() -> int:
        control = read_decoded(log, control_topic(record.id), decode_claim)
        updates = read_decoded(log, updates_topic(record.id), decode_audit)
        return audit(record.first, control, updates, known=record.known).trained

    await_condition(lambda: trained() == RECORDS, "all records are trained")
    found = json.loads(doll(settings, "audit", "large", "--json").stdout)
    assert found["trained"] == RECORDS
    assert (found["whole"], found["expired"], found["unsettled"]) == (True, [], 0)
    # Kafka drops the records that are trained.
    assert any(log.bounds(place).start > 0 for place in places)
