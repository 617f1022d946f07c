"""What a chaos run tells: the verdict, what went wrong when, and how long it kept updates away."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from load.harness import report

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.core.audit import Audit
    from load.faults.fleet import UnexpectedExit
    from load.faults.schedule import Fault
    from load.harness.counting import Unlearned

_SHOWN = 10  # of the wrong weights, flaws and unexpected exits, in words; the file has more
_IN_FILE = 1000
_SPREAD = {"median_s": 0.5, "p95_s": 0.95, "max_s": 1.0}
_FELT_S = 2.0  # what is over at once is felt so long all the same: a reset, a quick replacement


class CarriedOut(NamedTuple):
    """A fault as it was done; times from the beginning of the run."""

    fault: Fault
    began_s: float
    ended_s: float

    @property
    def span_s(self) -> tuple[float, float]:
        """The time in which it is felt."""
        return self.began_s, max(self.ended_s, self.began_s + _FELT_S)


@dataclass(frozen=True)
class Outcome:
    """Everything that a run found; times from the beginning of the faults."""

    carried_out: Sequence[CarriedOut]
    update_times_s: Sequence[float]
    leads: int
    resumed: int  # after a loss
    produced: int
    drained_s: float | None  # from the last fault's end until all was settled; None: it was not
    behind: str  # what was not settled
    proof: Audit
    unlearned: Sequence[Unlearned]
    unexpected: Sequence[UnexpectedExit]
    overran: int

    def failures(self) -> list[str]:
        """Why the run fails; empty where all is well."""
        found = []
        if self.drained_s is None:
            found.append(f"did not drain: {self.behind}")
        if self.unlearned:
            shown = ", ".join(f"{id_}: {weight:g}" for id_, weight in self.unlearned[:_SHOWN])
            found.append(f"{len(self.unlearned)} weights are wrong: {shown}")
        if self.proof.flaws:
            shown = ", ".join(f"{kind}: {where}" for kind, where in self.proof.flaws[:_SHOWN])
            found.append(f"{len(self.proof.flaws)} flaws in the audit: {shown}")
        return found

    def as_data(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "failures": self.failures(),
            "faults": len(self.carried_out),
            "faults_by_kind": Counter(each.fault.kind for each in self.carried_out),
            "faults_by_family": Counter(each.fault.family for each in self.carried_out),
            "records": self.produced,
            "trained": self.proof.trained,
            "updates": len(self.proof.updates),
            "updates_taken_back": self.proof.taken_back,
            "leads": self.leads,
            "resumed_after_loss": self.resumed,
            "quarantined": len(self.proof.quarantined),
            "drained_s": self.drained_s,
            "behind": self.behind,
            "flaws": [flaw._asdict() for flaw in self.proof.flaws[:_IN_FILE]],
            "wrong_weights": len(self.unlearned),
            "wrong": [each._asdict() for each in self.unlearned[:_IN_FILE]],
            "longest_pause_s": longest_pause_s(self.update_times_s),
            "next_update": by_kind(self._next_s()),
            "pause": by_kind(self._pauses_s()),
            "unexpected_exits": [each._asdict() for each in self.unexpected],
            "overran_notice": self.overran,
            "schedule": [
                {
                    **each.fault._asdict(),
                    "began_s": each.began_s,
                    "ended_s": each.ended_s,
                    "pause_s": pause_s,
                }
                for each, pause_s in self._pauses_s()
            ],
        }

    def draw(self) -> None:
        """Print it all."""
        next_s, pauses_s = by_kind(self._next_s()), by_kind(self._pauses_s())
        rows = [
            (
                kind,
                str(count),
                *(f"{value:.2f}" for value in (*values, *list(pauses_s[kind].values())[1:])),
            )
            for kind, (count, *values) in ((kind, it.values()) for kind, it in next_s.items())
        ]
        columns = ("", "times", "next update, s", "p95", "max", "pause, s", "p95", "max")
        report.draw(f"{len(self.carried_out)} faults, medians", columns, rows)
        for exited in self.unexpected[:_SHOWN]:
            print(f"\n{exited.name} ended by itself with {exited.exit_code}: {exited.last_words}")
        facts = {
            "records": self.produced,
            "updates": len(self.proof.updates),
            "taken back": self.proof.taken_back,
            "leads": self.leads,
            "resumed after a loss": self.resumed,
            "quarantined": len(self.proof.quarantined),
            "longest pause": f"{longest_pause_s(self.update_times_s):.2f} s",
            "drained after": "never" if self.drained_s is None else f"{self.drained_s:.1f} s",
            "unexpected exits": len(self.unexpected),
            "notices overrun": self.overran,
            "audit flaws": len(self.proof.flaws),
            "weights that are not -1": len(self.unlearned),
        }
        print()
        for name, value in facts.items():
            print(f"{name:<24} {value:,}" if isinstance(value, int) else f"{name:<24} {value}")

    def _next_s(self) -> list[tuple[CarriedOut, float]]:
        """From each fault's beginning to the update after it."""
        found = ((each, next_after(self.update_times_s, each.began_s)) for each in self.carried_out)
        return [(each, at - each.began_s) for each, at in found if at is not None]

    def _pauses_s(self) -> list[tuple[CarriedOut, float]]:
        """The longest time without an update while each fault lasted, or soon after it began."""
        return [
            (each, longest_pause_s(self.update_times_s, *each.span_s)) for each in self.carried_out
        ]


def by_kind(times_s: Iterable[tuple[CarriedOut, float]]) -> dict[str, dict[str, float]]:
    """Describe times by the kind of the fault that they belong to."""
    found = dict[str, list[float]]()
    for each, time_s in times_s:
        found.setdefault(each.fault.kind, []).append(time_s)
    return {
        kind: {"times": len(found[kind]), **report.spread(found[kind], _SPREAD)}
        for kind in sorted(found)
    }


def next_after(times: Sequence[float], at: float) -> float | None:
    """The first of some ascending times after `at`."""
    index = bisect_right(times, at)
    return times[index] if index < len(times) else None


def longest_pause_s(
    times: Sequence[float], begin: float = -math.inf, end: float = math.inf
) -> float:
    """The longest time between two that follow each other, of which any part is in an interval."""
    pauses = (
        later - earlier for earlier, later in pairwise(times) if later > begin and earlier < end
    )
    return max(pauses, default=0.0)
