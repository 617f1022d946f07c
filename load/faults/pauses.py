"""What keeps updates away although all works that they need, and what such a time went into.

The flow needs the broker, Redis, records that readers may see (none behind a transaction that is
open), one coordinator, and one worker with its lines to both servers. While one of these is away no
update can come: a fault that lasts is no pause. Object storage, other workers and other
coordinators are not needed: to be without them must not stop anything.

    updates    | | |                                    | | |     raw pause: the whole gap
    broker              xxxxxxxxx
    workers                  xxxxxxxxxxxx                         all of them
    pauses         ....                  ...............          the longest of these counts
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

_START_S = 5.0  # of a coordinator
_FELT_S = 2.0  # what is over at once is felt so long all the same: a reset, a quick replacement
_GOES_ON = frozenset(  # kinds whose target works meanwhile, if badly
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
# Which part of a pause an event in a service's log ends. Whoever meets an outage has noticed that
# something is wrong; who is heard to read, or to lead, had to come to that point first.
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
    "reading_from": "replay",  # the leader has decided all that was claimed, and says where to read
}
_ENDINGS = {"_unavailable": "detect", "_recovered": "reconnect"}
LAST = "first update"  # what is left behind the last event
PARTS = ("detect", "reconnect", "start", "decide", "replay", "rebalance", LAST)


class CarriedOut(NamedTuple):
    """A fault as it was done; times from the beginning of the run."""

    fault: Fault
    began_s: float
    ended_s: float  # once its target works again, as far as it can be seen from outside

    @property
    def span_s(self) -> Span:
        """The time in which it is felt."""
        return self.began_s, max(self.ended_s, self.began_s + _FELT_S)


class Event(NamedTuple):
    """A line of a service's log; its time from the beginning of the run."""

    at_s: float
    service: str
    name: str


def outages(carried_out: Iterable[CarriedOut], workers: int, coordinators: int) -> list[Span]:
    """When something was away that updates need; disjoint, in order.

    Args:
        carried_out: What was done to the stack.
        workers: How many there are.
        coordinators: Likewise.
    """
    needed, each_worker = _away(carried_out, workers, coordinators)
    return _union([*needed, *_common(each_worker)])


def limit(
    carried_out: Iterable[CarriedOut], workers: int, coordinators: int, seconds: float
) -> float:
    """The share of the workers' time in which they had all that they need: none can use more.

    An open transaction holds back records of its own partition only: it counts for nothing here.

    Args:
        carried_out: What was done to the stack.
        workers: How many there are.
        coordinators: Likewise.
        seconds: How long the run was.
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
    """Between each two updates that follow each other, the longest time in which all was there.

    Args:
        times: Of updates, ascending.
        away: See `outages`.
    """
    found = list[Span]()
    for earlier, later in pairwise(times):
        inside = [span for span in away if span[0] < later and span[1] > earlier]
        ends = (earlier, *(end for _, end in inside))
        begins = (*(begin for begin, _ in inside), later)
        found.append(max(zip(ends, begins, strict=True), key=length))
    return found


def length(span: Span) -> float:
    """How long it is; none where something was away all the time."""
    return max(span[1] - span[0], 0.0)


def longest(between: Sequence[Span], begin: float = -math.inf, end: float = math.inf) -> Span:
    """The longest of some spans of which any part is in an interval; of no length where none is."""
    inside = (span for span in between if span[1] > begin and span[0] <= end)
    return max(inside, key=length, default=(0.0, 0.0))


def parts(pause: Span, events: Sequence[Event]) -> dict[str, float]:
    """What a pause went into, in seconds by part.

    Each moment belongs to what the next event of any service brought to its end, and those behind
    the last event to the first update: a reading of the log, not a proof of what waited for what.

    Args:
        pause: The time.
        events: By time.
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
    """The first of some ascending times after `at`."""
    index = bisect_right(times, at)
    return times[index] if index < len(times) else None


def read_events(folder: Path, began_s: float) -> list[Event]:
    """What services logged, by time.

    Args:
        folder: Of their logs, each a line of JSON an event.
        began_s: When the run began, since 1970.
    """
    found = list[Event]()
    for log in folder.glob("*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith('{"time"') and line.endswith("}"):  # else another's, or cut off
                entry = json.loads(line)
                at_s = datetime.fromisoformat(entry["time"]).timestamp() - began_s
                found.append(Event(at_s, log.stem, entry["event"]))
    return sorted(found)


def _away(
    carried_out: Iterable[CarriedOut], workers: int, coordinators: int
) -> tuple[list[Span], list[list[Span]]]:
    """When something was away that all workers need, and when each worker was, or its lines."""
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
            case "store":  # a coordinator may look again that long after
                needed.append((began_s, ended_s + SEARCH_AGAIN_S + _START_S))
            case "coordinator":
                each_coordinator[fault.number].append((began_s, ended_s))
    return [*needed, *_common(each_coordinator)], each_worker


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same times, disjoint and in order."""
    found = list[Span]()
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _common(each: Sequence[Iterable[Span]]) -> list[Span]:
    """When all of several are in one of their spans."""
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
