"""Pauses: gaps between updates although everything that updates need is available.

Updates need the broker, Redis, readable records (an open transaction hides those behind it), one
coordinator, and one worker connected to both servers. While one of these is unavailable, no update
can come, so that time is an outage and not part of a pause. Updates do not need object storage,
other workers or other coordinators: losing them must not stop anything.

    updates    | | |                                    | | |     raw pause: the whole gap
    broker              xxxxxxxxx                                 unavailable
    workers                  xxxxxxxxxxxx                         all workers unavailable
    pauses         ....                  ...............          pause: the longest of these
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from datetime import datetime
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from common.core.snapshot_search import SEARCH_AGAIN_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from load.faults.schedule import Fault

Span: TypeAlias = tuple[float, float]

_START_S = 5.0  # Start of a coordinator.
# Minimum time for which a fault is taken to have an effect. A reset, or the kill of a process that
# is replaced quickly, ends sooner.
_FELT_S = 2.0
# Kinds of fault during which the target keeps working, if badly.
_GOES_ON = frozenset(
    {
        "Redis evicting",
        "Redis flushed",
        "highest trigger forged",
        "epoch of a trigger forged",
        "partition added",
        "worker-Redis slow",
        "worker-Kafka slow",
    }
)
# Log events of services, and the part of a pause that each event ends. For example, a service that
# logs that it lost its leadership has detected a problem.
_ENDS = {
    "service_started": "start",
    "job_selected": "start",
    "worker_joins": "start",
    "leadership_lost": "detect",
    "board_wiped": "detect",
    "stands_to_lead": "decide",
    "leader_elected": "decide",
    "partitions_revoked": "rebalance",
    "partitions_assigned": "rebalance",
    # The leader has decided all claims, and publishes the offsets to read.
    "reading_from": "replay",
}
_ENDINGS = {"_unavailable": "detect", "_recovered": "reconnect"}
# Rest of a pause after its last event.
LAST = "first update"
PARTS = ("detect", "reconnect", "start", "decide", "replay", "rebalance", LAST)


class CarriedOut(NamedTuple):
    """A fault as it was carried out. Times count from the beginning of the run."""

    fault: Fault
    began_s: float
    # Time at which its target works again, as far as an observer can see.
    ended_s: float

    @property
    def span_s(self) -> Span:
        """Span of the fault's effect."""
        return self.began_s, max(self.ended_s, self.began_s + _FELT_S)


class Event(NamedTuple):
    """A line of a service's log. Its time counts from the beginning of the run."""

    at_s: float
    service: str
    name: str


def outages(carried_out: Iterable[CarriedOut], workers: int, coordinators: int) -> list[Span]:
    """Return the times when something that updates need was unavailable, disjoint and in order.

    Args:
        carried_out: Faults carried out.
        workers: Number of workers.
        coordinators: Number of coordinators.
    """
    needed, each_worker = _away(carried_out, workers, coordinators)
    return _union([*needed, *_common(each_worker)])


def limit(
    carried_out: Iterable[CarriedOut], workers: int, coordinators: int, seconds: float
) -> float:
    """Return the share of the workers' time in which they had all they need. No job can use more.

    An open transaction holds back records of its own partition only, so it is ignored here.

    Args:
        carried_out: Faults carried out.
        workers: Number of workers.
        coordinators: Number of coordinators.
        seconds: Length of the run.
    """
    lasting = [each for each in carried_out if each.fault.family != "transactions"]
    needed, each_worker = _away(lasting, workers, coordinators)
    away_s = sum(
        length((begin, min(end, seconds)))
        for spans in each_worker
        for begin, end in _union([*needed, *spans])
    )
    return 1.0 - away_s / (workers * seconds)


def pauses(times: Sequence[float], away: Sequence[Span]) -> list[Span]:
    """Return, for each pair of consecutive updates, the longest span between them without outages.

    Args:
        times: Times of the updates, ascending.
        away: Result of `outages`.
    """
    found = list[Span]()
    for earlier, later in pairwise(times):
        inside = [span for span in away if span[0] < later and span[1] > earlier]
        ends = (earlier, *(end for _, end in inside))
        begins = (*(begin for begin, _ in inside), later)
        found.append(max(zip(ends, begins, strict=True), key=length))
    return found


def length(span: Span) -> float:
    """Return the length of a span. It is 0 if an outage filled the gap."""
    return max(span[1] - span[0], 0.0)


def longest(between: Sequence[Span], begin: float = -math.inf, end: float = math.inf) -> Span:
    """Return the longest span that overlaps an interval, or else an empty span."""
    inside = (span for span in between if span[1] > begin and span[0] <= end)
    return max(inside, key=length, default=(0.0, 0.0))


def parts(pause: Span, events: Sequence[Event]) -> dict[str, float]:
    """Return what a pause consists of, in seconds by part.

    Each moment belongs to the part that the next event of any service ends, and moments after the
    last event to the first update. This is a reading of the logs, not a proof of what waited for
    what.

    Args:
        pause: The pause.
        events: All events, by time.
    """
    found = dict.fromkeys(PARTS, 0.0)
    at_s, until_s = pause
    for event in events[bisect_right(events, at_s, key=attrgetter("at_s")) :]:
        if event.at_s >= until_s:
            break
        part = _ENDS.get(event.name) or next(
            (part for ending, part in _ENDINGS.items() if event.name.endswith(ending)), ""
        )
        if part:
            found[part] += event.at_s - at_s
            at_s = event.at_s
    found[LAST] += max(until_s - at_s, 0.0)
    return {part: seconds for part, seconds in found.items() if seconds}


def next_after(times: Sequence[float], at: float) -> float | None:
    """Return the first of some ascending times after `at`."""
    index = bisect_right(times, at)
    return times[index] if index < len(times) else None


def read_events(folder: Path, began_s: float) -> list[Event]:
    """Return the events that services logged, by time.

    Args:
        folder: Folder of the services' logs, one event per line of JSON.
        began_s: Beginning of the run, in seconds since 1970.
    """
    found = list[Event]()
    for log in folder.glob("*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith('{"time"') and line.endswith("}"):
                # Other lines are incomplete or not from our logger.
                entry = json.loads(line)
                at_s = datetime.fromisoformat(entry["time"]).timestamp() - began_s
                found.append(Event(at_s, log.stem, entry["event"]))
    return sorted(found)


def _away(
    carried_out: Iterable[CarriedOut], workers: int, coordinators: int
) -> tuple[list[Span], list[list[Span]]]:
    """Return when something that all workers need was unavailable, and the same for each worker."""
    needed = list[Span]()
    each_worker = [list[Span]() for _ in range(workers)]
    each_coordinator = [list[Span]() for _ in range(coordinators)]
    for fault, began_s, ended_s in carried_out:
        if fault.kind in _GOES_ON:
            continue
        match fault.family:
            case "kafka" | "redis" | "transactions" | "fleet":
                needed.append((began_s, ended_s))
            case "worker" | "worker-redis" | "worker-kafka":
                each_worker[fault.number].append((began_s, ended_s))
            case "store":
                # A coordinator that read a wrong answer searches again after this time.
                needed.append((began_s, ended_s + SEARCH_AGAIN_S + _START_S))
            case "coordinator":
                each_coordinator[fault.number].append((began_s, ended_s))
    return [*needed, *_common(each_coordinator)], each_worker


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return the same times, disjoint and in order."""
    found = list[Span]()
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _common(each: Sequence[Iterable[Span]]) -> list[Span]:
    """Return the spans of time that all of the sequences cover."""
    steps = Counter[float]()
    for spans in each:
        for begin, end in _union(spans):
            steps[begin] += 1
            steps[end] -= 1
    found, at_once, since = list[Span](), 0, 0.0
    for at_s in sorted(steps):
        if each and at_once == len(each):
            found.append((since, at_s))
        at_once, since = at_once + steps[at_s], at_s
    return found
