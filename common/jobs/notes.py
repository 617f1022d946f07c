"""What a person should know of a job that is let through, and that may not do what was meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.config.synchronisation import ModeSpec
    from common.jobs.spec import JobSpec

FRESH = 2  # s up to which staleness was seen to cost few records, at most rates of learning


def notes_on(spec: JobSpec) -> tuple[str, ...]:
    """What is to be known when a job is submitted or changed."""
    notes = list[str]()
    if spec.grouped:
        notes.append(
            "aggregation.mode: workers add up among themselves over connections that are neither"
            " encrypted nor authenticated: they need a private network, and DOLL_BLOBS"
        )
    stalest = max((mode.fixed_staleness for mode, _ in _stale(spec)), default=0)
    if stalest > FRESH:
        notes.append(
            f"synchronisation.staleness: above {FRESH} there is rarely more speed, and gradients of"
            f" weights as old as {stalest} updates may cost more records than they save: try 1"
            " first"
        )
    asked = spec.provisioning
    if asked is not None and (note := window_note(spec, asked.workers)):
        notes.append(note)
    return tuple(notes)


def window_note(spec: JobSpec, workers: int | None) -> str:
    """Why rounds wait for each other in vain; empty where they do not.

    Updates whose gradients may be s versions old need s + 2 groups of K batches: of s + 1 in
    flight, and of the one that gathers.
    """
    needed = max(((mode.fixed_staleness + 2) * k for mode, k in _stale(spec)), default=0)
    if not workers or workers * spec.waiting_bound >= needed:
        return ""
    return (
        f"waiting_batches: {spec.waiting_bound} of each of {workers} workers are fewer than the"
        f" {needed} batches, (s + 2) K, without which staleness is of no use: submit it with"
        f" {-(-needed // workers)} or without the field; of a job that runs, lower group_size or"
        " staleness"
    )


def _stale(spec: JobSpec) -> list[tuple[ModeSpec, int]]:
    """The job's stale modes, rules' with them, each with its K."""
    modes = spec.synchronised.modes(spec.group_size)
    return [(mode, k) for mode, k in modes if mode.mode == "stale"]
