"""Registers each of a job's checkpoints once as a version of a registered model, with tags.

    checkpoint   12-200  12-400  12-600            keep: 2, the best is 12-400
    version      1       2       3                 doll.kept of version 1 becomes false
    alias                best    newest

A version points to the checkpoint in storage; no weights are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from common.api.model import about_model
from common.core.messages import ModelId
from common.errors import CorruptError
from common.jobs.models import KeptModel
from common.storage.snapshot_file import FoundSnapshot, from_checkpoint
from common.storage.store import CheckpointStore, format_model_id

if TYPE_CHECKING:
    from common.jobs.store import JobRecord
    from common.storage.port import Blobs
    from common.tracking.port import Tracking
    from services.evaluator.tracked_metrics import TrackedMetrics

CHECKPOINT, KEPT, METRICS = "doll.checkpoint", "doll.kept", "doll.metrics"


class RegisteredCheckpoints:
    """Keeps the versions of a registered model in step with the checkpoints of a job.

    Args:
        tracking: Server where the model is registered.
        model: Name of the registered model.
        identity: Tags of the job's own versions; others may register versions there, too.
        blobs: Storage of the checkpoints.
        url: URL of the storage, from DOLL_BLOBS.
    """

    def __init__(
        self,
        tracking: Tracking,
        model: str,
        identity: Mapping[str, str],
        blobs: Blobs,
        url: str,
    ) -> None:
        self._tracking = tracking
        self._model = model
        self._identity = dict(identity)
        self._blobs = blobs
        self._url = url.rstrip("/")
        # Opened checkpoints; None if one cannot be read.
        self._opened: Mapping[ModelId, FoundSnapshot | None] = {}
        self._aliases = dict[str, str]()
        # Newest checkpoint at the last complete `look`.
        self._seen: ModelId | None = None
        # Versions that were registered without results on the test set.
        self._untested = frozenset[ModelId]()

    def look(self, record: JobRecord, run: str, tracked: TrackedMetrics, *, last: bool) -> None:
        """Register new checkpoints, and add test results that arrived later.

        Args:
            record: The job.
            run: The job's run in the tracker.
            tracked: The job's history, and results on the test set.
            last: True to look at all checkpoints even if none is new.

        Raises:
            UnavailableError: If storage or the tracker is unavailable.
            UserError: If the tracker refuses the request.
            FutureFormatError: If a newer program wrote a checkpoint.
        """
        history, store = tracked.history, CheckpointStore(self._blobs, record.id)
        hint = store.latest()
        tested = any(tracked.test_of(made) for made in self._untested)
        if hint is None or (hint == self._seen and not (last or tested)):
            return
        names = store.finished()
        found = {name: self._open(store, name) for name in names}
        self._opened = found
        read = {name: each for name, each in found.items() if each is not None}
        # It is not known yet if a checkpoint newer than the records read so far is in the history.
        known = all(each.snapshot.updates_position <= history.position for each in read.values())
        counting = {name: each for name, each in read.items() if history.holds(each.snapshot.made)}
        if not known:
            return
        wanted = self._identity | {KEPT: "true"}
        there = {
            each.tags.get(CHECKPOINT, ""): each
            for each in self._tracking.versions(self._model, wanted)
        }
        versions = {name: each.number for name, each in there.items()}
        tests = {name: tracked.test_of(each.snapshot.made) for name, each in counting.items()}
        for name in sorted(counting):
            tags = self._tags(record, name, counting[name], tests[name])
            version = there.get(format_model_id(name))
            if version is None:
                lies = self._source(store, record.id, name)
                versions[format_model_id(name)] = self._tracking.register(
                    self._model, lies, run, tags
                )
            elif tests[name] and version.tags.get(METRICS) != tags[METRICS]:
                self._tracking.set_version_tag(self._model, version.number, METRICS, tags[METRICS])
        self._untested = frozenset(
            each.snapshot.made for name, each in counting.items() if not tests[name]
        )
        self._set_aliases(counting, versions)
        for gone in versions.keys() - set(map(format_model_id, names)):
            self._tracking.set_version_tag(self._model, versions[gone], KEPT, "false")
        self._seen = hint

    def _open(self, store: CheckpointStore, name: ModelId) -> FoundSnapshot | None:
        if name in self._opened:
            return self._opened[name]
        try:
            return from_checkpoint(store.open(name))
        # The checkpoint is torn, or is being deleted at this moment.
        except CorruptError:
            return None

    def _tags(
        self, record: JobRecord, name: ModelId, found: FoundSnapshot, test: dict[str, float]
    ) -> dict[str, str]:
        """Return the metadata of the model's file, and tags that identify the checkpoint."""
        about = about_model(record, KeptModel(found.title, found.snapshot, test))
        own = self._identity | {CHECKPOINT: format_model_id(name), KEPT: "true"}
        return {f"doll.{key}": value for key, value in about.items()} | own

    def _source(self, store: CheckpointStore, job: str, name: ModelId) -> str:
        """Return a checkpoint's URL, or its name if storage is a path, which MLflow refuses."""
        if self._url.startswith("file:"):
            return f"doll://{job}/{format_model_id(name)}"
        return f"{self._url}/{store.folder(name)}"

    def _set_aliases(
        self, counting: Mapping[ModelId, FoundSnapshot], versions: Mapping[str, str]
    ) -> None:
        """Set `newest` and `best` to the same versions as `doll model list`."""
        losses = {
            name: each.snapshot.loss
            for name, each in sorted(counting.items(), reverse=True)
            if each.snapshot.loss is not None
        }
        chosen = {
            "newest": max(counting, default=None),
            # The newest of equal ones is chosen.
            "best": min(losses, key=lambda name: losses[name], default=None),
        }
        for alias, name in chosen.items():
            if name is not None and self._aliases.get(alias) != versions[format_model_id(name)]:
                self._tracking.set_alias(self._model, alias, versions[format_model_id(name)])
                self._aliases[alias] = versions[format_model_id(name)]
