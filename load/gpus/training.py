"""Records per second of a job on one worker, relative to plain PyTorch or a bare consumer."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from common.core.audit import audit
from common.core.spans import Partition
from common.data.codecs import codec_of
from common.embedded.services import stop_all
from common.kafka.names import dead_letter_topic
from common.kafka.port import NewTopic
from common.kafka.stream import open_stream_log
from common.learning.errors import one_line
from common.redis.board import open_board
from load.gpus.live import JobFollower, LiveProducers
from load.gpus.models import GROUP, LORA, missing, model_of
from load.harness.stack import NotMeasuredError, await_running, check, servers
from load.throughput.reference import PlainLoops, SingleConsumer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from common.data.codecs import Codec
    from common.embedded.services import EmbeddedService
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from load.gpus.models import Model
    from load.harness.stack import Servers

_LOOP = Path(__file__).with_name("plain_loop.py")
# Partitions of each of the two topics of a job.
_PARTITIONS = 8
# Different records in a topic.
_VALUES = 1024
# Training before a block.
_WARM_S = 1.0
_LOOK_S = 0.02
# Longest time until a new job makes an update, which includes the build of its model.
_START_S = 90.0
_DRAIN_S = 60.0


class Measured(NamedTuple):
    """Results of one job. Rates are in records per second."""

    model: str
    precision: str
    pass_records: int
    ours: list[float]
    loop: list[float]
    consumer: float
    # Share of the time in which the producers had less than a batch ahead of the job.
    starved: float
    bar: float
    # Violations: records that were lost, used twice, or not used.
    flaws: list[str]

    @property
    def ratio(self) -> float:
        """Median ratio of a pair to its reference, the slower one of the loop and the consumer."""
        pairs = zip(self.ours, self.loop, strict=True)
        return median(ours / min(loop, self.consumer) for ours, loop in pairs)

    def as_data(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return self._asdict() | {"ratio": self.ratio}


def measure(
    given: argparse.Namespace, *, gpu: bool, report: Callable[[Measured], object]
) -> list[str]:
    """Measure all models, and report each job's result. Returns descriptions of failed checks."""
    trials: list[dict[str, object]] = [{"precision": "bfloat16"}, {"precision": "float32"}]
    if given.pass_records:
        trials = [trials[0] | {"pass_records": count} for count in given.pass_records]
    names, failed = list[str](), list[str]()
    for name in given.models:
        if lacks := missing(name):
            print(f"{name}: not measured, because this machine lacks {lacks}")
        else:
            names.append(name)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="doll-model-"))
        on = stack.enter_context(servers("embedded", tasks=(LORA,)))
        # One worker of one slot.
        on = stack.enter_context(closing(on.using("0" if gpu else "none")))
        services = on.start_all(1)
        stack.callback(stop_all, services)
        for name in names:
            try:
                model = model_of(name, Path(folder), small=not gpu)
                consumer = _consumer_rate(on, model, given.seconds)
                for number, trial in enumerate(trials):
                    topics = f"{name}-{number}-a", f"{name}-{number}-b"
                    spec = model.job(f"{name}-{number}", topics, **trial)
                    found = _measure(on, services, model, spec, consumer, given)
                    report(found)
                    failed += [f"{name}, {spec.precision}: {each}" for each in found.flaws]
            # The machine's own packages may raise anything, and other models can be measured.
            except Exception as error:  # noqa: BLE001
                failed.append(f"{name}: {one_line(error)}")
                check(services)
    return failed


def _consumer_rate(on: Servers, model: Model, seconds: float) -> float:
    """Return the rate of one consumer that only reads and decodes topics like the job's."""
    codec = codec_of(model.job("alone", ["alone"]).records)
    with ExitStack() as stack:
        topics = f"{model.name}-alone-a", f"{model.name}-alone-b"
        producers = stack.enter_context(closing(_producers(on, model, topics, codec)))
        log = stack.enter_context(closing(open_stream_log(on.settings, "load")))
        producers.resume()
        return SingleConsumer(log, topics, codec, producers.follow).run(seconds).records_per_s


def _producers(on: Servers, model: Model, topics: Sequence[str], codec: Codec) -> LiveProducers:
    """Create topics, and start producers for them."""
    on.log.create_topics([NewTopic(topic, _PARTITIONS) for topic in topics])
    places = [Partition(topic, index) for topic in topics for index in range(_PARTITIONS)]
    values = codec.encode(model.records(_VALUES, seed=0))
    # A quarter of the cores, because the broker, the worker and the coordinator need some.
    processes = max(len(os.sched_getaffinity(0)) // 4, 1)
    return LiveProducers(on.settings, places, values, GROUP * model.batch_size, processes)


def _measure(
    on: Servers,
    services: list[EmbeddedService],
    model: Model,
    spec: JobSpec,
    consumer: float,
    given: argparse.Namespace,
) -> Measured:
    """Start a job, and alternate its blocks with those of a plain loop."""
    with ExitStack() as stack:
        producers = _producers(on, model, spec.streams, codec_of(spec.records))
        stack.enter_context(closing(producers))
        job = _Job(on, services, on.submit(spec), producers)
        stack.enter_context(closing(job))
        stack.callback(on.stop_jobs, spec.name)
        words = spec.model_dump_json(exclude_unset=True), json.dumps(model.above)
        reference = stack.enter_context(closing(PlainLoops(_LOOP, words, 1)))
        job.start()
        ours, loop = list[float](), list[float]()
        for number in range(1 if given.pass_records else given.pairs):
            # Every other pair begins with the loop, so drift cancels.
            if number % 2:
                loop.append(reference.run(given.seconds).records_per_s)
            ours.append(job.run(given.seconds, model.batch_size))
            if not number % 2:
                loop.append(reference.run(given.seconds).records_per_s)
        return Measured(
            *(model.name, spec.precision, spec.records_per_pass, ours, loop, consumer),
            *(max(job.starved), model.bar, job.flaws()),
        )


class _Job:
    """A job on running services, seen from outside. Between blocks it has no records."""

    def __init__(
        self,
        on: Servers,
        services: list[EmbeddedService],
        record: JobRecord,
        producers: LiveProducers,
    ) -> None:
        self._on, self._services = on, services
        self._record = record
        self._producers = producers
        self._board = open_board(on.settings, record.id)
        self._follower = JobFollower(on.log, record, producers)
        self._follower.start()
        # Of each block.
        self.starved = list[float]()

    def start(self) -> None:
        """Make the first updates, which load libraries and reserve memory."""
        self._producers.resume()
        self._await(lambda: self._follower.samples() > 0, _START_S, "an update")
        time.sleep(_WARM_S)
        self._drain()

    def run(self, seconds: float, batch_size: int) -> float:
        """Return the records/s of a block of `seconds`, and drain the job."""
        before = self._follower.samples()
        self._producers.resume()
        self._await(lambda: self._follower.samples() > before, _DRAIN_S, "an update")
        time.sleep(_WARM_S)
        began, looks = time.monotonic(), list[bool]()
        while time.monotonic() < began + seconds:
            time.sleep(_LOOK_S)
            looks.append(self._producers.waiting() < batch_size)
        # A slow machine needs longer for an update than a short block takes.
        self._await(lambda: self._follower.applied[-1][0] > began, _DRAIN_S, "an update")
        rate = self._follower.rate(began)
        self.starved.append(sum(looks) / len(looks))
        self._drain()
        return rate

    def flaws(self) -> list[str]:
        """Return what is wrong, if anything: each record must be in exactly one update."""
        self._follower.stop()
        found = audit(
            self._record.first,
            self._follower.control,
            self._follower.updates,
            known=self._record.known,
        )
        counts = {
            "lost or unused": self._producers.hold() - found.trained,
            "quarantined batches": len(found.quarantined),
            "unsettled": found.unsettled,
            "skipped": found.skipped,
            "expired": found.expired_records,
            "dead letters": self._dead_letters(),
        }
        flaws = [f"{each.kind}: {each.where}" for each in found.flaws]
        return flaws + [f"{count:,} {what}" for what, count in counts.items() if count]

    def close(self) -> None:
        """Stop following."""
        self._follower.stop()
        self._board.close()

    def _dead_letters(self) -> int:
        log, count = self._on.log, 0
        for topic in {dead_letter_topic(each) for each in self._record.spec.streams}:
            if topic in log.topics():
                count += sum(log.bounds(place).end for place in log.partitions(topic))
        return count

    def _drain(self) -> None:
        produced = self._producers.hold()

        def drained() -> bool:
            # All claims have been followed, too.
            return self._follower.samples() == produced and not self._producers.waiting()

        self._await(drained, _DRAIN_S, f"{produced:,} records are used")

    def _await(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        try:
            await_running(self._services, condition, timeout_s, what)
        except NotMeasuredError as error:
            reasons = "; ".join(self._board.unable().values()) or "no process reports a fault"
            used = self._follower.samples()
            raise NotMeasuredError(f"{error} ({used:,} are used; {reasons})") from error
