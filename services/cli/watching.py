"""What `doll job watch` shows of a job: a pure view of its newest updates, and how it looks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from common.core.messages import Lead, Quarantined, UpdateApplied

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.core.messages import AuditRecord, Positions, Standing, WorkerId

_RATE_WINDOW_S = 10.0  # long enough to hold some updates, short enough to show a change
_SHOWN_UPDATES = 10


class JobView:
    """The newest updates of a job as they come.

    The newest of several leaders is taken for the one that counts; what is true for ever is said by
    `doll audit`, which folds the whole topic.
    """

    def __init__(self) -> None:
        self.updates = deque[UpdateApplied](maxlen=_SHOWN_UPDATES)
        self.leads = 0
        self.quarantined = 0
        self._arrivals = deque[tuple[float, int]]()  # when seen, samples

    def feed(self, record: AuditRecord | None, now: float | None) -> None:
        """Take in one audit record; `now` is None for what was there before we looked."""
        match record:
            case UpdateApplied():
                while self.updates and self._takes_back(record, self.updates[-1]):
                    self.updates.pop()
                newest = self.updates[-1] if self.updates else None
                if newest is None or record.epoch >= newest.epoch:
                    self.updates.append(record)
                    if now is not None:
                        self._arrivals.append((now, record.samples))
            case Lead():
                self.leads += 1
            case Quarantined():
                self.quarantined += 1
            case None:
                pass

    def samples_per_s(self, now: float) -> float | None:
        """Records trained per second of late, None before there is something to say."""
        while self._arrivals and self._arrivals[0][0] < now - _RATE_WINDOW_S:
            self._arrivals.popleft()
        if len(self._arrivals) < 2:
            return None
        span_s = now - self._arrivals[0][0]
        samples = sum(samples for _, samples in self._arrivals) - self._arrivals[0][1]
        return samples / span_s if span_s > 0 else None

    @staticmethod
    def _takes_back(new: UpdateApplied, old: UpdateApplied) -> bool:
        return new.epoch > old.epoch and new.version <= old.version


def lag_of(standing: Standing | None, ends: Positions) -> int | None:
    """Records that are in the datastreams and not settled; None while nobody leads."""
    if standing is None:
        return None
    return sum(max(0, end - standing.settled.get(place, end)) for place, end in ends.items())


def render(
    job: str,
    state: str,
    view: JobView,
    *,
    samples_per_s: float | None,
    workers: Mapping[WorkerId, str] | None,
    standing: Standing | None,
    lag: int | None,
) -> Group:
    """Draw the view: a line of the present and a table of the last updates, newest first."""
    alive = None if workers is None else sum(1 for status in workers.values() if status == "alive")
    leaving = len(workers) - alive if workers is not None and alive is not None else 0
    present = [
        ("workers", _number(alive) + (f" (+{leaving} leaving)" if leaving else "")),
        ("records/s", _number(samples_per_s)),
        ("lag", _number(lag)),
        ("batches waiting", _number(standing.waiting if standing else None)),
        ("quarantined", _number(view.quarantined)),
    ]
    head = Text.assemble((job, "bold"), f" {state}   ")
    head.append_text(Text("   ".join(f"{name} {value}" for name, value in present)))
    names = sorted({name for update in view.updates for name in update.metrics})
    table = Table("update", "by", "loss", *names, "records", "batches", box=None)
    for update in reversed(view.updates):
        table.add_row(
            f"{update.version:,}",
            str(update.epoch),
            f"{update.loss:.4f}",
            *(f"{update.metrics[name]:.4f}" if name in update.metrics else "" for name in names),
            f"{update.samples:,}",
            f"{len(update.batches)}" + (f" ({update.short})" if update.short else ""),
        )
    return Group(head, table if view.updates else Text("no update yet"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
