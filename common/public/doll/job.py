"""One job: how it is, its updates as they come, its models, and what may be changed of it."""

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

_OVER = ("finished", "stopped")  # states in which no update comes


class Update(msgspec.Struct, frozen=True):
    """One update of the model."""

    version: int  # J, the updates in the model
    epoch: int  # of the leader that made it: each has a higher number
    at_s: float | None  # since 1970
    samples: int
    batches: int
    loss: float  # mean per sample, at the weights before it
    metrics: dict[str, float]  # likewise
    count: int = 1  # updates since the one shown before, this one with them


class Progress(msgspec.Struct, frozen=True):
    """How far a job is; None is what is not known."""

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
    """How a job is."""

    id: str
    state: str  # a word of docs/reference/job-states.md
    why: str
    wanted: str
    reason: str
    revision: int
    submitted_s: float
    spec: dict[str, Any]
    progress: Progress


class Model(dict[str, Any]):
    """The tensors of one version by name: what `load_state_dict` takes.

    Attributes:
        version: J, the updates in it.
        epoch: Of the leader that made it.
        tag: Of these very weights.
        metadata: What the file says of itself, each a text or JSON: the job, its task, offsets,
            metrics, ...
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
    """A job of a service.

    Args:
        connection: The service.
        name: The job's; whether there is one is seen when it is asked for something.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._connection = connection

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def status(self) -> Status:
        """How it is now.

        Raises:
            NotFoundError: If there is no such job.
            OutsideError: If the service cannot be reached or has a fault.
        """
        answer = self._connection.ask("GET", path_of(self.name))
        return self._connection.decoded(answer.content, _STATUS)

    def updates(self) -> Iterator[Update]:
        """Updates as they are made, the newest one first of all, until the job is over.

        Of a fast job at most 20 a second are shown; `count` says how many each stands for. A
        connection that breaks is opened anew, and no update is shown twice. Versions go up, but
        where a new leader has taken back updates that no snapshot holds: then `epoch` is higher
        than before, versions may come again, and those shown with a lower epoch from there on do
        not count.

        Raises:
            UserError: If there is no such job, or the key does not count.
            OutsideError: If the service is away for a minute, or has a fault.
        """
        shown = (-1, 0)
        for event in events(self._connection, self.name):
            over = False
            if event.kind == "update":
                found = [self._connection.decoded(event.data, _UPDATE)]
            elif event.kind == "job":  # at first, after a change, and where events were missed
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
        """The weights of a version that is kept: `net.load_state_dict(job.model("best"))`.

        Args:
            version: J; or the newest one that a snapshot holds; or that of the lowest mean loss.
            framework: Whose tensors it has.

        Raises:
            NotFoundError: If there is no such job, or it keeps no such version (yet).
            UserError: If PyTorch is not installed here.
            OutsideError: If the service cannot be reached or has a fault.
        """
        found = self._model(version, framework)
        if found is None:
            raise self._connection.strange("304 to a question without a tag")
        return found

    def follow(
        self,
        net: Net,
        version: Literal["newest", "best"] = "newest",
        *,
        every_s: float = 1.0,
        framework: Framework = "torch",
    ) -> Live[Net]:
        """A copy of a network that is replaced, whole, whenever there is a newer version.

        Only versions are served that a snapshot holds, so none is ever taken back (but where Redis
        is wiped, and a checkpoint is all that is left: the next epoch's versions replace it then).

        Args:
            net: Whatever has `load_state_dict`, and may be copied; it stays as it is.
            version: The newest one that a snapshot holds; or that of the lowest mean loss.
            every_s: Between looks for a newer one.
            framework: Whose tensors `load_state_dict` gets.

        Raises:
            NotFoundError: If there is no such job, or it keeps no version yet.
            UserError: If PyTorch is not installed here.
            OutsideError: If the service cannot be reached or has a fault.
        """
        return Live(
            net,
            lambda tag: self._model(version, framework, tag),
            only_forward=version == "newest",
            every_s=every_s,
        )

    def pause(self, reason: str = "") -> Status:
        """Pause it: its streams wait in Kafka.

        Raises:
            UserError: If it cannot be.
            OutsideError: If the service cannot be reached or has a fault.
        """
        return self.change(reason, wanted="paused")

    def resume(self, reason: str = "") -> Status:
        """Go on where it was paused or stopped.

        Raises:
            UserError: If it cannot be.
            OutsideError: If the service cannot be reached or has a fault.
        """
        return self.change(reason, wanted="running")

    def stop(self, reason: str = "") -> Status:
        """Stop it with a last checkpoint.

        Raises:
            UserError: If it cannot be.
            OutsideError: If the service cannot be reached or has a fault.
        """
        return self.change(reason, wanted="stopped")

    def change(self, reason: str = "", **settings: object) -> Status:
        """Change settings, at the next boundary of an update: `job.change(group_size=10)`.

        Args:
            reason: Why; kept with the job.
            settings: As in the API's `JobPatch`.

        Raises:
            UserError: Naming a setting that cannot be changed so.
            OutsideError: If the service cannot be reached or has a fault.
        """
        try:
            body = msgspec.json.encode({**settings, "reason": reason})
        except TypeError as error:
            raise UserError(f"change: holds a value that is not plain data: {error}") from error
        answer = self._connection.ask("PATCH", path_of(self.name), body)
        return self._connection.decoded(answer.content, _STATUS)

    def delete(self, *, purge: bool = False) -> None:
        """Take it, stopped, out of the list; its history and its checkpoints stay.

        Args:
            purge: Remove them, too, and make its name free. It may be asked for again.

        Raises:
            UserError: If it is not stopped, or there is none.
            OutsideError: If the service cannot be reached or has a fault.
        """
        asked = {"purge": "true"} if purge else {}
        self._connection.ask("DELETE", path_of(self.name), parameters=asked)

    def _newest(self, version: int) -> list[Update]:
        """The update that made a version, while it counts."""
        path, asked = path_of(self.name, "updates"), {"after": max(version - 1, 0), "limit": 1}
        answer = self._connection.ask("GET", path, parameters=asked)
        return self._connection.decoded(answer.content, _PAGE).updates

    def _model(self, version: int | str, framework: Framework, tag: str = "") -> Model | None:
        """A version's weights; None: they are those of the tag."""
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
    """Of safetensors that can be read: their head is JSON, after its length."""
    head = file[8 : 8 + int.from_bytes(file[:8], "little")]
    return _HEAD.decode(head).metadata


def _loader(framework: Framework) -> Any:  # noqa: ANN401 -- bytes to tensors of either
    """What reads safetensors.

    Raises:
        UserError: If PyTorch is not installed here.
    """
    try:
        return import_module(f"safetensors.{framework}").load
    except ModuleNotFoundError as error:
        raise UserError(
            "a model's weights as PyTorch's: it is not installed here; `pip install"
            ' doll-client[torch]`, or ask for framework="numpy"'
        ) from error
