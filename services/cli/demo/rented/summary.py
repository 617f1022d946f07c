"""What a demo on rented machines came to: the deadline, the money, the proof."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from services.cli.demo.summary import sparkline, thinned

_CURVE_WIDTH = 48


@dataclass(frozen=True, slots=True)
class RentedSummary:
    """The result."""

    job: str
    ended: str  # why the job did
    updates: int
    updates_asked: int  # J
    runtime_s: float  # from the submission to the last update
    deadline_s: float  # theta
    spent_usd: float  # realised
    on_demand_only_usd: float
    predicted_usd: float  # by the last plan
    plans: int
    reasons: tuple[str, ...]  # why each plan was made
    machines: int  # that were rented, one after the other
    most_at_once: int
    preemptions: int
    lowest_usd_per_hour: float  # of spot machines, as plans saw it
    highest_usd_per_hour: float
    records_trained: int
    records_duplicated: int
    flaws: tuple[str, ...]
    test_accuracy: float
    seconds: float = 0.0  # the whole command
    curve: tuple[float, ...] = ()  # prequential accuracy of each update

    @property
    def in_time(self) -> bool:
        """Whether all updates were made by the deadline."""
        return self.updates >= self.updates_asked and self.runtime_s <= self.deadline_s

    @property
    def sound(self) -> bool:
        """Whether no record was used twice, and none left out below what is settled."""
        return not (self.records_duplicated or self.flaws)

    @property
    def of_on_demand(self) -> float:
        """Realised cost against on-demand machines alone."""
        return self.spent_usd / self.on_demand_only_usd if self.on_demand_only_usd else 1.0

    @property
    def off_prediction(self) -> float:
        """Realised cost against the last plan's prediction, less 1."""
        return self.spent_usd / self.predicted_usd - 1 if self.predicted_usd else 0.0

    def as_data(self) -> dict[str, Any]:
        """As plain data."""
        data = asdict(self)
        data["curve"] = [round(value, 4) for value in thinned(self.curve, _CURVE_WIDTH)]
        data |= {
            "in_time": self.in_time,
            "ratio_to_on_demand": self.of_on_demand,
            "off_prediction": self.off_prediction,
        }
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in data.items()
        }


def draw(summary: RentedSummary) -> Group:
    """The table, the learning curve and the verdict."""
    table = Table(box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    lowest, highest = summary.lowest_usd_per_hour, summary.highest_usd_per_hour
    for name, value in (
        ("updates", f"{summary.updates:,} of {summary.updates_asked:,}"),
        ("runtime", f"{summary.runtime_s:.1f} s"),
        ("deadline", f"[bold]{summary.deadline_s:.1f} s[/]"),
        ("cost", f"[bold]${summary.spent_usd:.5f}[/]"),
        ("on demand alone", f"${summary.on_demand_only_usd:.5f}"),
        ("against that", f"[bold]{100 * summary.of_on_demand:.1f} %[/]"),
        ("predicted by the last plan", f"${summary.predicted_usd:.5f}"),
        ("off by", f"{100 * summary.off_prediction:+.1f} %"),
        ("plans", f"{summary.plans}"),
        ("spot price, USD per hour", f"{lowest:.4f} to {highest:.4f}"),
        ("machines rented, at once", f"{summary.machines}, {summary.most_at_once}"),
        ("preemptions without notice", f"{summary.preemptions}"),
        ("records trained, twice", f"{summary.records_trained:,}, {summary.records_duplicated}"),
        ("accuracy on held-out digits", f"[bold]{summary.test_accuracy:.4f}[/]"),
        ("took", f"{summary.seconds:.1f} s"),
    ):
        table.add_row(name, value)
    start, end = (summary.curve[0], summary.curve[-1]) if summary.curve else (0.0, 0.0)
    curve = Text(f"accuracy {start:.2f} {sparkline(summary.curve)} {end:.2f}")
    flaws = [Text(f"flaw: {flaw}", "red") for flaw in summary.flaws]
    return Group(curve, table, *flaws, _verdict(summary))


def _verdict(summary: RentedSummary) -> Text:
    if not summary.sound:
        return Text("NOT every record was used exactly once", "bold red")
    if not summary.in_time:
        return Text(f"the deadline was missed: {summary.ended}", "bold red")
    return Text("the deadline was met, and every record was used exactly once", "bold green")
