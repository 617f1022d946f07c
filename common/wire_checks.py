"""What a message must say to make sense, beyond what its types can express.

Each check names the field, what was found and what was expected; `common.wire` adds the message.
"""

from __future__ import annotations

import math
import reprlib
from typing import TYPE_CHECKING, NoReturn

from common.core.messages import (
    MOST_TRACEBACK,
    AuditRecord,
    Batch,
    BatchReady,
    ControlRecord,
    Drifted,
    Evaluated,
    Failed,
    Farewell,
    Gradient,
    Lead,
    ModelId,
    Opened,
    Quarantined,
    Replayed,
    Reply,
    Requeued,
    SpanExpired,
    Standing,
    UpdateApplied,
    UpdateTrigger,
)
from common.core.spans import Address, Partition, address_of
from common.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from common.core.spread import JobDemand, WorkerPlacement

_LONGEST_S = 1e9  # decades; a sum of such durations is finite
_FASTEST_PER_S = 1e12  # records; products with it are finite
_NAME = 64  # characters of a name that we make: 16
_EPOCHS = 2**31  # Kafka's leader epochs are signed 32-bit
_POSITIONS = 2**63  # Kafka's offsets are signed 64-bit, and msgpack ends there too


def _need(holds: bool, field: str, found: object, expected: str) -> None:  # noqa: FBT001 -- a condition
    if not holds:
        raise WireError(f"{field} is {reprlib.repr(found)}, expected {expected}")


def _check_count(field: str, value: int, least: int = 0) -> None:
    _need(least <= value < _POSITIONS, field, value, f"a whole number from {least} to 2^63 - 1")


def _check_epoch(field: str, value: int) -> None:
    _need(-1 <= value < _EPOCHS, field, value, "a leader epoch from 0 to 2^31 - 1, or -1")


def _check_finite(field: str, value: float) -> None:
    _need(math.isfinite(value), field, value, "a finite number")


def _check_seconds(field: str, value: float) -> None:
    _need(0 <= value <= _LONGEST_S, field, value, f"a duration, at most {_LONGEST_S:g} s")


def _check_metrics(field: str, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        _check_finite(f"{field}[{name!r}]", value)


def _check_worker(worker: str) -> None:
    _need(bool(worker), "worker", worker, "a name")


def check_model(field: str, model: ModelId) -> None:
    """Refuse a name that no model can have."""
    _check_count(f"{field}.epoch", model.epoch, -1)
    _check_count(f"{field}.version", model.version)
    _need(model.epoch >= 0 or model.version == 0, field, model, "version 0 where nobody led yet")


def _check_address(address: Address) -> None:
    """Look at speed whether all is well: an update is looked at some 160 times on its way."""
    last, well = ("", 0), bool(address)
    for topic, partition, start, end, generation, before, known, epoch in address:
        place = (topic, partition)
        inside = 0 <= partition < _POSITIONS and 0 <= start < end < _POSITIONS
        inside = inside and 0 <= generation < _POSITIONS and -1 <= known <= end
        inside = inside and -1 <= before < _EPOCHS and -1 <= epoch < _EPOCHS
        well = well and inside and last < place and bool(topic)
        last = place
    if not well:
        _refuse_address(address)


def _refuse_address(address: Address) -> NoReturn:
    """Say what is wrong with an address."""
    for span in address:
        _need(bool(span.topic), "address.topic", span, "a span of a named topic")
        _check_count("address.partition", span.partition)
        _check_count("address.end", span.end)
        _check_count("address.generation", span.generation)
        _need(-1 <= span.known <= span.end, "address.known", span, "at most its end, or -1")
        _check_epoch("address.before", span.before)
        _check_epoch("address.epoch", span.epoch)
    try:
        address_of(address)
    except ValueError as error:
        raise WireError(f"address is {reprlib.repr(address)}: {error}") from error
    raise WireError(
        f"address is {reprlib.repr(address)}, expected spans sorted by topic and partition"
    )


def _check_batch(batch: BatchReady | Batch) -> None:
    _check_worker(batch.worker)
    _check_address(batch.address)
    left_out = _check_skipped(batch) if batch.skipped else 0
    room = sum(span.end - span.start for span in batch.address) - left_out
    _need(0 <= batch.samples <= room, "samples", batch.samples, f"0 to {room}, what its spans hold")


def _check_skipped(batch: BatchReady | Batch) -> int:
    """Look at the bad records of a batch; returns how many they are."""
    spans = {span.place: span for span in batch.address}
    seen = set[tuple[Partition, int]]()
    records = 0
    for skipped in batch.skipped:
        place = Partition(skipped.topic, skipped.partition)
        span = spans.get(place)
        forward = all(gap > 0 for gap in skipped.gaps)
        _need(forward, "skipped", skipped, "gaps of at least 1 between its offsets")
        last = skipped.offset + sum(skipped.gaps)
        inside = span is not None and span.start <= skipped.offset <= last < span.end
        _need(inside, "skipped", skipped, "offsets inside the batch's own spans")
        records += skipped.records
        seen.update((place, offset) for offset in skipped.offsets)
        _need(len(seen) == records, "skipped", skipped, "each offset once")
    return records


def check_control(record: ControlRecord) -> None:
    """Refuse a claim whose address, samples or skipped records cannot be, or such an opening."""
    match record:
        case BatchReady():
            _check_batch(record)
            _check_finite("first_arrival_s", record.first_arrival_s)
            _check_finite("last_arrival_s", record.last_arrival_s)
        case SpanExpired():
            _check_worker(record.worker)
            _check_address(record.address)
        case Opened():
            _check_opened(record)


def _check_opened(record: Opened, least: int = 1) -> None:
    _need(bool(record.partition.topic), "partition.topic", record.partition, "of a named topic")
    _check_count("partition.index", record.partition.index)
    if record.after is not None:
        _check_count("after", record.after)
    _check_count("generation", record.generation, least)
    _check_count("start", record.start)
    _check_epoch("epoch", record.epoch)


def _check_offsets(offsets: Iterable[int]) -> None:
    listed = tuple(offsets)
    for offset in listed:
        _check_count("batches.offset", offset)
    _need(bool(listed), "batches", listed, "at least one batch")
    _need(len(set(listed)) == len(listed), "batches", listed, "each batch once")


def _check_batches(batches: tuple[Batch, ...]) -> None:
    _check_offsets(batch.offset for batch in batches)
    for batch in batches:
        _check_batch(batch)


def check_audit(record: AuditRecord) -> None:
    """Refuse a decision that nobody can have made, and an evaluation of nothing."""
    match record:
        case Lead():
            _check_count("after", record.after, -1)
            check_model("base", record.base)
            _need(bool(record.candidate), "candidate", record.candidate, "a unique name")
            _check_count("epoch", record.epoch, -1)
            _check_count("after_loss", record.after_loss)
            later = record.epoch < 0 or record.epoch > record.after
            _need(later, "epoch", record.epoch, f"above {record.after}, the one before")
        case UpdateApplied():
            _check_count("epoch", record.epoch)
            _check_count("version", record.version, 1)
            _check_count("number", record.number)
            _check_batches(record.batches)
            _check_count("samples", record.samples)
            _check_finite("loss", record.loss)
            _check_metrics("metrics", record.metrics)
            _check_count("revision", record.revision)
            _check_seconds("gradient_s", record.gradient_s)
            for stream, records in record.skipped.items():
                _check_count(f"skipped[{stream!r}]", records)
        case Quarantined():
            _check_count("epoch", record.epoch)
            _check_count("number", record.number)
            _check_batches((record.batch,))
        case Requeued() | Replayed():
            _check_batches((record.batch,))
            _need(bool(record.by), "by", record.by, "who asked for it")
            _check_finite("at_s", record.at_s)
        case Evaluated():
            check_model("model", record.model)
            _check_finite("at_s", record.at_s)
            _check_count("records", record.records)
            _check_metrics("test", record.test)
            for stream, metrics in record.prequential.items():
                _check_metrics(f"prequential[{stream!r}]", metrics)
        case Drifted():
            check_model("model", record.model)
            _need(bool(record.stream), "stream", record.stream, "a name")
            for field in ("at_s", "before", "after"):
                _check_finite(field, getattr(record, field))


def check_standing(standing: Standing) -> None:
    """Refuse positions that no leader can have reached."""
    for field in ("epoch", "cpos", "horizon", "waiting", "live"):
        _check_count(field, getattr(standing, field))
    _need(len(standing.triggers) <= _NAME, "triggers", standing.triggers, f"<= {_NAME} characters")
    _need(standing.horizon <= standing.cpos, "horizon", standing.horizon, f"<= {standing.cpos}")
    for field in ("claimed", "settled"):
        for partition, position in getattr(standing, field).items():
            if not 0 <= position < _POSITIONS:
                _check_count(f"{field}[{partition}]", position)
    for partition, openings in standing.opened.items():
        for opened in openings:
            _check_opened(opened, least=0)  # 0: as the job was submitted
            _need(opened.partition == partition, f"opened[{partition}]", opened, "its own openings")
    for partition, position in standing.known.items():
        _check_count(f"known[{partition}].offset", position.offset)
        _check_epoch(f"known[{partition}].epoch", position.epoch)


def check_trigger(trigger: UpdateTrigger) -> None:
    """Refuse orders that nobody could carry out."""
    _check_count("id.epoch", trigger.id.epoch)
    _check_count("id.number", trigger.id.number, 1)
    check_model("model", trigger.model)
    for order in trigger.orders:
        _check_worker(order.worker)
        _check_batches(order.batches)
    if trigger.weights is not None:
        _need(len(trigger.weights) % 4 == 0, "weights", len(trigger.weights), "4 bytes per number")


def check_reply(reply: Reply) -> None:
    """Refuse a reply that is about nothing or is not finite."""
    _check_worker(reply.worker)
    check_model("model", reply.model)
    if isinstance(reply, Farewell):
        for offset in reply.finishing:
            _check_count("finishing", offset)
        return
    _check_offsets(reply.batches)
    if isinstance(reply, Gradient):
        _check_count("samples", reply.samples)
        _check_finite("loss_sum", reply.loss_sum)
        _check_metrics("metric_sums", reply.metric_sums)
        _check_seconds("seconds", reply.seconds)
    if isinstance(reply, Failed):
        length = len(reply.traceback)
        _need(length <= MOST_TRACEBACK, "traceback", length, f"at most {MOST_TRACEBACK} characters")


def check_demand(demand: JobDemand) -> None:
    """Refuse a need that no job can have: it would take workers from all others."""
    _need(bool(demand.job), "job", demand.job, "a name")
    for field in ("number", "backlog", "target"):
        _check_count(field, getattr(demand, field))
    _check_count("most_workers", demand.most_workers, 1)
    for field in ("arrivals_per_s", "worker_records_per_s"):
        value = getattr(demand, field)
        _need(0 <= value <= _FASTEST_PER_S, field, value, f"at most {_FASTEST_PER_S:g} a second")
    _check_seconds("unserved_s", demand.unserved_s)
    _need(0 < demand.weight <= _FASTEST_PER_S, "weight", demand.weight, "a positive number")


def check_placement(placement: WorkerPlacement) -> None:
    """Refuse a placement of nobody."""
    _check_worker(placement.worker)
    _check_count("number", placement.number)
    _check_seconds("stay_s", placement.stay_s)
