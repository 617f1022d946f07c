"""Warnings about jobs that are accepted but may not do what their owner expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.config.synchronisation import ModeSpec
    from common.core.liveness import Device
    from common.jobs.spec import JobSpec

# Largest staleness s that needed few more records for the same loss in measurements, at the
# majority of learning rates.
FRESH = 2
# Numbers that an optimizer keeps for each parameter, if not two.
STATES = {"sgd": 0, "momentum": 1, "adagrad": 1, "ftrl": 3}


def notes_on(spec: JobSpec) -> tuple[str, ...]:
    """Return the warnings to show when a job is submitted or changed."""
    notes = list[str]()
    if spec.grouped:
        notes.append(
            "aggregation.mode: workers of a group connect to each other without encryption and"
            " authentication; they need a private network, and object storage in DOLL_BLOBS"
        )
    stalest = max((mode.fixed_staleness for mode, _ in _stale(spec)), default=0)
    if stalest > FRESH:
        notes.append(
            f"synchronisation.staleness: values above {FRESH} rarely make training faster, and"
            f" with {stalest} the same loss may need more records; try 1 first"
        )
    asked = spec.provisioning
    if asked is not None and (note := window_note(spec, asked.workers)):
        notes.append(note)
    return tuple(notes)


def gpu_note(spec: JobSpec, model_mb: float, smallest: Device | None) -> str:
    """Return a warning if the job's model does not fit into a GPU; else "".

    Args:
        spec: The job.
        model_mb: Size of its weights in MiB.
        smallest: GPU with the least memory. None if there is no GPU.
    """
    states = STATES.get(spec.optimizer.name, 2)
    needed = (2 + states) * model_mb
    if smallest is None or needed * (1 << 20) <= smallest.memory_bytes:
        return ""
    return (
        f"task: weights, gradient and optimizer state take {needed:,.0f} MiB, but a worker's GPU"
        f" ({smallest.name}) has only {smallest.memory_bytes >> 20:,} MiB; use a smaller model or"
        " set DOLL_GPUS=none on that worker"
    )


def window_note(spec: JobSpec, workers: int | None) -> str:
    """Return a warning if too few batches may wait for stale updates to overlap; else "".

    Updates whose gradients may be s versions old need s + 2 groups of K batches: s + 1 groups in
    flight, and one that fills up.
    """
    needed = max(((mode.fixed_staleness + 2) * k for mode, k in _stale(spec)), default=0)
    if not workers or workers * spec.waiting_bound >= needed:
        return ""
    return (
        f"waiting_batches: stale updates overlap only if (s + 2) K = {needed} batches may wait, but"
        f" {workers} workers with {spec.waiting_bound} each allow fewer; set it to"
        f" {-(-needed // workers)} or remove it. If the job is running, lower group_size or"
        " staleness"
    )


def _stale(spec: JobSpec) -> list[tuple[ModeSpec, int]]:
    """Return the job's stale modes, including those of its rules, each with its K."""
    modes = spec.synchronised.modes(spec.group_size)
    return [(mode, k) for mode, k in modes if mode.mode == "stale"]
