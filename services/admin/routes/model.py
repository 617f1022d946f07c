"""`/v1/jobs/{job}/model`: a model's weights as safetensors, without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from common.api.answers import KeptVersions  # noqa: TC001 -- FastAPI reads it when run
from common.api.model import about_model, tag_of, versions_answer
from common.errors import FutureFormatError, OutsideError
from common.jobs.models import (
    KeptModel,
    ReportSkipped,
    VersionSelector,
    all_kept,
    find_kept,
    find_model,
    parse_version,
    whole_model,
)
from common.telemetry.logging import event_logger
from services.admin.middleware.problems import Responses, documented
from services.admin.routes.requests import JobName  # noqa: TC001 -- FastAPI reads it when run
from services.admin.service import Answering  # noqa: TC001 -- FastAPI reads it when run

if TYPE_CHECKING:
    from common.jobs.servers import Outside
    from common.jobs.store import JobRecord
    from common.kafka.port import Log
    from services.admin.service import AdminService

T = TypeVar("T")
router = APIRouter(prefix="/v1/jobs/{job}/model", tags=["jobs"])

_KIND = "application/octet-stream"
_EPOCH = (
    "Epoch of the job's leader (a coordinator) that made this version of the model. Each new leader"
    " has a higher epoch than all leaders before it. -1 for the initial weights."
)
_HEADERS = {
    name: {"schema": {"type": kind}, "description": description}
    for name, kind, description in (
        ("ETag", "string", "Entity tag of the model file, for `If-None-Match`."),
        ("Doll-Epoch", "integer", _EPOCH),
        (
            "Doll-Version",
            "integer",
            "Version of the model (J): number of updates that it contains.",
        ),
    )
}
_ANSWERS: Responses = {
    200: {
        "description": "Weights of the model as a safetensors file. To load it:"
        " `module.load_state_dict(safetensors.torch.load(...))`.",
        "content": {_KIND: {"schema": {"type": "string", "format": "binary"}}},
        "headers": _HEADERS,
    },
    304: {
        "description": "The client already has this model: `If-None-Match` names its entity tag.",
        "headers": _HEADERS,
    },
    **documented(404, 502),
}
_HEAD_ANSWERS: Responses = _ANSWERS | {
    200: _ANSWERS[200] | {"description": "The model exists. Its weights are not sent."},
}

_log = event_logger(__name__)


_Version: TypeAlias = Annotated[
    str,
    Query(
        max_length=15,
        json_schema_extra={"pattern": "^(newest|best|[0-9]{1,15})$"},
        description="Version of the model: its number (J), `newest`, or `best`, the downloadable"
        " version with the lowest mean loss over its last updates.",
        examples=["best"],
    ),
]
_IfNoneMatch: TypeAlias = Annotated[
    str | None,
    Header(
        max_length=1000,
        description="Optional. Entity tags of models that the client already has. If the selected"
        " model is one of them, the response is 304 without a body. If unset, the model is always"
        " sent.",
        examples=['"12-400-0123456789abcdef"'],
    ),
]


@router.get("", response_class=Response, responses=_ANSWERS)
async def get_model(
    service: Answering,
    job: JobName,
    version: _Version = "newest",
    if_none_match: _IfNoneMatch = None,
) -> Response:
    """Download a model's weights as a safetensors file.

    The file's metadata describes the model. Versions that were rolled back when another coordinator
    took over the job are not available.
    """
    record, selector = service.job(job), parse_version(version)
    if if_none_match is not None:
        answer = await _without_weights(service, record, selector, if_none_match)
        if answer.status_code == 304:
            return answer
    find = partial(find_model, record.id, selector)
    found = await service.models.run(partial(_ask, service, job, find))
    about = about_model(record, found.kept)
    data = await service.models.run(partial(whole_model, record.id, found, service.outside, about))
    return Response(data, headers=_headers(record, found.kept), media_type=_KIND)


@router.head("", response_class=Response, responses=_HEAD_ANSWERS)
async def head_model(
    service: Answering,
    job: JobName,
    version: _Version = "newest",
    if_none_match: _IfNoneMatch = None,
) -> Response:
    """Return the headers of a download of a job's model, without the weights."""
    return await _without_weights(service, service.job(job), parse_version(version), if_none_match)


@router.get(
    "/versions",
    responses=documented(404, 502),
    response_description="The versions of the model that can be downloaded.",
)
async def list_versions(service: Answering, job: JobName) -> KeptVersions:
    """List the versions of the model whose weights are kept and can be downloaded.

    Versions that were rolled back when another coordinator took over the job are not listed.
    """
    record = service.job(job)
    found = await service.models.run(partial(_ask, service, job, partial(all_kept, record.id)))
    return versions_answer(found)


async def _without_weights(
    service: AdminService, record: JobRecord, selector: VersionSelector, if_none_match: str | None
) -> Response:
    find = partial(find_kept, record.id, selector)
    kept = await service.models.run(partial(_ask, service, record.spec.name, find))
    headers = _headers(record, kept)
    known = if_none_match is not None and _holds(if_none_match, headers["ETag"])
    return Response(status_code=304 if known else 200, headers=headers, media_type=_KIND)


def _headers(record: JobRecord, kept: KeptModel) -> dict[str, str]:
    job, (epoch, version) = record.spec.name, kept.snapshot.made
    return {
        "ETag": tag_of(kept, about_model(record, kept)),
        "Doll-Epoch": str(epoch),
        "Doll-Version": str(version),
        "Content-Disposition": f'attachment; filename="{job}-{version}.safetensors"',
    }


def _ask(service: AdminService, job: str, find: Callable[[Outside, Log, ReportSkipped], T]) -> T:
    """Find a model.

    Raises:
        NotFoundError: If the version is not kept.
        OutsideError: If the version cannot be read.
    """
    log = _log.bind(job=job)
    try:
        return find(
            service.outside,
            service.log(),
            lambda reason: log.warning("model_passed_over", reason=reason),
        )
    except FutureFormatError as error:
        raise OutsideError(str(error)) from error


def _holds(header: str, tag: str) -> bool:
    """Return True if `If-None-Match` names a tag; weak tags count, too."""
    named = {each.strip().removeprefix("W/") for each in header.split(",")}
    return bool(named & {tag, "*"})
