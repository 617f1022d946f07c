"""Client of the admin service's REST API, for commands."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import httpx2
import msgspec
from pydantic import BaseModel, ValidationError

from common.api.answers import (
    DeadLettersPage,
    JobAnswer,
    JobList,
    JobSummary,
    KeptVersions,
    PlanAnswer,
    PricesAnswer,
    ProvisioningAnswer,
    QuarantineAnswer,
    RemainsAnswer,
    RequeueAnswer,
    SubmittedJob,
    UnreadableRecord,
    UpdateAnswer,
    UpdatesPage,
    WorkersAnswer,
)
from common.config.validation import complaint
from common.errors import OutsideError, UnavailableError
from common.jobs.spec import job_from_json
from doll.connection import Connection, path_of
from doll.events import Event, events
from doll.yaml_file import as_json, load_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from common.config.settings import Settings
    from common.jobs.quarantine import QuarantinedBatchAnswer
    from common.spot.planning.request import PlanRequest

T = TypeVar("T", bound=BaseModel)

_PAGE = 500
# Number of updates that `doll job watch` shows.
_SHOWN_UPDATES = 10
# Number of a job's plans shown.
_PLANS = 5


class Picture(NamedTuple):
    """Snapshot of a job for `doll job watch`; None is unknown."""

    job: JobAnswer
    # Number of workers alive.
    alive: int | None
    leaving: int
    # The last updates; the newest is last.
    updates: tuple[UpdateAnswer, ...]

    @property
    def state(self) -> str:
        """State, with its reason."""
        return f"{self.job.state}: {self.job.why}" if self.job.why else self.job.state


class PulledModel(NamedTuple):
    """A model's weights as safetensors, and the update that made them."""

    epoch: int
    version: int
    data: bytes


class Api:
    """One admin service.

    Every call may raise `UserError` if the request is invalid, and `OutsideError` if the service is
    unreachable or fails.

    Args:
        transport: Optional. If unset, the network.
    """

    def __init__(self, settings: Settings, transport: httpx2.BaseTransport | None = None) -> None:
        self._named = "api" in settings.model_fields_set
        self._service = Connection(settings.api, settings.api_key, transport=transport)

    # --- jobs ------------------------------------------------------------------------------------

    def submit(self, text: str, source: str, *, unchecked: bool = False) -> SubmittedJob:
        """Submit a job file.

        Args:
            text: Content of the file.
            source: JOB or JOB@VERSION whose checkpoint the job starts with; empty for none.
            unchecked: True to skip building its task as a check.
        """
        body = as_json(load_text(text))
        # The error message then names fields of the job file, not of the request's body.
        job_from_json(body)
        parameters = {"from": source} if source else {}
        answer = self._ask(
            "POST",
            "/v1/jobs",
            body.encode(),
            headers={"Idempotency-Key": token_hex(16)},
            parameters=parameters | ({"unchecked": "true"} if unchecked else {}),
        )
        return self._read(answer, SubmittedJob)

    def jobs(self) -> JobList:
        """Return all jobs by name."""
        jobs, unreadable, after = list[JobSummary](), list[UnreadableRecord](), ""
        while True:
            page = self._get("/v1/jobs", JobList, limit=_PAGE, after=after)
            jobs += page.jobs
            unreadable += page.unreadable
            if page.next is None or page.next <= after:
                found = {"jobs": tuple(jobs), "unreadable": tuple(unreadable), "next": None}
                return page.model_copy(update=found)
            after = page.next

    def job(self, name: str) -> JobAnswer:
        """Return one job."""
        return self._get(path_of(name), JobAnswer)

    def change(self, name: str, reason: str, **changed: object) -> JobAnswer:
        """Change a job's wanted state or its settings; see `JobPatch` of the service."""
        body = msgspec.json.encode({**changed, "reason": reason})
        return self._read(self._ask("PATCH", path_of(name), body), JobAnswer)

    def delete(self, name: str) -> None:
        """Delete a stopped job from the list."""
        self._ask("DELETE", path_of(name))

    def remains(self, name: str) -> RemainsAnswer:
        """Return everything that a purge of a name would remove."""
        return self._get(path_of(name, "remains"), RemainsAnswer)

    def purge(self, name: str) -> RemainsAnswer:
        """Make a name free, and remove the remains of its jobs."""
        answer = self._ask("DELETE", path_of(name), parameters={"purge": "true"})
        return self._read(answer, RemainsAnswer)

    def quarantine(self, name: str) -> list[QuarantinedBatchAnswer]:
        """Return the quarantined batches of a job, oldest first."""
        found, path, after = list["QuarantinedBatchAnswer"](), path_of(name, "quarantine"), -1
        while True:
            page = self._get(path, QuarantineAnswer, limit=_PAGE, after=after)
            found += page.batches
            if page.next is None or page.next <= after:
                return found
            after = page.next

    def dead_letters(self, name: str, limit: int) -> DeadLettersPage:
        """Count the records that a job could not use, for at most `limit` reasons."""
        return self._get(path_of(name, "dead-letters"), DeadLettersPage, limit=limit)

    def requeue(self, name: str, batches: Sequence[int] | None) -> RequeueAnswer:
        """Take batches out of quarantine; None selects all that can be requeued."""
        body = msgspec.json.encode({"batches": "all" if batches is None else batches})
        return self._read(self._ask("POST", path_of(name, "requeue"), body), RequeueAnswer)

    def events(self, name: str) -> Iterator[Event]:
        """Yield events of a job from now on."""
        # An invalid request is refused before the stream opens.
        self._ask("GET", path_of(name))
        return events(self._service, name)

    def look(self, name: str) -> Picture:
        """Return a snapshot of a job."""
        job = self.job(name)
        workers = self._get(path_of(name, "workers"), WorkersAnswer)
        after = max(job.progress.version - _SHOWN_UPDATES, 0)
        path = path_of(name, "updates")
        updates = self._get(path, UpdatesPage, after=after, limit=_SHOWN_UPDATES).updates
        statuses = [worker.status for worker in workers.workers]
        alive = None if workers.board_away else statuses.count("alive")
        return Picture(job, alive, statuses.count("leaving"), updates)

    def model(self, name: str, version: str) -> PulledModel:
        """Return a version of a model: a number, `newest` or `best`."""
        parameters = {"version": version}
        answer = self._ask("GET", path_of(name, "model"), parameters=parameters, model=True)
        try:
            epoch, number = (int(answer.headers[f"doll-{what}"]) for what in ("epoch", "version"))
        except (KeyError, ValueError) as error:
            raise self._service.strange(error) from error
        return PulledModel(epoch, number, answer.content)

    def versions(self, name: str) -> KeptVersions:
        """Return the versions whose weights are kept, newest first."""
        return self._get(path_of(name, "model/versions"), KeptVersions)

    # --- provisioning ----------------------------------------------------------------------------

    def plan(self, request: PlanRequest) -> PlanAnswer:
        """Plan the number of workers on spot machines; `GivenError` names invalid fields."""
        body = request.model_dump_json(exclude_defaults=True).encode()
        return self._read(self._ask("POST", "/v1/provisioning/plan", body), PlanAnswer)

    def provisioning(self, name: str) -> ProvisioningAnswer:
        """Return a job's provisioning, with its last plans."""
        return self._get(path_of(name, "provisioning"), ProvisioningAnswer, limit=_PLANS)

    def replan(self, name: str, reason: str) -> None:
        """Request a new plan from a job's policy."""
        body = msgspec.json.encode({"reason": reason})
        self._ask("POST", path_of(name, "provisioning/replan"), body)

    def prices(self) -> PricesAnswer:
        """Return current prices of machines."""
        return self._get("/v1/provisioning/prices", PricesAnswer)

    # --- asking ----------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        parameters: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        model: bool = False,
    ) -> httpx2.Response:
        """Call `Connection.ask`; if no service answers, the error says what to do."""
        try:
            return self._service.ask(
                method, path, body, parameters=parameters, headers=headers, model=model
            )
        except UnavailableError as error:
            if not isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout):
                raise
            how = (
                "(DOLL_API); start it, or set another URL"
                if self._named
                else "(DOLL_API is not set); start one with `doll up`, or set DOLL_API to its URL"
            )
            raise OutsideError(f"no DOLL service at {self._service.url} {how}") from error

    def _get(self, path: str, kind: type[T], **parameters: str | int) -> T:
        return self._read(self._ask("GET", path, parameters=parameters), kind)

    def _read(self, answer: httpx2.Response, kind: type[T]) -> T:
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            raise self._service.strange(complaint(error)) from error
