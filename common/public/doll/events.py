"""A job's server-sent events; reconnects if a connection breaks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from doll.connection import Connection, path_of
from doll.errors import UnavailableError

# Longest time without an event while the service cannot be reached.
PATIENCE_S = 60.0
# Wait before the first reconnection. Each further wait is twice as long, up to LONGEST_S.
AGAIN_S = 0.2
LONGEST_S = 5.0


class Event(NamedTuple):
    """Event of a job. The service's `/docs` describes the data of each kind.

    Attributes:
        kind: Name of the kind, such as `update`.
        data: JSON.
    """

    kind: str
    data: str


def events(connection: Connection, job: str) -> Iterator[Event]:
    """Yield events of a job from now on.

    The first event has the kind `job`. Another `job` event comes after each change of the job, and
    whenever events were missed.

    Raises:
        UserError: If there is no such job, or the key is not valid; also later, while events come.
        OutsideError: If the service cannot be reached for a minute, or has a fault.
    """
    last_id, last_event_s, wait_s = "", time.monotonic(), AGAIN_S
    while True:
        headers = {"Last-Event-ID": last_id} if last_id else {}
        try:
            with connection.stream(path_of(job, "events"), headers) as answer:
                for event_id, event in _parsed(answer.iter_lines()):
                    last_id = event_id
                    yield event
                    last_event_s, wait_s = time.monotonic(), AGAIN_S
        except UnavailableError:
            if time.monotonic() - last_event_s > PATIENCE_S:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_S)


def _parsed(lines: Iterable[str]) -> Iterator[tuple[str, Event]]:
    """Yield the events of a stream with their ids; skip comments and an incomplete last event."""
    fields = dict[str, str]()
    for line in lines:
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
            continue
        if "event" in fields:
            yield fields.get("id", ""), Event(fields["event"], fields.get("data", ""))
        fields.clear()
