"""A system reached over its REST API: `doll --api URL`."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from pydantic import ValidationError

from common.api.plan import ToldPlan
from common.api.prices import PriceList
from common.api.provisioning import ToldProvisioning
from common.config.yaml_file import as_json, load_text
from common.core.events import Wanted  # noqa: TC001 -- msgspec reads it when run
from common.core.spans import Partition, Span
from common.errors import UserError, WireError
from common.jobs.progress import State, Word
from common.jobs.quarantine import Final, Outcome, QuarantinedBatch, RequeuedBatch
from common.jobs.spec import job_from_json
from common.jobs.store import Change, JobRecord, Origin
from services.cli.commands.watching import SHOWN_UPDATES, Picture, UpdateLine
from services.cli.system.api_client import Client
from services.cli.system.system import JobLine, Jobs, PulledModel, Submitted, UnreadableLine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import httpx2

    from common.checkpoints.find import Wish
    from common.config.settings import Settings
    from common.core.losses import ReadFrom
    from common.jobs.edit import Value
    from common.planning.compare import Result
    from common.planning.request import PlanRequest
    from common.planning.simulation import SimulateRequest

_PAGE = 500


class _Progress(msgspec.Struct):
    version: int
    samples_per_s: float | None
    lag: int | None
    waiting: int | None
    skipped: int
    quarantined: int
    whole: bool
    expired: int = 0  # an older service does not tell it


class _Job(msgspec.Struct):
    spec: msgspec.Raw
    wanted: Wanted
    reason: str
    submitted_s: float
    revision: int
    changes: tuple[Change, ...]
    first: tuple[tuple[str, int, int], ...]
    origin: Origin | None
    detail: str
    state: Word
    why: str
    progress: _Progress


class _Summary(msgspec.Struct):
    id: str
    wanted: Wanted
    reason: str
    streams: tuple[str, ...]
    task: str
    state: Word
    why: str
    lag: int | None
    skipped: int | None
    quarantined: int | None
    whole: bool
    expired: int | None = None  # an older service does not tell it


class _Unreadable(msgspec.Struct):
    id: str
    offset: int
    reason: str


class _Jobs(msgspec.Struct):
    jobs: tuple[_Summary, ...]
    unreadable: tuple[_Unreadable, ...]
    next: str | None


class _QuarantinedBatch(msgspec.Struct):
    batch: int
    records: int
    spans: tuple[tuple[str, int, int, int], ...]
    reason: str
    final: Final


class _Quarantine(msgspec.Struct):
    batches: tuple[_QuarantinedBatch, ...]
    next: int | None


class _RequeuedBatch(msgspec.Struct):
    batch: int
    outcome: Outcome


class _Requeued(msgspec.Struct):
    batches: tuple[_RequeuedBatch, ...]


class _Updates(msgspec.Struct):
    updates: tuple[UpdateLine, ...]


class _Worker(msgspec.Struct):
    status: str


class _Workers(msgspec.Struct):
    workers: tuple[_Worker, ...]
    board_away: str = ""


class Api:
    """See `system.System`.

    Args:
        settings: They name the service and the key.
        transport: None: the network.
    """

    def __init__(self, settings: Settings, transport: httpx2.BaseTransport | None = None) -> None:
        self._client = Client(settings.api, settings.api_key, transport)

    # --- jobs ------------------------------------------------------------------------------------

    def submit(self, text: str, source: str) -> Submitted:
        """See the protocol; the service's allow list of tasks counts, not ours."""
        if source:
            raise UserError(
                f"--from {source}: checkpoints are copied by whoever reaches Kafka and storage"
                " itself: leave out --api"
            )
        body = as_json(load_text(text))
        job_from_json(body)  # what is wrong with it is told in the same words as without a service
        headers = {"Idempotency-Key": token_hex(16)}
        return Submitted(
            self._record(self._client.ask("POST", "/v1/jobs", body.encode(), headers=headers))
        )

    def jobs(self) -> Jobs:
        """See the protocol."""
        lines, unreadable, after = list[JobLine](), list[UnreadableLine](), ""
        while True:
            page = self._client.get("/v1/jobs", _Jobs, limit=_PAGE, after=after)
            lines += [_line(each) for each in page.jobs]
            unreadable += [UnreadableLine(e.id, e.offset, e.reason) for e in page.unreadable]
            if page.next is None or page.next <= after:
                return Jobs(tuple(lines), tuple(unreadable))
            after = page.next

    def job(self, name: str) -> JobRecord:
        """See the protocol."""
        return self._record(self._client.ask("GET", _path(name)))

    def want(self, name: str, wanted: Wanted, reason: str) -> None:
        """See the protocol."""
        self._patch(name, {"wanted": wanted, "reason": reason})

    def resume_after_loss(
        self, name: str, reason: str, *, from_start: bool, read_from: ReadFrom
    ) -> None:
        """See the protocol."""
        wish: dict[str, object] = {"after_loss": True, "from_start": from_start}
        if read_from:
            wish["read_from"] = read_from
        self._patch(name, {"wanted": "running", **wish, "reason": reason})

    def change(self, name: str, changed: Mapping[str, Value], reason: str) -> JobRecord:
        """See the protocol."""
        return self._patch(name, {**changed, "reason": reason})

    def delete(self, name: str) -> None:
        """See the protocol."""
        self._client.ask("DELETE", _path(name))

    def quarantine(self, name: str) -> list[QuarantinedBatch]:
        """See the protocol."""
        found, after = list[QuarantinedBatch](), -1
        while True:
            page = self._client.get(
                _path(name, "quarantine"), _Quarantine, limit=_PAGE, after=after
            )
            found += [
                QuarantinedBatch(
                    each.batch,
                    each.records,
                    tuple(Span(*span) for span in each.spans),
                    each.reason,
                    each.final,
                )
                for each in page.batches
            ]
            if page.next is None or page.next <= after:
                return found
            after = page.next

    def requeue(self, name: str, batches: Sequence[int] | None) -> list[RequeuedBatch]:
        """See the protocol."""
        body = msgspec.json.encode({"batches": "all" if batches is None else batches})
        answer = self._client.ask("POST", _path(name, "requeue"), body)
        told = self._client.read(answer, _Requeued)
        return [RequeuedBatch(each.batch, each.outcome) for each in told.batches]

    def watch(self, name: str) -> ApiWatched:
        """See the protocol."""
        return ApiWatched(self._client, name)

    def model(self, name: str, wish: Wish, tell: Callable[[str], object]) -> PulledModel:  # noqa: ARG002 -- the service's log has what was left out
        """See the protocol."""
        answer = self._client.ask("GET", _path(name, "model"), parameters={"version": wish})
        try:
            epoch, version = (int(answer.headers[f"doll-{what}"]) for what in ("epoch", "version"))
        except (KeyError, ValueError) as error:
            raise self._client.strange(error) from error
        return PulledModel(epoch, version, answer.content)

    # --- provisioning ----------------------------------------------------------------------------

    def plan(self, request: PlanRequest) -> ToldPlan:
        """See the protocol."""
        body = request.model_dump_json(exclude_defaults=True).encode()
        answer = self._client.ask("POST", "/v1/provisioning/plan", body)
        try:
            return ToldPlan.model_validate_json(answer.content)
        except ValidationError as error:
            raise self._client.strange(error) from error

    def simulate(
        self,
        request: SimulateRequest,
        folder: Path,  # noqa: ARG002 -- the service sees no file of ours
        advance: Callable[[str, float], None],
    ) -> dict[str, Result]:
        """See the protocol."""
        from common.planning.compare import results_of  # noqa: PLC0415 -- brings scipy

        body = request.model_dump_json(exclude_defaults=True).encode()
        answer = self._client.ask("POST", "/v1/provisioning/simulate", body)
        try:
            results = results_of(answer.content)
        except WireError as error:
            raise self._client.strange(error) from error
        for name in results:
            advance(name, 1.0)
        return results

    def provisioning(self, name: str, limit: int) -> ToldProvisioning:
        """See the protocol."""
        return self._client.get(_path(name, "provisioning"), ToldProvisioning, limit=limit)

    def replan(self, name: str, reason: str) -> None:
        """See the protocol."""
        body = msgspec.json.encode({"reason": reason})
        self._client.ask("POST", _path(name, "provisioning/replan"), body)

    def prices(self) -> PriceList:
        """See the protocol."""
        return self._client.get("/v1/provisioning/prices", PriceList)

    def _patch(self, name: str, patch: Mapping[str, object]) -> JobRecord:
        return self._record(self._client.ask("PATCH", _path(name), msgspec.json.encode(patch)))

    def _record(self, answer: httpx2.Response) -> JobRecord:
        told = self._client.read(answer, _Job)
        return JobRecord(
            spec=job_from_json(bytes(told.spec)),
            wanted=told.wanted,
            first={Partition(topic, index): position for topic, index, position in told.first},
            reason=told.reason,
            submitted_s=told.submitted_s,
            origin=told.origin,
            revision=told.revision,
            changes=told.changes,
            held=told.state == "held",
            detail=told.detail,
            finished=told.state == "finished",
        )


class ApiWatched:
    """One job, asked about again and again; see `system.Watched`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._looked = False

    def look(self, timeout_s: float) -> Picture:
        """Wait `timeout_s`, unless this is the first look, and say how the job is."""
        if self._looked:
            time.sleep(timeout_s)
        self._looked = True
        job = self._client.get(_path(self._name), _Job)
        progress = job.progress
        workers = self._client.get(_path(self._name, "workers"), _Workers)
        after = max(progress.version - SHOWN_UPDATES, 0)
        updates = self._client.get(
            _path(self._name, "updates"), _Updates, after=after, limit=SHOWN_UPDATES
        )
        statuses = [worker.status for worker in workers.workers]
        return Picture(
            State(job.state, job.why),
            None if workers.board_away else statuses.count("alive"),
            statuses.count("leaving"),
            progress.samples_per_s,
            progress.lag,
            progress.waiting,
            progress.skipped,
            progress.quarantined,
            progress.expired,
            progress.whole,
            updates.updates,
        )

    def close(self) -> None:
        """Look no more."""


def _path(job: str, part: str = "") -> str:
    return f"/v1/jobs/{quote(job, safe='')}" + (f"/{part}" if part else "")


def _line(told: _Summary) -> JobLine:
    return JobLine(
        told.id,
        State(told.state, told.why),
        told.task,
        told.streams,
        told.reason,
        told.lag,
        told.skipped,
        told.quarantined,
        told.expired,
        told.whole,
    )
