"""Metadata of a model file, and the entity tag that tells clients if they have the file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from common.api.answers import KeptVersion, KeptVersions

if TYPE_CHECKING:
    from common.jobs.models import KeptModel
    from common.jobs.store import JobRecord


def about_model(record: JobRecord, kept: KeptModel) -> dict[str, str]:
    """Return a file's metadata, as text or JSON: job, task, records, offsets and metrics."""
    spec, snapshot = record.spec, kept.snapshot
    offsets = dict[str, dict[int, int]]()
    for place, settled in sorted(snapshot.settled.items()):
        offsets.setdefault(place.topic, {})[place.index] = settled
    found = {
        "task": {"name": spec.task_name, "options": spec.task_options},
        "records": spec.records.model_dump(mode="json", exclude_defaults=True),
        # Offset of each partition below which every record is settled.
        "offsets": offsets,
        "metrics": {"samples": snapshot.samples, "loss": snapshot.loss, "test": kept.test},
    }
    made = snapshot.made
    return {
        "job": spec.name,
        # Tells the job from an earlier one of the same name.
        "submitted_s": str(record.submitted_s),
        "version": str(made.version),
        "epoch": str(made.epoch),
        **{name: msgspec.json.encode(value).decode() for name, value in found.items()},
    }


def tag_of(kept: KeptModel, about: dict[str, str]) -> str:
    """Return an entity tag, from epoch and version for the weights and a digest of the metadata."""
    epoch, version = kept.snapshot.made
    digest = hashlib.sha256(msgspec.json.encode(sorted(about.items()))).hexdigest()
    return f'"{epoch}-{version}-{digest[:16]}"'


def versions_answer(found: Iterable[KeptModel]) -> KeptVersions:
    """Return the kept versions as a response, in the given order."""
    versions = (
        KeptVersion(
            version=each.snapshot.made.version,
            epoch=each.snapshot.made.epoch,
            kept=each.title,
            samples=each.snapshot.samples,
            loss=each.snapshot.loss,
            test=each.test,
        )
        for each in found
    )
    return KeptVersions(versions=tuple(versions))
