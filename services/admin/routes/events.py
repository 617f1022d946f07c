"""`/v1/jobs/{job}/events`: what happens, as server-sent events.

| event      | when                                               | data                           |
| ---------- | -------------------------------------------------- | ------------------------------ |
| job        | at first; when it is changed; when updates were    | `JobAnswer`                    |
|            | taken back                                         |                                |
| update     | the model was updated, at most 20 times a second   | `UpdateEvent`: the newest, and |
|            |                                                    | how many it stands for         |
| evaluation | an evaluator judged a version                      | `EvaluationEvent`              |
| drift      | a stream's errors have risen                       | `DriftAnswer`                  |
| member     | a worker is alive, leaving or gone                 | `MemberEvent`                  |
| machine    | one was ordered, runs, or has ended                | `MachineEvent`                 |
| plan       | the policy decided                                 | `PlanInForce`                  |
| review     | cost and stability were reviewed                   | `ReviewEvent`                  |

Each event is made once, by the job's follower; a stream only sends what the ring holds.
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
from services.admin.service import Answering  # noqa: TC001 -- likewise

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from services.admin.live.followers import JobFollower

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

PING_S = 15.0  # without an event: proxies close connections on which nothing happens
SEND_S = 10.0  # that a reader may take for what the connection's buffers do not hold
RETRY_MS = 2000  # what a browser waits before it comes back

_PING = b": nothing new\n\n"
_EXAMPLE = (
    'id: 5f0c9a1be0a7c3d2-411\nevent: update\ndata: {"version":412,"epoch":3,"at_s":1767225600.0,'
    '"samples":5120,"batches":20,"loss":0.412,"gradient_s":0.021,"revision":0,"short":"",'
    '"metrics":{"accuracy":0.88},"count":1}\n\n'
)


class EventStream(StreamingResponse):
    """Sends a job's events until the reader goes or may no longer have them, or there are no more.

    There are no more when the job is deleted or the service ends.

    A reader that is too slow is sent away: with the last id that it had it may go on, as long as
    what follows is still in the ring.

    Args:
        follower: Of the job; it knows all that had happened before.
        last_event_id: What a reader that comes back had last; empty: it begins.
        allowed: Whether the reader still may have them: a key may be revoked meanwhile.
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
        """Answer, as ASGI wants it.

        Raises:
            ClientDisconnect: If the reader is too slow.
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
            # The job counts as watched for some seconds more: the reader may come back.
            self._follower.asked_s = monotonic()
            feed.unlisten(self._news)

    async def _parts(self) -> AsyncIterator[bytes]:
        """What is sent, until there is no more."""
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
                break  # it lost some; when it comes back it begins anew
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
    status_code=200,  # the document needs it said where the response class has no such parameter
    responses={
        **documented(404),
        200: {
            "description": "Events, by name, and the schema of their data: "
            + ", ".join(f"`{name}` ({model.__name__})" for name, model in EVENT_DATA.items())
            + "; `job` comes first.",
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
            description="Of the last event that was had: what came since is sent, if it is still"
            " known; else the stream begins with `job`.",
            examples=["5f0c9a1be0a7c3d2-411"],
        ),
    ] = "",
) -> EventStream:
    """Follow a job: updates, workers, machines, plans, as they come."""
    follower = await service.followers.ready(job)
    return EventStream(follower, last_event_id, lambda: service.lets_in(caller))
