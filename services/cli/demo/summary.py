"""What a demo came to: as data for scripts, and as a table for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.cli.demo.account import Account

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 48


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a demo."""

    job: str
    account: Account
    flaws: tuple[str, ...]
    updates: int
    takeovers: int
    updates_taken_back: int
    test_accuracy: float
    test_loss: float
    prequential_accuracy: float  # of the whole stream
    prequential_accuracy_at_end: float  # of its last tenth
    samples_per_s: float
    workers: int
    preemptions: int
    pause_after_preemption_s: float | None  # until the next update
    longest_pause_s: float  # between two updates
    kafka: str = ""
    redis: str = ""
    seconds: float = 0.0  # the whole command
    curve: tuple[float, ...] = ()  # prequential accuracy of each update

    @property
    def sound(self) -> bool:
        """Whether every record was used exactly once."""
        return not (self.account.lost or self.account.duplicated or self.flaws)

    def as_data(self) -> dict[str, Any]:
        """As plain data; the counts of records are `records_...`."""
        data = asdict(self)
        for name, count in data.pop("account").items():
            data[f"records_{name}"] = count
        curve = data.pop("curve")
        data["curve"] = [round(value, 4) for value in thinned(curve, _CURVE_WIDTH)]
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in data.items()
        }


def draw(summary: Summary) -> Group:
    """The table, the learning curve and the verdict."""
    counts, pause_s = summary.account, summary.pause_after_preemption_s
    table = Table(box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in (
        ("accuracy on held-out digits", f"[bold]{summary.test_accuracy:.4f}[/]"),
        ("accuracy before learning, last tenth", f"{summary.prequential_accuracy_at_end:.4f}"),
        ("updates", f"{summary.updates:,}"),
        ("records produced", f"{counts.produced:,}"),
        ("records trained", f"{counts.trained:,}"),
        ("records skipped, expired, quarantined", _several(counts)),
        ("records lost", f"[bold]{counts.lost:,}[/]"),
        ("records used twice", f"[bold]{counts.duplicated:,}[/]"),
        ("records/s", f"{summary.samples_per_s:,.0f}"),
        ("preemptions without notice", f"{summary.preemptions}"),
        ("next update after it", "-" if pause_s is None else f"{pause_s:.2f} s"),
        ("Kafka, Redis", f"{summary.kafka}, {summary.redis}"),
        ("took", f"{summary.seconds:.1f} s"),
    ):
        table.add_row(name, value)
    start, end = (summary.curve[0], summary.curve[-1]) if summary.curve else (0.0, 0.0)
    curve = Text(f"accuracy {start:.2f} {sparkline(summary.curve)} {end:.2f}")
    flaws = [Text(f"flaw: {flaw}", "red") for flaw in summary.flaws]
    verdict = (
        Text("every record was used exactly once", "bold green")
        if summary.sound
        else Text("NOT every record was used exactly once", "bold red")
    )
    return Group(curve, table, *flaws, verdict)


def sparkline(values: Sequence[float], width: int = _CURVE_WIDTH) -> str:
    """Values from 0 to 1 as bars, at most `width` of them."""
    top = len(_BARS) - 1
    return "".join(
        _BARS[min(top, max(0, int(value * top + 0.5)))] for value in thinned(values, width)
    )


def thinned(values: Sequence[float], width: int) -> list[float]:
    """Means of neighbours, at most `width` of them."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else [0]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def _several(counts: Account) -> str:
    return f"{counts.skipped:,}, {counts.expired:,}, {counts.quarantined:,}"
