"""A job's server-sent events, across connections that break."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from doll.connection import Connection, path_of
from doll.errors import UnavailableError

PATIENCE_S = 60.0  # that a service may be away
AGAIN_S = 0.2  # before the first look whether it is back; each further wait is twice as long
LONGEST_S = 5.0


class Event(NamedTuple):
    """Something that happened; `/docs` has the data of each kind."""

    kind: str
    data: str  # JSON


def events(connection: Connection, job: str) -> Iterator[Event]:
    """What happens to a job, from now on; `job` comes first, and where events were missed.

    Raises:
        UserError: If there is no such job (any more), or the key does not count (any more).
        OutsideError: If the service is away for a minute, or has a fault.
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
    """Events of a stream with their ids; comments, and what is cut off at the end, are none."""
    fields = dict[str, str]()
    for line in lines:
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
            continue
        if "event" in fields:
            yield fields.get("id", ""), Event(fields["event"], fields.get("data", ""))
        fields.clear()
