"""A job: its status, its updates as they come, its models, and changes to it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal, TypeAlias

import msgspec
from safetensors import SafetensorError

from doll.connection import Connection, path_of
from doll.errors import UserError
from doll.events import events
from doll.live import Live, Net

Framework: TypeAlias = Literal["torch", "numpy"]

# States without further updates.
_OVER = ("finished", "stopped")


class Update(msgspec.Struct, frozen=True):
    """One update of the model.

    Attributes:
        version: J, the number of updates in the model.
        epoch: Number of the leadership that made the update. Each new leader has a higher one.
        at_s: Time of the update in seconds since 1970, or None if unknown.
        samples: Samples in the update.
        batches: Batches in the update.
        loss: Mean loss per sample, at the weights before the update.
        metrics: Mean of each metric per sample, at the weights before the update.
        count: Updates since the last one shown, including this one.
    """

    version: int
    epoch: int
    at_s: float | None
    samples: int
    batches: int
    loss: float
    metrics: dict[str, float]
    count: int = 1


class Progress(msgspec.Struct, frozen=True):
    """Progress of a job. Unknown values are None.

    Attributes:
        version: J, the number of updates in the model.
        samples: Samples trained so far.
        loss: Mean loss per sample over the last updates.
        metrics: Mean of each metric over the last updates. `auc`, `calibration_error`, `f1`,
            `precision` and `recall` are of the records of the last minute.
        updates_per_s: Updates per second, over the last 10 s.
        samples_per_s: Samples per second, over the last 10 s.
        lag: Records in the streams that are in no update yet.
        workers: Workers that send heartbeats.
        skipped: Records that could not be decoded.
        quarantined: Batches that were given up.
        expired: Records that Kafka deleted before they were trained.
        lost: Records that Kafka lost after they were trained.
    """

    version: int
    samples: int
    loss: float | None
    metrics: dict[str, float]
    updates_per_s: float | None
    samples_per_s: float | None
    lag: int | None
    workers: int | None
    skipped: int
    quarantined: int
    expired: int
    lost: int


class Status(msgspec.Struct, frozen=True):
    """Status of a job.

    Attributes:
        id: Name of the job.
        state: State; docs/reference/job-states.md lists all.
        why: Reason for the state; may be empty.
        wanted: State that the owner wants: `running`, `paused` or `stopped`.
        reason: Reason for the wanted state.
        revision: Number of changes of the settings.
        submitted_s: Time of submission in seconds since 1970.
        spec: Specification with all defaults and changes.
        progress: Progress of the training.
    """

    id: str
    state: str
    why: str
    wanted: str
    reason: str
    revision: int
    submitted_s: float
    spec: dict[str, Any]
    progress: Progress


class Model(dict[str, Any]):
    """Tensors of one version by name, as `load_state_dict` expects them.

    Attributes:
        version: J, the number of updates in the model.
        epoch: Number of the leadership that made the version.
        tag: HTTP entity tag that identifies these weights.
        metadata: Metadata of the file, such as job, task, offsets and metrics. Each value is plain
            text or JSON.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        version: int,
        epoch: int,
        tag: str,
        metadata: dict[str, str],
    ) -> None:
        super().__init__(tensors)
        self.metadata = metadata
        self.version = version
        self.epoch = epoch
        self.tag = tag


class _Page(msgspec.Struct):
    updates: list[Update]


class _Head(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(default={}, name="__metadata__")


_HEAD = msgspec.json.Decoder(_Head)
_PAGE = msgspec.json.Decoder(_Page)
_STATUS = msgspec.json.Decoder(Status)
_UPDATE = msgspec.json.Decoder(Update)


class Job:
    """A job of an admin service. `Client.job` and `Client.submit` return it.

    Args:
        connection: Connection to the service.
        name: Name of the job. Methods raise `NotFoundError` if there is no such job.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._connection = connection

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def status(self) -> Status:
        """Return the current status.

        Raises:
            NotFoundError: If there is no such job.
            OutsideError: If the service cannot be reached or has a fault.
        """
        answer = self._connection.ask("GET", path_of(self.name))
        return self._connection.decoded(answer.content, _STATUS)

    def updates(self) -> Iterator[Update]:
        """Yield the newest update, then each new one, until the job has finished or is stopped.

        A fast job yields at most 20 updates a second; `count` says how many each stands for. If the
        connection breaks, it is opened again, and no update comes twice.

        Versions increase unless a new leader takes back updates that are in no snapshot. `epoch`
        then increases, and versions may come again. An update with a lower epoch no longer counts
        if its version is at least the first one of the new epoch.

        Raises:
            UserError: If there is no such job, or the key is not valid.
            OutsideError: If the service cannot be reached for a minute, or has a fault.
        """
        shown = (-1, 0)
        for event in events(self._connection, self.name):
            over = False
            if event.kind == "update":
                found = [self._connection.decoded(event.data, _UPDATE)]
            # The service sends `job` first, after a change, and if events were missed.
            elif event.kind == "job":
                status = self._connection.decoded(event.data, _STATUS)
                over, found = status.state in _OVER, self._newest(status.progress.version)
            else:
                continue
            for update in found:
                if (update.epoch, update.version) > shown:
                    shown = update.epoch, update.version
                    yield update
            if over:
                return

    def model(
        self,
        version: int | Literal["newest", "best"] = "newest",
        *,
        framework: Framework = "torch",
    ) -> Model:
        """Return the weights of a stored version: `net.load_state_dict(job.model("best"))`.

        Args:
            version: J, `"newest"` for the newest snapshot, or `"best"` for the version with the
                lowest mean loss.
            framework: `"torch"` for tensors of PyTorch, `"numpy"` for arrays.

        Raises:
            NotFoundError: If there is no such job, or it does not have the version (yet).
            UserError: If PyTorch is needed but not installed.
            OutsideError: If the service cannot be reached or has a fault.
        """
        found = self._model(version, framework)
        if found is None:
            raise self._connection.strange("status 304 without If-None-Match")
        return found

    def follow(
        self,
        net: Net,
        version: Literal["newest", "best"] = "newest",
        *,
        every_s: float = 1.0,
        framework: Framework = "torch",
    ) -> Live[Net]:
        """Return a network that follows the job: each newer version replaces it as a whole.

        Only versions in a snapshot are used, so that a leader never takes them back. There is one
        exception: if Redis is wiped and the leader dies, the job continues from an older
        checkpoint, and versions of the next epoch replace the one in use.

        Args:
            net: Network that is copied for each version. It needs `load_state_dict`, and it is not
                modified.
            version: `"newest"` for the newest snapshot, or `"best"` for the version with the lowest
                mean loss.
            every_s: Time between polls for a newer version.
            framework: `"torch"` for tensors of PyTorch, `"numpy"` for arrays.

        Raises:
            NotFoundError: If there is no such job, or it has no version yet.
            UserError: If PyTorch is needed but not installed.
            OutsideError: If the service cannot be reached or has a fault.
        """
        return Live(
            net,
            lambda tag: self._model(version, framework, tag),
            only_forward=version == "newest",
            every_s=every_s,
        )

    def pause(self, reason: str = "") -> Status:
        """Pause the job. Records of its streams wait in Kafka.

        Args:
            reason: Optional. Reason, kept with the job.

        Raises:
            UserError: If the job cannot be paused.
            OutsideError: If the service cannot be reached or has a fault.
        """
        return self.change(reason, wanted="paused")

    def resume(self, reason: str = "") -> Status:
        """Resume a paused or stopped job.

        Args:
            reason: Optional. Reason, kept with the job.

        Raises:
            UserError: If the job cannot be resumed.
            OutsideError: If the service cannot be reached or has a fault.
        """
        return self.change(reason, wanted="running")

    def stop(self, reason: str = "") -> Status:
        """Stop the job after a last checkpoint.

        Args:
            reason: Optional. Reason, kept with the job.

        Raises:
            UserError: If the job cannot be stopped.
            OutsideError: If the service cannot be reached or has a fault.
        """
        return self.change(reason, wanted="stopped")

    def change(self, reason: str = "", **settings: object) -> Status:
        """Change settings from the next update on: `job.change(group_size=10)`.

        Args:
            reason: Optional. Reason, kept with the job.
            settings: Fields of `JobPatch` in the REST API.

        Raises:
            UserError: If a setting cannot be changed so; the message names the setting.
            OutsideError: If the service cannot be reached or has a fault.
        """
        try:
            body = msgspec.json.encode({**settings, "reason": reason})
        except TypeError as error:
            raise UserError(f"change: must have only plain data: {error}") from error
        answer = self._connection.ask("PATCH", path_of(self.name), body)
        return self._connection.decoded(answer.content, _STATUS)

    def delete(self, *, purge: bool = False) -> None:
        """Remove a stopped job from the list. Its history and its checkpoints stay.

        Args:
            purge: True to remove history and checkpoints as well, so that the name can be used
                again. A purge may be repeated.

        Raises:
            UserError: If there is no such job, or it is not stopped.
            OutsideError: If the service cannot be reached or has a fault.
        """
        asked = {"purge": "true"} if purge else {}
        self._connection.ask("DELETE", path_of(self.name), parameters=asked)

    def _newest(self, version: int) -> list[Update]:
        """Return the update that made a version, in a list; empty if the service has none."""
        path, asked = path_of(self.name, "updates"), {"after": max(version - 1, 0), "limit": 1}
        answer = self._connection.ask("GET", path, parameters=asked)
        return self._connection.decoded(answer.content, _PAGE).updates

    def _model(self, version: int | str, framework: Framework, tag: str = "") -> Model | None:
        """Return a version's weights, or None if `tag` already names them."""
        load = _loader(framework)
        headers = {"If-None-Match": tag} if tag else {}
        answer = self._connection.ask(
            "GET",
            path_of(self.name, "model"),
            parameters={"version": version},
            headers=headers,
            model=True,
        )
        if answer.status_code == 304:
            return None
        try:
            made, epoch = (int(answer.headers[f"doll-{what}"]) for what in ("version", "epoch"))
            tensors, metadata = load(answer.content), _metadata(answer.content)
            return Model(tensors, made, epoch, answer.headers["etag"], metadata)
        except (KeyError, ValueError, SafetensorError) as error:
            raise self._connection.strange(error) from error


def _metadata(file: bytes) -> dict[str, str]:
    """Return the metadata of a valid safetensors file, which begins with a length and JSON."""
    head = file[8 : 8 + int.from_bytes(file[:8], "little")]
    return _HEAD.decode(head).metadata


def _loader(framework: Framework) -> Any:  # noqa: ANN401 -- bytes to tensors of either
    """Return the function that loads safetensors for a framework.

    Raises:
        UserError: If PyTorch is needed but not installed.
    """
    try:
        return import_module(f"safetensors.{framework}").load
    except ModuleNotFoundError as error:
        raise UserError(
            'framework: "torch" requires PyTorch, which is not installed; `pip install'
            ' doll-client[torch]`, or use framework="numpy"'
        ) from error
