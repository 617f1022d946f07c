"""`/v1/jobs/{job}/events`: a job's events, as server-sent events.

| event      | sent                                               | data                           |
| ---------- | -------------------------------------------------- | ------------------------------ |
| job        | first; when the job changes; when updates are      | `JobAnswer`                    |
|            | taken back                                         |                                |
| update     | when the model is updated, at most 20 times a      | `UpdateEvent`: the newest, and |
|            | second                                             | how many it stands for         |
| evaluation | when an evaluator has evaluated a version          | `EvaluationEvent`              |
| drift      | when a stream's errors have risen                  | `DriftAnswer`                  |
| member     | when a worker is alive, leaving, gone or failed    | `MemberEvent`                  |
| machine    | when a machine was ordered, runs, or has ended     | `MachineEvent`                 |
| plan       | when the policy has decided                        | `PlanInForce`                  |
| review     | when cost and stability were reviewed              | `ReviewEvent`                  |

The job's follower makes each event once; a stream only sends events from the ring.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Header
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from common.api.answers import EVENT_DATA
from services.admin.middleware.access import Viewer  # noqa: TC001 -- FastAPI reads it when run
from services.admin.middleware.problems import documented
from services.admin.routes.requests import JobName  # noqa: TC001 -- FastAPI reads it when run
from services.admin.service import Answering  # noqa: TC001 -- FastAPI reads it when run

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from services.admin.live.followers import JobFollower

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

# Seconds without an event before a ping; proxies close idle connections.
PING_S = 15.0
# Maximum time that a write may take once the connection's buffers are full.
SEND_S = 10.0
# Time that a browser waits before it reconnects.
RETRY_MS = 2000

_PING = b": nothing new\n\n"
_EXAMPLE = (
    'id: 5f0c9a1be0a7c3d2-411\nevent: update\ndata: {"version":412,"epoch":3,"at_s":1767225600.0,'
    '"samples":5120,"batches":20,"loss":0.412,"gradient_s":0.021,"revision":0,"short":"",'
    '"metrics":{"accuracy":0.88},"count":1}\n\n'
)


class EventStream(StreamingResponse):
    """Sends a job's events until the client disconnects or loses access, or the events end.

    The events end when the job is deleted or the service shuts down. A client that is too slow is
    disconnected. It can reconnect with its last id and continue, as long as the ring still has the
    next event.

    Args:
        follower: The job's follower, which must be ready.
        last_event_id: Last event that a reconnecting client received, or empty.
        allowed: Returns True while the client has access; its key may be revoked.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        follower: JobFollower,
        last_event_id: str = "",
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._parts(), headers=headers)
        self._follower = follower
        self._last_event_id = last_event_id
        self._allowed = allowed
        self._news = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request.

        Raises:
            ClientDisconnect: If the client is too slow.
        """
        feed, loop = self._follower.feed, asyncio.get_running_loop()

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_S):
                    await send(message)
            except TimeoutError as error:
                raise ClientDisconnect from error

        feed.listen(loop, self._news)
        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            # The job counts as watched for some more seconds, because the client may reconnect.
            self._follower.asked_s = monotonic()
            feed.unlisten(self._news)

    async def _parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body until the stream ends."""
        feed, begin = self._follower.feed, b"retry: %d\n\n" % RETRY_MS
        number = feed.after(self._last_event_id)
        if number is None:
            number = feed.end
            begin += feed.event("job", self._follower.job_json(), number - 1)
        yield begin
        while not feed.closed and self._allowed():
            self._news.clear()
            found = feed.since(number)
            if found is None:
                # The client missed events. It reconnects and starts again.
                break
            data, number = found
            if not data:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PING_S):
                        await self._news.wait()
                    continue
            yield data or _PING


@router.get(
    "/{job}/events",
    response_class=EventStream,
    # The OpenAPI document needs it, because this response class has no such parameter.
    status_code=200,
    responses={
        **documented(404),
        200: {
            "description": "Stream of events, each with the schema of its data in JSON: "
            + ", ".join(f"`{name}` ({model.__name__})" for name, model in EVENT_DATA.items())
            + ". A new stream begins with a `job` event.",
            "content": {"text/event-stream": {"example": _EXAMPLE}},
        },
    },
)
async def stream_events(
    service: Answering,
    caller: Viewer,
    job: JobName,
    last_event_id: Annotated[
        str,
        Header(
            max_length=100,
            description="Optional. Id of the last event that the client received. The stream"
            " continues with the next event. If unset, or if the service no longer has the next"
            " event, the stream begins with a `job` event.",
            examples=["5f0c9a1be0a7c3d2-411"],
        ),
    ] = "",
) -> EventStream:
    """Stream events of a job as they happen: updates, workers, machines and plans."""
    follower = await service.followers.ready(job)
    return EventStream(follower, last_event_id, lambda: service.lets_in(caller))
