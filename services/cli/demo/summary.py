"""Result of a demo: as data for scripts, and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 48


@dataclass(frozen=True, slots=True)
class Account:
    """Number of records by outcome."""

    produced: int
    trained: int
    skipped: int
    expired: int
    quarantined: int
    lost: int
    duplicated: int


@dataclass(frozen=True, slots=True)
class DemoBill:
    """Deadline and cost of a demo with a market."""

    # Reason why the job ended.
    ended: str
    # True if all updates were made by the deadline.
    in_time: bool
    updates_asked: int  # J
    # Seconds from the submission to the last update; 0 without any.
    runtime_s: float
    deadline_s: float  # theta
    spent_usd: float  # realised
    on_demand_only_usd: float
    # Ratio of the realised cost.
    ratio_to_on_demand: float
    # Cost predicted by the last plan.
    predicted_usd: float
    # Realised cost divided by the predicted cost, minus 1.
    off_prediction: float
    plans: int
    # Reason of each plan.
    reasons: tuple[str, ...]
    # Total number of machines rented.
    machines: int
    most_at_once: int
    # Price of spot machines according to the plans.
    lowest_usd_per_hour: float
    highest_usd_per_hour: float


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """Result of a demo."""

    job: str
    account: Account
    flaws: tuple[str, ...]
    updates: int
    test_accuracy: float
    # Accuracy over the last tenth of the stream.
    prequential_accuracy_at_end: float
    samples_per_s: float
    workers: int
    preemptions: int
    # Seconds until the next update if one worker was killed.
    pause_after_preemption_s: float | None
    # None without a market.
    bill: DemoBill | None = None
    kafka: str = ""
    redis: str = ""
    # Duration of the whole command.
    seconds: float = 0.0
    # Prequential accuracy of each update.
    curve: tuple[float, ...] = ()

    @property
    def sound(self) -> bool:
        """True if every record was used exactly once."""
        return not (self.account.lost or self.account.duplicated or self.flaws)

    def as_data(self) -> dict[str, Any]:
        """Return plain data; the counts of records are named `records_...`."""
        data = asdict(self)
        bill = data.pop("bill") or {}
        for name, count in data.pop("account").items():
            data[f"records_{name}"] = count
        data["curve"] = [round(value, 4) for value in thinned(self.curve, _CURVE_WIDTH)]
        # More digits, because a demo costs cents.
        return _rounded(data, 4) | _rounded(bill, 6)


def draw(summary: DemoSummary) -> Group:
    """Draw the table, the learning curve and the result."""
    table = Table(box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = _of_proof(summary) if summary.bill is None else _of_bill(summary, summary.bill)
    for name, value in (*rows, ("took", f"{summary.seconds:.1f} s")):
        table.add_row(name, value)
    start, end = (summary.curve[0], summary.curve[-1]) if summary.curve else (0.0, 0.0)
    curve = Text(f"accuracy {start:.2f} {sparkline(summary.curve)} {end:.2f}")
    flaws = [Text(f"flaw: {flaw}", "red") for flaw in summary.flaws]
    return Group(curve, table, *flaws, _verdict(summary))


def sparkline(values: Sequence[float], width: int = _CURVE_WIDTH) -> str:
    """Draw values from 0 to 1 as at most `width` bars."""
    top = len(_BARS) - 1
    return "".join(
        _BARS[min(top, max(0, int(value * top + 0.5)))] for value in thinned(values, width)
    )


def thinned(values: Sequence[float], width: int) -> list[float]:
    """Return means of neighbours, at most `width` of them."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else [0]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def _of_proof(summary: DemoSummary) -> list[tuple[str, str]]:
    counts, pause_s = summary.account, summary.pause_after_preemption_s
    unused = f"{counts.skipped:,}, {counts.expired:,}, {counts.quarantined:,}"
    return [
        ("accuracy on held-out digits", f"[bold]{summary.test_accuracy:.4f}[/]"),
        ("accuracy before training, last tenth", f"{summary.prequential_accuracy_at_end:.4f}"),
        ("updates", f"{summary.updates:,}"),
        ("records produced", f"{counts.produced:,}"),
        ("records trained", f"{counts.trained:,}"),
        ("records skipped, expired, quarantined", unused),
        ("records lost", f"[bold]{counts.lost:,}[/]"),
        ("records used twice", f"[bold]{counts.duplicated:,}[/]"),
        ("records/s", f"{summary.samples_per_s:,.0f}"),
        ("preemptions without notice", f"{summary.preemptions}"),
        ("next update after the kill", "-" if pause_s is None else f"{pause_s:.2f} s"),
        ("Kafka, Redis", f"{summary.kafka}, {summary.redis}"),
    ]


def _of_bill(summary: DemoSummary, bill: DemoBill) -> list[tuple[str, str]]:
    counts = summary.account
    spot_price = f"{bill.lowest_usd_per_hour:.4f} to {bill.highest_usd_per_hour:.4f}"
    return [
        ("updates", f"{summary.updates:,} of {bill.updates_asked:,}"),
        ("runtime", f"{bill.runtime_s:.1f} s"),
        ("deadline", f"[bold]{bill.deadline_s:.1f} s[/]"),
        ("cost", f"[bold]${bill.spent_usd:.5f}[/]"),
        ("cost on demand only", f"${bill.on_demand_only_usd:.5f}"),
        ("share of that cost", f"[bold]{100 * bill.ratio_to_on_demand:.1f} %[/]"),
        ("cost by the last plan", f"${bill.predicted_usd:.5f}"),
        ("prediction error", f"{100 * bill.off_prediction:+.1f} %"),
        ("plans", f"{bill.plans}"),
        ("spot price, USD per hour", spot_price),
        ("machines rented, most at once", f"{bill.machines}, {bill.most_at_once}"),
        ("preemptions without notice", f"{summary.preemptions}"),
        ("records trained, used twice", f"{counts.trained:,}, {counts.duplicated}"),
        ("accuracy on held-out digits", f"[bold]{summary.test_accuracy:.4f}[/]"),
    ]


def _verdict(summary: DemoSummary) -> Text:
    if not summary.sound:
        return Text("NOT every record was used exactly once", "bold red")
    if summary.bill is None:
        return Text("every record was used exactly once", "bold green")
    if not summary.bill.in_time:
        return Text(f"the deadline was missed: {summary.bill.ended}", "bold red")
    return Text("the deadline was met, and every record was used exactly once", "bold green")


def _rounded(data: dict[str, Any], digits: int) -> dict[str, Any]:
    return {
        name: round(value, digits) if isinstance(value, float) else value
        for name, value in data.items()
    }
