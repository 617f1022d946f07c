"""A small demo that Prometheus scrapes: all services on this machine, with every kind of data.

It has two streams of digits, with some records that do not decode; a coordinator and its standby;
two workers started by hand, and those that a provisioner rents; and an evaluator with a test set.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config.settings import Settings
from common.data.codecs import codec_of
from common.data.digits import load_digits
from common.embedded.process import free_port
from common.embedded.services import EmbeddedService, Kind, stop_all
from common.embedded.stack import EmbeddedStack
from common.jobs.operations import JobOperations
from common.jobs.spec import JobSpec, job_from_json
from common.kafka.opening import open_log
from common.kafka.port import Log, NewTopic
from doll.yaml_file import as_json, load_text
from tests.prometheus import Prometheus

ALERTS = Path(__file__).parents[1] / "deploy/prometheus/alerts.yml"

_JOB = """
name: digits
streams: [clinic-a, clinic-b]
records:
  codec: tensor
  fields: {image: {dtype: uint8, shape: [1, 8, 8]}, label: {dtype: int64}}
task: {name: image-classifier, classes: 10}
batch_size: 16
group_size: 4
optimizer: {name: adam, learning_rate: 4.0e-3}
stop: {updates: 4000, deadline_s: 1200}
checkpoint: {every_s: 5}
batch_linger_s: 1.0
group_linger_s: 1.0
evaluation: {every_updates: 20, stream: clinic-test, records: 300}
provisioning: {workers: 2, review_s: 2}
"""
_MARKET = """
fleet: process
on_demand: {usd_per_hour: 0.239, start_up_s: 4}
spot:
  - {name: spot, usd_per_hour: 0.08, availability: 0.8, cycle_s: 40, start_up_s: 4}
process: {availability: 0.8, cycle_s: 40}
"""
_PARTITIONS = 4
_TICK_S = 0.05
_GARBAGE_EVERY = 500  # records


class Demo(NamedTuple):
    """The running job, Prometheus and workers."""

    job: str
    prometheus: Prometheus
    workers: Sequence[EmbeddedService]


@contextmanager
def watched_demo(
    program: str, folder: Path, records_per_s: float, coordinators: int
) -> Iterator[Demo]:
    """Start a job with its services and Prometheus, and stop them at the end.

    Args:
        program: Path of Prometheus.
        folder: Folder for logs and data. It must be empty or not exist.
        records_per_s: Rate of both streams together.
        coordinators: Number of coordinators. One of them leads.

    Raises:
        UnavailableError: If a process does not start.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True)
    (folder / "market.yaml").write_text(_MARKET)
    with ExitStack() as parts:
        stack = parts.enter_context(EmbeddedStack(Settings(threads=1), blobs=folder / "blobs"))
        settings = stack.settings.model_copy(
            update={
                "market": str(folder / "market.yaml"),
                "fleet_directory": str(folder / "machines"),
                "owner_pid": os.getpid(),
                "api_port": free_port(),
            }
        )
        log = open_log(settings)
        spec = job_from_json(as_json(load_text(_JOB)))
        parts.enter_context(_fed(log, spec, records_per_s))
        JobOperations(log).submit(spec)
        wanted: dict[Kind, int] = {
            "coordinator": coordinators,
            "worker": 2,
            "provisioner": 1,
            "evaluator": 1,
            "admin": 1,
        }
        ports = {kind: [free_port() for _ in range(count)] for kind, count in wanted.items()}
        services = list[EmbeddedService]()
        parts.callback(stop_all, services)
        for kind, own in ports.items():
            for number, port in enumerate(own, 1):
                at = settings.model_copy(update={"metrics_port": port})
                services.append(EmbeddedService(kind, f"{kind}-{number}", at, logs))
        prometheus = parts.enter_context(Prometheus(program, folder / "prometheus", ports, ALERTS))
        workers = [service for service in services if service.name.startswith("worker")]
        yield Demo(spec.name, prometheus, workers)


@contextmanager
def _fed(log: Log, spec: JobSpec, records_per_s: float) -> Iterator[None]:
    """Write digits into the streams at a rate in the background. The test set is written first."""
    digits, codec = load_digits(), codec_of(spec.records)
    values = cycle(list(codec.encode(digits.train)))
    places = cycle([(stream, n) for stream in spec.streams for n in range(_PARTITIONS)])
    stopped = threading.Event()
    log.create_topics([NewTopic(stream, _PARTITIONS) for stream in spec.streams])
    with closing(log.writer()) as writer:
        if spec.evaluation is not None:
            log.create_topics([NewTopic(spec.evaluation.stream)])
            for value in codec.encode(digits.held_out):
                writer.append(spec.evaluation.stream, value, partition=0)

        def feed() -> None:
            written, due, random = 0, 0.0, np.random.default_rng(0)
            while not stopped.wait(_TICK_S):
                due += random.poisson(records_per_s * _TICK_S)
                while written < due:
                    (stream, partition), value = next(places), next(values)
                    writer.append(stream, value, partition=partition)
                    written += 1
                    if written % _GARBAGE_EVERY == 0:
                        writer.append(stream, b"no digit", partition=partition)

        thread = threading.Thread(target=feed, name="feeder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
