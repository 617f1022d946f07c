"""A job's checkpoints as versions of a registered model: each once, with what it is as its tags.

    checkpoint   12-200  12-400  12-600            keep: 2, the best is 12-400
    version      1       2       3                 doll.kept of version 1 becomes false
    alias                best    newest

A version points to where the checkpoint lies; no weights are copied.
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
    """Keeps the versions of one registered model in step with the checkpoints of one job.

    Args:
        tracking: Where the model is registered.
        model: Its name.
        identity: Tags of the job's own versions: others may register versions there, too.
        blobs: Where checkpoints are.
        url: Of that place, as DOLL_BLOBS says it.
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
        self._opened: Mapping[ModelId, FoundSnapshot | None] = {}  # None: it cannot be read
        self._aliases = dict[str, str]()
        self._seen: ModelId | None = None  # the hint to the newest when last all was well
        self._untested = frozenset[ModelId]()  # registered without figures of the test set

    def look(self, record: JobRecord, run: str, tracked: TrackedMetrics, *, last: bool) -> None:
        """Register new checkpoints, and add figures of the test set that came later.

        Args:
            record: The job.
            run: The job's run in the tracker.
            tracked: Which versions count, and their figures on the test set.
            last: Look at all there is, though there is no new checkpoint.

        Raises:
            UnavailableError: If storage or the tracker is unavailable.
            UserError: If the tracker refuses it.
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
        # Of one that is newer than what was read of the history, nobody knows yet.
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
        except CorruptError:  # torn, or deleted in this moment
            return None

    def _tags(
        self, record: JobRecord, name: ModelId, found: FoundSnapshot, test: dict[str, float]
    ) -> dict[str, str]:
        """Return what the file of a model says of itself, and which checkpoint it is."""
        about = about_model(record, KeptModel(found.title, found.snapshot, test))
        own = self._identity | {CHECKPOINT: format_model_id(name), KEPT: "true"}
        return {f"doll.{key}": value for key, value in about.items()} | own

    def _source(self, store: CheckpointStore, job: str, name: ModelId) -> str:
        """Where a checkpoint lies; only its name where that is a path, which MLflow refuses."""
        if self._url.startswith("file:"):
            return f"doll://{job}/{format_model_id(name)}"
        return f"{self._url}/{store.folder(name)}"

    def _set_aliases(
        self, counting: Mapping[ModelId, FoundSnapshot], versions: Mapping[str, str]
    ) -> None:
        """Let `newest` and `best` mean what `doll model list` means by them."""
        losses = {
            name: each.snapshot.loss
            for name, each in sorted(counting.items(), reverse=True)
            if each.snapshot.loss is not None
        }
        chosen = {
            "newest": max(counting, default=None),
            # Of equals the newest.
            "best": min(losses, key=lambda name: losses[name], default=None),
        }
        for alias, name in chosen.items():
            if name is not None and self._aliases.get(alias) != versions[format_model_id(name)]:
                self._tracking.set_alias(self._model, alias, versions[format_model_id(name)])
                self._aliases[alias] = versions[format_model_id(name)]
