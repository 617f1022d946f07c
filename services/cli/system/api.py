"""A system reached over its REST API: `doll --api URL`."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import TYPE_CHECKING, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from common.api.answers import (
    DeadLettersPage,
    JobAnswer,
    JobList,
    JobSummary,
    KeptVersions,
    PricesAnswer,
    ProvisioningAnswer,
    QuarantineAnswer,
    RemainsAnswer,
    RequeueAnswer,
    SubmittedJob,
    ToldPlan,
    UnreadableRecord,
    UpdatesPage,
    WorkersAnswer,
)
from common.api.jobs import record_of
from common.config.validation import complaint
from common.core.spans import Span
from common.errors import UserError, WireError
from common.jobs.notes import notes_on
from common.jobs.progress import State
from common.jobs.quarantine import QuarantinedBatch, RequeuedBatch
from common.jobs.spec import job_from_json
from doll.connection import Connection, path_of
from doll.events import Event, events
from doll.yaml_file import as_json, load_text
from services.cli.system.system import SHOWN_UPDATES, Picture, PulledModel, Submitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import httpx2

    from common.config.settings import Settings
    from common.core.events import Wanted
    from common.core.losses import ReadFrom
    from common.jobs.edit import Value
    from common.jobs.store import JobRecord
    from common.spot.planning.compare import Result
    from common.spot.planning.request import PlanRequest
    from common.spot.planning.simulation import SimulateRequest
    from common.storage.find import Wish

T = TypeVar("T", bound=BaseModel)

_PAGE = 500


class Api:
    """See `system.System`.

    Args:
        transport: None: the network.
    """

    def __init__(self, settings: Settings, transport: httpx2.BaseTransport | None = None) -> None:
        self._service = Connection(settings.api, settings.api_key, transport=transport)

    # --- jobs ------------------------------------------------------------------------------------

    def submit(self, text: str, source: str, *, unchecked: bool = False) -> Submitted:
        """See the protocol; the service's allow list of tasks counts, not ours."""
        if source:
            raise UserError(
                f"--from {source}: checkpoints are copied by whoever reaches Kafka and storage"
                " itself: leave out --api (or unset DOLL_API)"
            )
        body = as_json(load_text(text))
        spec = job_from_json(body)  # what is wrong is told in the same words as without a service
        headers = {"Idempotency-Key": token_hex(16)}
        parameters = {"unchecked": "true"} if unchecked else {}
        told = self._service.ask(
            "POST", "/v1/jobs", body.encode(), headers=headers, parameters=parameters
        )
        answer = _read(self._service, told, SubmittedJob)
        return Submitted(record_of(answer), notes=notes_on(spec), unchecked=answer.unchecked)

    def jobs(self) -> JobList:
        jobs, unreadable, after = list[JobSummary](), list[UnreadableRecord](), ""
        while True:
            page = _get(self._service, "/v1/jobs", JobList, limit=_PAGE, after=after)
            jobs += page.jobs
            unreadable += page.unreadable
            if page.next is None or page.next <= after:
                found = {"jobs": tuple(jobs), "unreadable": tuple(unreadable), "next": None}
                return page.model_copy(update=found)
            after = page.next

    def job(self, name: str) -> JobRecord:
        return record_of(_get(self._service, path_of(name), JobAnswer))

    def want(self, name: str, wanted: Wanted, reason: str) -> JobRecord:
        return self._patch(name, {"wanted": wanted, "reason": reason})

    def resume_after_loss(
        self, name: str, reason: str, *, from_start: bool, read_from: ReadFrom
    ) -> None:
        wish: dict[str, object] = {"after_loss": True, "from_start": from_start}
        if read_from:
            wish["read_from"] = read_from
        self._patch(name, {"wanted": "running", **wish, "reason": reason})

    def change(self, name: str, changed: Mapping[str, Value], reason: str) -> JobRecord:
        return self._patch(name, {**changed, "reason": reason})

    def delete(self, name: str) -> None:
        self._service.ask("DELETE", path_of(name))

    def remains(self, name: str) -> RemainsAnswer:
        return _get(self._service, path_of(name, "remains"), RemainsAnswer)

    def purge(self, name: str) -> RemainsAnswer:
        answer = self._service.ask("DELETE", path_of(name), parameters={"purge": "true"})
        return _read(self._service, answer, RemainsAnswer)

    def quarantine(self, name: str) -> list[QuarantinedBatch]:
        found, path, after = list[QuarantinedBatch](), path_of(name, "quarantine"), -1
        while True:
            page = _get(self._service, path, QuarantineAnswer, limit=_PAGE, after=after)
            for each in page.batches:
                address = tuple(Span(*span) for span in each.spans)
                found.append(
                    QuarantinedBatch(each.batch, each.records, address, each.reason, each.final)
                )
            if page.next is None or page.next <= after:
                return found
            after = page.next

    def dead_letters(self, name: str, limit: int) -> DeadLettersPage:
        return _get(self._service, path_of(name, "dead-letters"), DeadLettersPage, limit=limit)

    def requeue(self, name: str, batches: Sequence[int] | None) -> list[RequeuedBatch]:
        body = msgspec.json.encode({"batches": "all" if batches is None else batches})
        answer = self._service.ask("POST", path_of(name, "requeue"), body)
        told = _read(self._service, answer, RequeueAnswer)
        return [RequeuedBatch(each.batch, each.outcome) for each in told.batches]

    def events(self, name: str) -> Iterator[Event]:
        """What happens to a job, from now on."""
        return events(self._service, name)

    def watch(self, name: str) -> ApiWatched:
        return ApiWatched(self._service, name)

    def model(self, name: str, wish: Wish, tell: Callable[[str], object]) -> PulledModel:  # noqa: ARG002 -- the service's log has what was left out
        asked = {"version": wish}
        answer = self._service.ask("GET", path_of(name, "model"), parameters=asked, model=True)
        try:
            epoch, version = (int(answer.headers[f"doll-{what}"]) for what in ("epoch", "version"))
        except (KeyError, ValueError) as error:
            raise self._service.strange(error) from error
        return PulledModel(epoch, version, answer.content)

    def versions(self, name: str, tell: Callable[[str], object]) -> KeptVersions:  # noqa: ARG002 -- likewise
        return _get(self._service, path_of(name, "model/versions"), KeptVersions)

    # --- provisioning ----------------------------------------------------------------------------

    def plan(self, request: PlanRequest) -> ToldPlan:
        body = request.model_dump_json(exclude_defaults=True).encode()
        return _read(
            self._service, self._service.ask("POST", "/v1/provisioning/plan", body), ToldPlan
        )

    def simulate(
        self,
        request: SimulateRequest,
        folder: Path,  # noqa: ARG002 -- the service sees no file of ours
        advance: Callable[[str, float], None],
    ) -> dict[str, Result]:
        from common.spot.planning.compare import results_of

        body = request.model_dump_json(exclude_defaults=True).encode()
        answer = self._service.ask("POST", "/v1/provisioning/simulate", body)
        try:
            results = results_of(answer.content)
        except WireError as error:
            raise self._service.strange(error) from error
        for name in results:
            advance(name, 1.0)
        return results

    def provisioning(self, name: str, limit: int) -> ProvisioningAnswer:
        return _get(self._service, path_of(name, "provisioning"), ProvisioningAnswer, limit=limit)

    def replan(self, name: str, reason: str) -> None:
        body = msgspec.json.encode({"reason": reason})
        self._service.ask("POST", path_of(name, "provisioning/replan"), body)

    def prices(self) -> PricesAnswer:
        return _get(self._service, "/v1/provisioning/prices", PricesAnswer)

    def _patch(self, name: str, patch: Mapping[str, object]) -> JobRecord:
        return self._record(self._service.ask("PATCH", path_of(name), msgspec.json.encode(patch)))

    def _record(self, answer: httpx2.Response) -> JobRecord:
        return record_of(_read(self._service, answer, JobAnswer))


class ApiWatched:
    """One job, asked about again and again; see `system.Watched`."""

    def __init__(self, service: Connection, name: str) -> None:
        self._service = service
        self._name = name
        self._looked = False

    def look(self, timeout_s: float) -> Picture:
        """Wait `timeout_s`, unless this is the first look, and say how the job is."""
        if self._looked:
            time.sleep(timeout_s)
        self._looked = True
        job = _get(self._service, path_of(self._name), JobAnswer)
        workers = _get(self._service, path_of(self._name, "workers"), WorkersAnswer)
        after = max(job.progress.version - SHOWN_UPDATES, 0)
        updates = _get(
            self._service,
            path_of(self._name, "updates"),
            UpdatesPage,
            after=after,
            limit=SHOWN_UPDATES,
        )
        statuses = [worker.status for worker in workers.workers]
        return Picture(
            State(job.state, job.why),
            job.progress,
            None if workers.board_away else statuses.count("alive"),
            statuses.count("leaving"),
            updates.updates,
        )

    def close(self) -> None:
        """Look no more."""


def _get(service: Connection, path: str, kind: type[T], **parameters: str | int) -> T:
    """Ask for something, and read it.

    Raises:
        UserError: If it is refused.
        OutsideError: If the service cannot be reached, has a fault, or is none of ours.
    """
    return _read(service, service.ask("GET", path, parameters=parameters), kind)


def _read(service: Connection, answer: httpx2.Response, kind: type[T]) -> T:
    """Read an answer.

    Raises:
        OutsideError: If it is something else.
    """
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError as error:
        raise service.strange(complaint(error)) from error
