"""What `doll job watch` shows of a job: a view of its newest updates, a picture, how it looks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from common.core.messages import Lead, Quarantined, UpdateApplied

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, Positions, Standing

_RATE_WINDOW_S = 10.0  # long enough to hold some updates, short enough to show a change
SHOWN_UPDATES = 10
REDIS_AWAY = "Redis is away"


@dataclass(frozen=True, slots=True)
class UpdateLine:
    """One update in the table."""

    version: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    samples: int
    batches: int
    short: str


class Picture(NamedTuple):
    """How a job is; None is what nobody could say."""

    state: str
    alive: int | None
    leaving: int
    samples_per_s: float | None
    lag: int | None
    waiting: int | None
    quarantined: int
    updates: tuple[UpdateLine, ...]  # the last ones, newest last


class JobView:
    """The newest updates of a job as they come.

    The newest of several leaders is taken for the one that counts; what is true for ever is said by
    `doll audit`, which folds the whole topic.
    """

    def __init__(self) -> None:
        self.updates = deque[UpdateApplied](maxlen=SHOWN_UPDATES)
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

    def lines(self) -> tuple[UpdateLine, ...]:
        """The last updates, newest last."""
        return tuple(
            UpdateLine(
                update.version,
                update.epoch,
                update.loss,
                dict(update.metrics),
                update.samples,
                len(update.batches),
                update.short,
            )
            for update in self.updates
        )

    @staticmethod
    def _takes_back(new: UpdateApplied, old: UpdateApplied) -> bool:
        return new.epoch > old.epoch and new.version <= old.version


def state_of(wanted: str, reason: str) -> str:
    """What is wanted of a job, in words."""
    return f"is to be {wanted} ({reason})"


def lag_of(standing: Standing | None, ends: Positions) -> int | None:
    """Records that are in the datastreams and not settled; None while nobody leads."""
    if standing is None:
        return None
    return sum(max(0, end - standing.settled.get(place, end)) for place, end in ends.items())


def render(job: str, picture: Picture) -> Group:
    """Draw a line of the present and a table of the last updates, newest first."""
    leaving = f" (+{picture.leaving} leaving)" if picture.leaving else ""
    present = [
        ("workers", _number(picture.alive) + leaving),
        ("records/s", _number(picture.samples_per_s)),
        ("lag", _number(picture.lag)),
        ("batches waiting", _number(picture.waiting)),
        ("quarantined", _number(picture.quarantined)),
    ]
    head = Text.assemble((job, "bold"), f" {picture.state}   ")
    head.append_text(Text("   ".join(f"{name} {value}" for name, value in present)))
    names = sorted({name for update in picture.updates for name in update.metrics})
    table = Table("update", "by", "loss", *names, "records", "batches", box=None)
    for update in reversed(picture.updates):
        table.add_row(
            f"{update.version:,}",
            str(update.epoch),
            f"{update.loss:.4f}",
            *(f"{update.metrics[name]:.4f}" if name in update.metrics else "" for name in names),
            f"{update.samples:,}",
            f"{update.batches}" + (f" ({update.short})" if update.short else ""),
        )
    return Group(head, table if picture.updates else Text("no update yet"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
