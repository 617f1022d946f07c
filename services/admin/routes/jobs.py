"""`/v1/jobs`: create, list, show, change and delete jobs, with their progress and history."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from fastapi import APIRouter, Body, Depends, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field, with_config
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from common.api.answers import (
    CurvesAnswer,
    JobAnswer,
    JobList,
    RemainsAnswer,
    StreamsAnswer,
    SubmittedJob,
    UpdatesPage,
    WorkersAnswer,
)
from common.api.jobs import (
    job_answer,
    progress_answer,
    remains_answer,
    unreadable_records,
)
from common.api.keys import fingerprint
from common.config.synchronisation import (
    AggregationSpec,  # noqa: TC001 -- FastAPI reads it when run
    SynchronisationSpec,  # noqa: TC001 -- FastAPI reads it when run
)
from common.core.messages import Wanted  # noqa: TC001 -- FastAPI reads it when run
from common.errors import UnavailableError, UserError
from common.jobs.edit import BLOCKS, CHANGEABLE, changed_spec, plain
from common.jobs.job_file import check_options
from common.jobs.notes import gpu_note
from common.jobs.progress import JobProgress, Word
from common.jobs.spec import CompressionSpec, JobSpec, TunerSpec
from services.admin.live.answers import curves_answer, updates_page, workers_answer
from services.admin.live.listing import NUMBERS
from services.admin.middleware.access import OPERATOR, Operator
from services.admin.middleware.problems import documented
from services.admin.routes.requests import (
    JOB,
    YAML_TYPE,
    BodyRoute,
    JobName,
    job_file,
    strictly,
)
from services.admin.service import Answering  # noqa: TC001 -- FastAPI reads it when run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi.openapi.models import Example

    from services.admin.live.followers import JobFollower

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=BodyRoute)

_EXAMPLES: Final[dict[str, Example]] = {
    "digits": {"summary": "Handwritten digits from two clinics", "value": JOB}
}
# Upper limit of counts of records and batches.
_MOST: Final = 2**31 - 1
_MOST_VERSIONS: Final = 2**63 - 1
_LONGEST_DEADLINE_S: Final = 10 * 365 * 86_400.0


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class JobPatch(TypedDict, total=False):
    """Changes of a job; fields that are left out stay the same."""

    wanted: Annotated[
        Wanted,
        Field(
            description="Optional. Desired state of the job. `running` resumes a job that is"
            " paused, stopped, or held (stopped by DOLL until a person decides) where it ended. If"
            " unset, the state stays the same.",
            examples=["paused"],
        ),
    ]
    reason: Annotated[
        str,
        Field(
            max_length=500,
            description="Optional. Reason for the change, for the job's history.",
            examples=["prices are high"],
        ),
    ]
    after_loss: Annotated[
        bool,
        Field(
            description="Optional. Only with `wanted: running`. True to accept a loss of data: if"
            " the job is held because Kafka lost records, it continues from the newest snapshot"
            " for which its own topics are still complete, and reads each stream from where"
            " records are missing. If the job waits for a missing checkpoint, it continues from"
            " the newest checkpoint that exists.",
            examples=[False],
        ),
    ]
    from_start: Annotated[
        bool,
        Field(
            description="Optional. Only with `after_loss`. True to permit the job to start again"
            " from the first version of its model, if no snapshot and no checkpoint is left.",
            examples=[False],
        ),
    ]
    read_from: Annotated[
        Literal["earliest", "latest"],
        Field(
            description="Optional. Only with `after_loss`. Where to start in streams whose Kafka"
            " topics were deleted and created again: `earliest` for their first record, `latest`"
            " for records that arrive from now on. If unset, a job with such a stream is held"
            " again until a person decides.",
            examples=["earliest"],
        ),
    ]
    deadline_s: Annotated[
        float | None,
        Field(
            gt=0,
            le=_LONGEST_DEADLINE_S,
            description="Optional. Deadline in seconds after the job's submission; null removes the"
            " deadline. If unset, the deadline stays the same.",
            examples=[6720.0],
        ),
    ]
    group_size: Annotated[
        int,
        Field(
            ge=1,
            le=_MOST,
            description="Optional. Number of batches per update of the model (K). With `reduction:"
            " mean` and the optimizer `sgd` or `momentum`, the learning rate changes in"
            " proportion, unless `learning_rate` is set, too. If unset, K stays the same.",
            examples=[20],
        ),
    ]
    batch_size: Annotated[
        int,
        Field(
            ge=1,
            le=_MOST,
            description="Optional. Number of records per batch (b). If unset, b stays the same.",
            examples=[256],
        ),
    ]
    learning_rate: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="Optional. Learning rate of the job's optimizer. If unset, the rate stays"
            " the same, or changes in proportion to `group_size`.",
            examples=[0.001],
        ),
    ]
    oom: Annotated[
        Literal["chunk", "hold"] | None,
        Field(
            description="Optional. Rule for a batch that does not fit into a worker's memory:"
            " `chunk` computes it in parts, `hold` computes no part; null restores the default. If"
            " unset, the rule stays the same.",
            examples=["chunk"],
        ),
    ]
    synchronisation: Annotated[
        SynchronisationSpec | None,
        Field(
            description="Optional. Block `synchronisation` of the job file (whether workers wait"
            " for each other), which replaces the job's entire block; null restores the default."
            " If unset, the block stays the same.",
            examples=[{"mode": "stale"}],
        ),
    ]
    compression: Annotated[
        CompressionSpec | None,
        Field(
            description="Optional. Block `compression` of the job file (which changes of the model"
            " are sent to workers), which replaces the job's entire block; null removes it. If"
            " unset, the block stays the same.",
            examples=[{"significance": 1.5}],
        ),
    ]
    tuner: Annotated[
        TunerSpec | None,
        Field(
            description="Optional. Block `tuner` of the job file (settings that DOLL tunes), which"
            " replaces the job's entire block; null removes it. If unset, the block stays the"
            " same.",
            examples=[{"group_size": [2, 24]}],
        ),
    ]
    aggregation: Annotated[
        AggregationSpec | None,
        Field(
            description="Optional. Block `aggregation` of the job file (where gradients are summed"
            " and weights are held), which replaces the job's entire block; null restores the"
            " default. The change takes effect after the newest version of the model is in object"
            " storage. If unset, the block stays the same.",
            examples=[{"mode": "group"}],
        ),
    ]
    revision: Annotated[
        int,
        Field(
            ge=0,
            le=_MOST,
            description="Optional. Revision of the job's settings (number of earlier changes) that"
            " the caller has seen. If the job is at another revision, the change is refused with"
            " 409. If unset, any revision is accepted.",
            examples=[0],
        ),
    ]


@router.post(
    "",
    status_code=201,
    response_model=SubmittedJob,
    dependencies=[OPERATOR, Depends(job_file)],
    openapi_extra={"requestBody": {"content": {YAML_TYPE: {"schema": {"type": "string"}}}}},
    responses={
        **documented(404, 409, 502, 504),
        201: {
            "headers": {
                "Location": {"schema": {"type": "string"}, "description": "URL path of the job."}
            }
        },
    },
    response_description="The job was submitted, or an earlier request with the same"
    " `Idempotency-Key` had submitted it. The header `Location` contains its URL path.",
)
async def create_job(
    service: Answering,
    caller: Operator,
    spec: Annotated[JobSpec, strictly(JobSpec), Body(openapi_examples=_EXAMPLES)],
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=200,
            description="Optional. Any text that identifies the request, so that it can be"
            " repeated: the same key with the same job returns the job that was created first; the"
            " same key with another job is refused with 422. Keys of different callers are"
            " independent.",
            examples=["3f1c2b9e-6a55-4a63-9d3e-0f7a2b1c4d5e"],
        ),
    ] = None,
    source: Annotated[
        str,
        Query(
            alias="from",
            max_length=200,
            description="Optional. Checkpoint of another job to start from: the other job's name,"
            " or JOB@VERSION, where VERSION is the number of a version of its model, `newest` or"
            " `best` (lowest loss). If unset, the job starts from initial weights.",
            examples=["letters@best"],
        ),
    ] = "",
    *,
    unchecked: Annotated[
        bool,
        Query(
            description="Optional. True to accept the job without building its task and checking"
            " the size of its model."
        ),
    ] = False,
) -> Response:
    """Submit a job as JSON or as a job file in YAML.

    The job is checked before the response is sent. The check builds the job's task (model, loss and
    metrics), which takes up to 60 s.
    """
    # Invalid options are refused before the request waits for its turn.
    check_options(spec)
    model_mb, why_not = await service.check(spec, unchecked=unchecked)
    if why_not is not None:
        why_not.refuse()
    request = _fingerprint(caller.name, idempotency_key, spec, source) if idempotency_key else ""
    origin, beginning = None, ""
    if source:
        origin, beginning = await service.apart(
            caller, lambda jobs: jobs.copy_checkpoint(spec, source, request)
        )
    record, new = await service.write(caller, lambda jobs: jobs.submit(spec, request, origin))
    if new:
        now, job = service.clock(), JobProgress(record)
        answer = job_answer(record, job.state(now), progress_answer(job, now))
    else:
        body = (await service.followers.ready(spec.name)).job_json(record)
        answer = JobAnswer.model_validate_json(body)
    note = gpu_note(spec, model_mb, service.followers.smallest_gpu())
    submitted = SubmittedJob.model_validate(
        {
            **dict(answer),
            "notes": (*answer.notes, *filter(None, [note])),
            "beginning": beginning,
            "checked": why_not is None,
            "unchecked": "" if why_not is None else why_not.why,
        }
    )
    location = {"Location": f"/v1/jobs/{spec.name}"}
    return Response(submitted.model_dump_json(), 201, location, media_type="application/json")


class ListQuery(BaseModel):
    """Selection and order of jobs."""

    wanted: Wanted | None = Field(
        default=None,
        description="Optional. List only jobs with this desired state. If unset, jobs with any"
        " desired state.",
        examples=["running"],
    )
    state: Word | None = Field(
        default=None,
        description="Optional. List only jobs that are in this state. If unset, jobs in any state.",
        examples=["held"],
    )
    text: str = Field(
        default="",
        max_length=100,
        description="Optional. List only jobs that have this text, in upper or lower case, in"
        " their name, state, task or the name of a stream. If unset, all jobs.",
        examples=["clinic"],
    )
    sort: str = Field(
        default="id",
        pattern=f"^-?(id|state|{'|'.join(NUMBERS)})$",
        description="Field to sort jobs by; jobs with the same value are sorted by name. A leading"
        " minus sorts in descending order. `state` lists jobs that wait for a person (held) first."
        " Jobs without a value come last.",
        examples=["-lag"],
    )
    limit: Annotated[
        int, Field(ge=1, le=500, description="Maximum number of jobs to return.", examples=[100])
    ] = 100
    after: str = Field(
        default="",
        max_length=100,
        description="Optional. List only jobs after the job of this name: the value of `next` on"
        " the previous page. If unset, the first page is listed.",
        examples=["digits"],
    )


@router.get(
    "",
    response_model=JobList,
    response_description="One page of the list of jobs that match the request.",
)
async def list_jobs(
    request: Request, service: Answering, asked: Annotated[ListQuery, Query()]
) -> Response:
    """List jobs with their state and progress."""
    followers, listing = service.followers, service.followers.listing
    listing.renew()
    await followers.known(listing.unread())
    listing.renew()
    rows, order, text = listing.rows, listing.order(asked.sort), asked.text.lower()

    def matching(names: Sequence[str]) -> Sequence[str]:
        if not (asked.wanted or asked.state or text):
            return names
        return [
            name
            for name in names
            if asked.wanted in (None, rows[name].record.wanted)
            and asked.state in (None, rows[name].summary.state.word)
            and text in rows[name].words
        ]

    found = left = matching(order)
    if (after := asked.after) in rows:
        left = matching(order[order.index(after) + 1 :])
    elif after and asked.sort != "id":
        raise UserError(
            f'after: the job "{after}" no longer exists; start again with the first page'
        )
    elif after:
        left = [name for name in found if name > after]
    shown = [rows[name] for name in left[: asked.limit]]
    await followers.known([row.record for row in shown])
    if await request.is_disconnected():
        raise ClientDisconnect
    listing.renew()
    # A job that was deleted meanwhile is shown with its last row.
    shown = [rows.get(row.record.spec.name, row) for row in shown]
    answer = JobList(
        jobs=(),
        states=listing.states(),
        total=len(found),
        unreadable=() if after else unreadable_records(service.stores.unreadable),
        next=shown[-1].record.spec.name if len(left) > len(shown) else None,
    )
    rest = answer.model_dump_json().encode().removeprefix(b'{"jobs":[]')
    body = b'{"jobs":[%b]%b' % (b",".join(row.json for row in shown), rest)
    return Response(body, media_type="application/json")


@router.get(
    "/{job}",
    response_model=JobAnswer,
    responses=documented(404),
    response_description="The job with its job file, state and progress.",
)
async def get_job(service: Answering, job: JobName) -> Response:
    """Show a job and its progress."""
    follower = await service.followers.ready(job)
    return Response(follower.job_json(service.job(job)), media_type="application/json")


@router.patch(
    "/{job}",
    response_model=JobAnswer,
    responses=documented(404, 409, 502, 504),
    response_description="The job after the change.",
)
async def change_job(
    service: Answering,
    caller: Operator,
    job: JobName,
    patch: Annotated[JobPatch, strictly(JobPatch), Body()],
) -> Response:
    """Pause, resume or stop a job, or change its settings.

    New settings apply from the next update of the model on.
    """
    fields = cast("dict[str, Any]", patch)
    changed = {name: plain(fields.pop(name)) for name in CHANGEABLE if name in fields}
    # A job with changed blocks may need more memory, so it is checked again.
    if not changed.keys().isdisjoint(BLOCKS):
        await service.check(changed_spec(service.job(job).spec, changed))
    record = await service.write(caller, lambda jobs: jobs.change(job, changed=changed, **fields))
    try:
        follower = await service.followers.ready(job)
    # The change was made, so the answer shows everything that is known.
    except UnavailableError:
        follower = service.followers.of(job)
    return Response(follower.job_json(record), media_type="application/json")


@router.delete(
    "/{job}",
    status_code=204,
    responses={
        **documented(404, 409, 502, 504),
        200: {
            "model": RemainsAnswer,
            "description": "With `purge`: the topics and files of the job that were removed.",
        },
    },
    response_description="The job was deleted.",
)
async def delete_job(
    service: Answering,
    caller: Operator,
    job: JobName,
    *,
    purges: Annotated[
        bool,
        Query(
            alias="purge",
            description="Optional. True to also remove the job's Kafka topics, Redis keys and"
            " files and to make its name available again. This also works for a job that was"
            " already deleted, and can be repeated. The response is then 200 and lists what was"
            " removed.",
        ),
    ] = False,
) -> Response:
    """Delete a stopped job.

    Its history and files are kept unless `purge` is set.
    """
    if not purges:
        await service.write(caller, lambda jobs: jobs.delete(job))
        return Response(status_code=204)
    removed = remains_answer(await service.apart(caller, lambda jobs: jobs.purge(job)))
    # The next request no longer finds the job.
    await service.stores.write(lambda store: store.read())
    return Response(removed.model_dump_json(), media_type="application/json")


@router.get(
    "/{job}/remains",
    responses=documented(404, 409, 502),
    response_description="The topics and files that a purge of the job would remove.",
)
async def list_remains(service: Answering, job: JobName) -> RemainsAnswer:
    """List the topics and files that a purge of a stopped or deleted job would remove."""
    return remains_answer(await service.apart(None, lambda jobs: jobs.remains(job)))


@router.get(
    "/{job}/updates",
    responses=documented(404),
    response_description="One page of the list of the job's updates.",
)
async def list_updates(
    service: Answering,
    job: JobName,
    after: Annotated[
        int,
        Query(
            ge=0,
            le=_MOST_VERSIONS,
            description="Optional. List only updates that made a higher version of the model than"
            " this: the value of `next` on the previous page. If unset, the first page is listed.",
            examples=[400],
        ),
    ] = 0,
    limit: Annotated[
        int,
        Query(ge=1, le=1000, description="Maximum number of updates to return.", examples=[100]),
    ] = 100,
) -> UpdatesPage:
    """List a job's updates by version of the model.

    Updates that were rolled back when another coordinator took over the job are not listed.
    """
    follower = await service.followers.ready(job)
    with follower.view() as view:
        return updates_page(view.job, after, limit)


@router.get(
    "/{job}/workers",
    responses=documented(404),
    response_description="The workers of the job.",
)
async def list_workers(service: Answering, job: JobName) -> WorkersAnswer:
    """List a job's workers by name.

    The list contains all workers that send heartbeats, and rented machines whose worker sends none.
    """
    follower = await service.followers.ready(job)
    with follower.view() as view:
        return workers_answer(view.job, view.ledger, service.clock())


@router.get(
    "/{job}/streams",
    responses=documented(404),
    response_description="The data streams of the job.",
)
async def list_streams(service: Answering, job: JobName) -> StreamsAnswer:
    """List a job's data streams with arrival rate, lag and number of unusable records."""
    follower = await service.followers.ready(job)
    with follower.view() as view:
        return StreamsAnswer.model_validate({"streams": view.job.streams()})


@router.get(
    "/{job}/curves",
    responses=documented(404),
    response_model=CurvesAnswer,
    response_description="The history of the job as curves.",
)
async def get_curves(service: Answering, job: JobName) -> Response:
    """Show a job's history as curves of about 2,000 points, no matter how long it has run."""
    follower = await service.followers.ready(job)
    # Thousands of points take tens of milliseconds, which would block the event loop.
    body = await asyncio.to_thread(_curves, follower, service.clock())
    return Response(body, media_type="application/json")


def _fingerprint(caller: str, key: str, spec: JobSpec, source: str) -> str:
    """Return a fingerprint of caller, key and content that identifies a repeated request."""
    what = f"{source} {spec.model_dump_json()}"
    return f"{fingerprint(f'{caller} {key}')}:{fingerprint(what)}"


def _curves(follower: JobFollower, now: float) -> str:
    with follower.view() as view:
        body = curves_answer(view.job, view.ledger, now)
    return body.model_dump_json()
