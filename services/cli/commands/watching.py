"""What `doll job watch` shows of a job: a picture of it, and how that looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from common.jobs.progress import State

SHOWN_UPDATES = 10


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

    state: State
    alive: int | None
    leaving: int
    samples_per_s: float | None
    lag: int | None
    waiting: int | None
    skipped: int
    quarantined: int
    expired: int  # records
    whole: bool  # whether these three are of all that ever happened
    updates: tuple[UpdateLine, ...]  # the last ones, newest last


def render(job: str, picture: Picture) -> Group:
    """Draw a line of the present and a table of the last updates, newest first."""
    leaving = f" (+{picture.leaving} leaving)" if picture.leaving else ""
    present = [
        ("workers", number(picture.alive) + leaving),
        ("records/s", number(picture.samples_per_s)),
        ("lag", number(picture.lag)),
        ("batches waiting", number(picture.waiting)),
        ("records skipped", at_least(picture.skipped, whole=picture.whole)),
        ("batches quarantined", at_least(picture.quarantined, whole=picture.whole)),
        ("records expired", at_least(picture.expired, whole=picture.whole)),
    ]
    head = Text.assemble((job, "bold"), f" {picture.state}")
    numbers = Text("   ".join(f"{name} {value}" for name, value in present))
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
    return Group(head, numbers, table if picture.updates else Text("no update yet"))


def number(value: float | None) -> str:
    """A number for people; None is not known."""
    return "-" if value is None else f"{value:,.0f}"


def at_least(count: int | None, *, whole: bool) -> str:
    """A count for people: of a history that was not read whole, it may be more."""
    return number(count) + ("" if whole or count is None else "+")


def printable(text: str) -> str:
    """A text of somebody else without what a terminal would obey; lines and tabs stay."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else f"\\x{ord(each):02x}" for each in text
    )
