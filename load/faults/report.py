"""The result of a chaos run: failures, the faults carried out, and pauses between updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from load.faults.pauses import (
    PARTS,
    length,
    longest,
    next_after,
    outages,
    parts,
    pauses,
)
from load.harness import report

if TYPE_CHECKING:
    from common.core.audit import Audit
    from load.faults.fleet import UnexpectedExit
    from load.faults.pauses import CarriedOut, Event, Span
    from load.faults.tiers import Reached
    from load.harness.counting import Unlearned

# Wrong weights, flaws and unexpected exits that are printed. The file has more.
_SHOWN = 10
_IN_FILE = 1000
_SPREAD = {"median_s": 0.5, "p95_s": 0.95, "max_s": 1.0}
# Pauses that are printed individually.
_WORST = 5
# Bars for a run of five minutes on two quiet cores.
_PAUSE_S = 8.0
_DRAINED_S = 10.0
# Bar of both times if other processes use the same cores (`--burn 2`).
_BURNT_S = 20.0
# Share of the throughput without faults.
_SHARE = 0.7


class Pace(NamedTuple):
    """Throughput of a job that always had a backlog."""

    # Records/s before the first fault.
    reference_per_s: float
    # Records/s during the faults, without rolled-back updates.
    per_s: float
    # Highest share that any job could have reached. See `pauses.limit`.
    limit: float

    @property
    def share(self) -> float:
        """Share of the throughput that faults left."""
        return self.per_s / self.reference_per_s if self.reference_per_s else 0.0

    @property
    def of_limit(self) -> float:
        """`share` relative to the highest share that any job could have reached."""
        return self.share / self.limit if self.limit else 1.0


@dataclass(frozen=True)
class Outcome:
    """Everything that a run found. Times count from the beginning of the faults."""

    carried_out: Sequence[CarriedOut]
    # Times at which a reader saw each update.
    seen_s: Sequence[float]
    # Times at which the leader wrote each update, ascending.
    applied_s: Sequence[float]
    # Events that services logged, by time.
    events: Sequence[Event]
    workers: int
    coordinators: int
    # None unless `--saturated`.
    pace: Pace | None
    leads: int
    # Number of resumes after a loss.
    resumed: int
    produced: int
    # Time from the end of the last fault until everything was settled. None if it never was.
    drained_s: float | None
    # Description of what was not settled.
    behind: str
    proof: Audit
    unlearned: Sequence[Unlearned]
    unexpected: Sequence[UnexpectedExit]
    overran: int
    # True if the job's mode was changed during the run.
    switching: bool = False
    # Leads that rolled updates back.
    fallbacks: int = 0
    # None unless `--tiers`.
    tiers: Reached | None = None
    # Reason why the weights could not be compared although everything was settled.
    unread: str = ""
    # Number of other processes that used the processor.
    burn: int = 0

    def failures(self) -> list[str]:
        """Return why the run fails. Empty if all is well."""
        return self._wrongs() + self.slow()

    def slow(self) -> list[str]:
        """Return missed bars of time and throughput. A busy machine may miss them without a bug."""
        found = []
        bar, pause_s = _BURNT_S if self.burn else _PAUSE_S, length(longest(self._pauses))
        if pause_s > bar:
            found.append(f"longest pause: {pause_s:.2f} s, expected at most {bar:g} s")
        bar = _BURNT_S if self.burn else _DRAINED_S
        if self.drained_s is not None and self.drained_s > bar:
            found.append(f"drained after {self.drained_s:.1f} s, expected at most {bar:g} s")
        if self.pace is not None and self.pace.share < _SHARE:
            share = f"{self.pace.share:.2f} of the throughput without faults"
            found.append(
                f"{share} was left, expected at least {_SHARE:g}; without the missing processes"
                " at most"
                f" {self.pace.limit:.2f} was possible"
            )
        return found

    def _wrongs(self) -> list[str]:
        """Return failures that must never happen, however busy the machine is."""
        found = []
        if self.drained_s is None:
            found.append(f"did not drain: {self.behind}")
        if self.unread:
            found.append(f"weights could not be compared: {self.unread}")
        if self.unexpected:
            shown = ", ".join(f"{it.name} with {it.exit_code}" for it in self.unexpected[:_SHOWN])
            found.append(f"{len(self.unexpected)} services ended unexpectedly: {shown}")
        if self.unlearned:
            shown = ", ".join(f"{id_}: {weight:g}" for id_, weight in self.unlearned[:_SHOWN])
            found.append(f"{len(self.unlearned)} weights are wrong: {shown}")
        if self.proof.flaws:
            shown = ", ".join(f"{kind}: {where}" for kind, where in self.proof.flaws[:_SHOWN])
            found.append(f"{len(self.proof.flaws)} flaws in the audit: {shown}")
        if self.proof.restarts and not self.resumed:
            found.append(f"{len(self.proof.restarts)} Leads restarted at version 0")
        if self.switching and not self.proof.switches:
            found.append("no update was made in another mode")
        return found + (self.tiers.failures() if self.tiers else [])

    def as_data(self) -> dict[str, Any]:
        """Return the outcome for the JSON file."""
        return {
            "failures": self.failures(),
            "slow": self.slow(),
            "faults": len(self.carried_out),
            "faults_by_kind": Counter(each.fault.kind for each in self.carried_out),
            "faults_by_family": Counter(each.fault.family for each in self.carried_out),
            "records": self.produced,
            "trained": self.proof.trained,
            "updates": len(self.proof.updates),
            "updates_taken_back": self.proof.taken_back,
            "leads": self.leads,
            "leads_that_took_back": self.fallbacks,
            "tiers": self.tiers and self.tiers.as_data(),
            "resumed_after_loss": self.resumed,
            "switches": self.proof.switches,
            "quarantined": len(self.proof.quarantined),
            "drained_s": self.drained_s,
            "behind": self.behind,
            "flaws": [flaw._asdict() for flaw in self.proof.flaws[:_IN_FILE]],
            "wrong_weights": len(self.unlearned),
            "wrong": [each._asdict() for each in self.unlearned[:_IN_FILE]],
            "longest_pause_s": length(longest(self._pauses)),
            "longest_pause_raw_s": length(longest(self._raw)),
            "longest_pauses": [self._described(pause) for pause in self._worst()],
            "next_update": by_kind(self._next_s()),
            "pause": by_kind((each, length(self._pause_of(each))) for each in self.carried_out),
            "pause_parts": self._parts_by_kind(),
            "saturated": self.pace
            and {
                **self.pace._asdict(),
                "share": self.pace.share,
                "of_limit": self.pace.of_limit,
            },
            "unexpected_exits": [each._asdict() for each in self.unexpected],
            "overran_notice": self.overran,
            "schedule": [
                {
                    **each.fault._asdict(),
                    "began_s": each.began_s,
                    "ended_s": each.ended_s,
                    "pause_s": length(self._pause_of(each)),
                    "pause_raw_s": length(longest(self._raw, *each.span_s)),
                    "parts_s": parts(self._pause_of(each), self.events),
                }
                for each in self.carried_out
            ],
        }

    def draw(self) -> None:
        """Print the outcome."""
        next_s = by_kind(self._next_s())
        pauses_s = by_kind((each, length(self._pause_of(each))) for each in self.carried_out)
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
        print()
        rows = [
            (kind, *(f"{found[part]:.2f}" if part in found else "" for part in PARTS))
            for kind, found in self._parts_by_kind().items()
            if found
        ]
        report.draw("parts of the pauses, mean seconds", ("", *PARTS), rows)
        print()
        for pause in self._worst():
            described = self._described(pause)
            went = ", ".join(
                f"{part} {seconds:.2f}" for part, seconds in described["parts_s"].items()
            )
            print(
                f"{length(pause):6.2f} s from {pause[0]:.1f} s on: {went}"
                f"; faults: {', '.join(described['faults']) or 'none'}"
            )
        for exited in self.unexpected[:_SHOWN]:
            print(
                f"\n{exited.name} ended unexpectedly with {exited.exit_code}: {exited.last_words}"
            )
        data = self.as_data()
        facts = data | (self.tiers.found if self.tiers else {}) | (data["saturated"] or {})
        print()
        for name, value in facts.items():
            if isinstance(value, int | float):
                number = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
                print(f"{name.replace('_', ' '):<28} {number}")

    @cached_property
    def _pauses(self) -> list[Span]:
        away = outages(self.carried_out, self.workers, self.coordinators)
        return pauses(self.applied_s, away)

    @cached_property
    def _raw(self) -> list[Span]:
        """Gaps between updates as a reader saw them, including outages."""
        return list(pairwise(self.seen_s))

    def _worst(self) -> list[Span]:
        return sorted(self._pauses, key=length, reverse=True)[:_WORST]

    def _described(self, pause: Span) -> dict[str, Any]:
        """Describe a pause, with the faults felt during it or ending as it began."""
        return {
            "at_s": pause[0],
            "pause_s": length(pause),
            "parts_s": parts(pause, self.events),
            "faults": [
                f"{each.fault.kind} ({each.fault.number})"
                for each in self.carried_out
                if each.began_s < pause[1] and each.span_s[1] >= pause[0]
            ],
        }

    def _next_s(self) -> list[tuple[CarriedOut, float]]:
        """Return the time from each fault's beginning to the next update."""
        found = ((each, next_after(self.applied_s, each.began_s)) for each in self.carried_out)
        return [(each, at - each.began_s) for each, at in found if at is not None]

    def _pause_of(self, each: CarriedOut) -> Span:
        """Return the longest pause that was under way or began while a fault was felt."""
        return longest(self._pauses, *each.span_s)

    def _parts_by_kind(self) -> dict[str, dict[str, float]]:
        """Return what pauses consist of, averaged over all faults of a kind."""
        found, times = dict[str, Counter[str]](), Counter[str]()
        for each in self.carried_out:
            times[each.fault.kind] += 1
            found.setdefault(each.fault.kind, Counter()).update(
                parts(self._pause_of(each), self.events)
            )
        return {
            kind: {part: found[kind][part] / times[kind] for part in PARTS if found[kind][part]}
            for kind in sorted(found)
        }


def by_kind(times_s: Iterable[tuple[CarriedOut, float]]) -> dict[str, dict[str, float]]:
    """Summarize times by the kind of their fault."""
    found = dict[str, list[float]]()
    for each, time_s in times_s:
        found.setdefault(each.fault.kind, []).append(time_s)
    return {
        kind: {"times": len(found[kind]), **report.spread(found[kind], _SPREAD)}
        for kind in sorted(found)
    }
