"""The counting job: numbered records, and the proof that each was used exactly once."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from common.core.audit import Audit, audit
from common.core.messages import GENESIS, ModelId, SynchronisationMode, Vector
from common.core.spans import Partition
from common.errors import UnavailableError
from common.jobs.operations import JobOperations
from common.jobs.spec import JobSpec, job_from_json
from common.kafka.names import control_topic, updates_topic
from common.kafka.port import Log, NewTopic
from common.kafka.read import read_decoded
from common.learning.checkpoint import unpack
from common.redis.board import open_board
from common.storage.port import open_blobs
from common.storage.snapshot_file import from_bytes, from_store, in_hand
from common.storage.store import CheckpointStore
from common.testing import costless
from common.testing.counting import ENTRYPOINT
from common.wire import messages as wire
from doll.yaml_file import as_json
from load.harness.stack import await_until

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.jobs.edit import Value

Aggregation: TypeAlias = Literal["board", "replicas", "slices"]
BATCH_SIZE = 8  # b of `counting_job`
_SNAPSHOT_S = 120.0
_GROW_S = 30.0


def spec_of(fields: dict[str, Any], **more: object) -> JobSpec:
    """Return a job on tensor records with these fields. The rest is as in a job file.

    Raises:
        UserError: If the job is invalid.
    """
    return job_from_json(as_json({"records": {"codec": "tensor", "fields": fields}, **more}))


def costless_spec(name: str, topic: str, weights: int = 100, **more: object) -> JobSpec:
    """Return a job whose gradients cost nothing. The rest is as in a job file."""
    own = {
        "task": {"entrypoint": costless.ENTRYPOINT, "weights": weights},
        "optimizer": {"name": "sgd", "learning_rate": 1e-6},
    }
    return spec_of({"x": {"dtype": "float32"}}, name=name, streams=[topic], **own | more)


def counting_spec(records: int, gradient_s: float, **more: object) -> JobSpec:
    """Return a job of the counting model. The rest is as in a job file.

    Args:
        records: Number of ids, from 0. The model has a weight for each.
        gradient_s: Duration of a batch's gradient, a timed wait.
        more: Name, streams and other fields that differ from the defaults.
    """
    return spec_of(
        {"id": {"dtype": "int64"}},
        task={"entrypoint": ENTRYPOINT, "records": records, "seconds": gradient_s},
        reduction="sum",
        optimizer={"name": "sgd", "learning_rate": 1.0},
        **more,
    )


def counting_job(
    name: str,
    records: int,
    gradient_s: float,
    mode: SynchronisationMode = "synchronous",
    aggregation: Aggregation = "board",
    **options: Value,
) -> JobSpec:
    """Return a counting job that drains by itself and has short timeouts.

    Its streams are `<name>-a` and `<name>-b`; see `counting_spec`. The options belong to its
    layout.
    """
    return counting_spec(
        records,
        gradient_s,
        name=name,
        streams=[f"{name}-a", f"{name}-b"],
        batch_size=BATCH_SIZE,
        group_size=4,
        batch_linger_s=0.3,
        group_linger_s=0.5,
        hot_snapshot={"every_s": 0.3},
        checkpoint={"every_updates": 25} | ({} if aggregation == "board" else {"every_s": 5}),
        aggregation=aggregated(aggregation, **options),
        # No batch is poison here, however many workers die while they hold it.
        max_failures=1000,
        synchronisation=synchronised(mode),
    )


def aggregated(aggregation: Aggregation, **options: Value) -> Value:
    """Return the `aggregation` block of a layout. Slices have two owners by default."""
    if aggregation == "board":
        return None
    return {"mode": "group", "layout": aggregation, **options}


def synchronised(mode: SynchronisationMode) -> Value:
    """Return the `synchronisation` block of a mode, with local steps if the mode allows them."""
    if mode == "synchronous":
        return None
    return {"mode": mode} | ({} if mode == "stale" else {"local_rate": 0.5})


class Unlearned(NamedTuple):
    """A weight that is wrong."""

    record: int
    # If -1 would be right, 0 means that the record was lost, -2 that it was used twice.
    weight: float


class CountingJob:
    """A job on a cluster, seen from outside. The constructor submits it.

    Args:
        spec: Result of `counting_job`.
        partitions: Number of partitions of each stream.
    """

    def __init__(self, spec: JobSpec, settings: Settings, log: Log, partitions: int) -> None:
        for stream in spec.streams:
            log.create_topics([NewTopic(stream, partitions)])
        with closing(JobOperations(log)) as job_store:
            self.record = job_store.submit(spec)
        self.name = spec.name
        # Partitions, including those that `grow` added.
        self.places = list(self.record.first)
        self._settings = settings
        self._log = log
        self.board = open_board(settings, self.record.id)

    def drained(self) -> bool:
        """True if everything produced is settled. False while a server is unavailable."""
        try:
            leader_status = self.board.get_leader_status()
            return (
                leader_status is not None
                and leader_status.waiting == 0
                and leader_status.claimed.keys() >= set(self.places)
                and all(at == self._log.bounds(p).end for p, at in leader_status.claimed.items())
                # An update counts only once its leader has read it back.
                and not self.audit().unsettled
            )
        except UnavailableError:
            return False

    def settled(self) -> bool:
        """True if the log alone proves that all is settled. False while Kafka is unavailable."""
        try:
            proof = self.audit()
            return not proof.unsettled and all(
                proof.settled.get(place) == self._log.bounds(place).end for place in self.places
            )
        except UnavailableError:
            return False

    def grow(self, stream: str) -> Partition:
        """Add a partition to a stream.

        Raises:
            KafkaException: If the broker refuses.
        """
        admin = AdminClient({"bootstrap.servers": self._settings.kafka, "log_level": 2})
        place = Partition(stream, sum(place.topic == stream for place in self.places))
        admin.create_partitions([NewPartitions(stream, place.index + 1)])[stream].result(_GROW_S)
        self.places.append(place)
        return place

    def is_led(self) -> bool:
        """True if a leader has published its status."""
        return self.board.get_leader_status() is not None

    def behind(self) -> str:
        """Describe what is not settled."""
        leader_status = self.board.get_leader_status()
        if leader_status is None:
            return "no coordinator leads the job"
        unclaimed = {
            str(partition): f"{leader_status.claimed.get(partition)} of {end}"
            for partition in self.places
            if leader_status.claimed.get(partition) != (end := self._log.bounds(partition).end)
        }
        live = leader_status.live
        return f"{leader_status.waiting} batches waiting, {live} workers; claimed: {unclaimed}"

    def audit(self) -> Audit:
        """Return the audit of the control topic and the updates topic."""
        control = read_decoded(self._log, control_topic(self.record.id), wire.decode_claim)
        updates = read_decoded(self._log, updates_topic(self.record.id), wire.decode_audit)
        return audit(self.record.first, control, updates, known=self.record.known)

    def weights(self, proof: Audit) -> Vector:
        """Return the weights after the last update, of shape (records,).

        Reads its hot snapshot, or its checkpoint if workers hold the weights.

        Raises:
            NotMeasuredError: If no snapshot of this update appears.
        """
        last = proof.updates[-1] if proof.updates else None
        model = ModelId(last.epoch, last.version) if last else GENESIS
        found = list[bytes]()

        def there() -> bool:
            if self.record.spec.grouped:
                store = CheckpointStore(open_blobs(self._settings), self.record.id)
                saved = list(from_store(store).readable.values())
            else:
                saved = [in_hand(from_bytes(data)) for data in self.board.snapshots()]
            found.extend(each.trainer() for each in saved if each.snapshot.made == model)
            return bool(found)

        await_until(there, _SNAPSHOT_S, f"a snapshot of {model}")
        return unpack(found[-1])[0]["weights"]

    def unlearned(self, proof: Audit, produced: int) -> list[Unlearned]:
        """Return the wrong weights: -1 is right for a produced record, 0 for any other.

        Raises:
            NotMeasuredError: If there is no snapshot of the last update.
        """
        weights = self.weights(proof)
        right = np.where(np.arange(len(weights)) < produced, -1.0, 0.0)
        wrong = np.flatnonzero(weights != right).tolist()
        return [Unlearned(record, float(weights[record])) for record in wrong]
