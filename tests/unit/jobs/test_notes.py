"""Notes about an accepted job appear when they help the user, and disappear when they don't."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.liveness import Device
from common.jobs.job_file import parse_job
from common.jobs.notes import STATES, gpu_note, notes_on, window_note
from common.learning.optimizers import STATE_NAMES
from tests.unit.jobs.test_spec import TEXT

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec

# With K = 20, this mode needs 80 waiting batches.
STALE = "synchronisation: {mode: stale, staleness: 2}\n"


PLAIN = "".join(
    line for line in TEXT.splitlines(keepends=True) if not line.startswith("provisioning:")
)


def job(options: str = "") -> JobSpec:
    return parse_job(PLAIN + options)


def test_ordinary_job_has_no_notes() -> None:
    assert notes_on(job()) == notes_on(job(STALE)) == ()
    assert window_note(job(STALE), 1) == window_note(job("waiting_batches: 20\n"), 1) == ""


def test_group_mode_has_a_note_about_the_private_network() -> None:
    [note] = notes_on(job("aggregation: {mode: group}\n"))
    assert "without encryption and authentication; they need a private network" in note


def test_model_that_is_larger_than_the_smallest_gpu_has_a_note() -> None:
    spec, gpu = job(), Device("cuda", "NVIDIA L4", 24 << 30)
    needed = (2 + STATES.get(spec.optimizer.name, 2)) * 1024
    assert gpu_note(spec, 1e6, None) == ""
    assert gpu_note(spec, 24 / needed * (1 << 20), gpu) == ""
    note = gpu_note(spec, 25 / needed * (1 << 20), gpu)
    assert "state take 25,600 MiB, but a worker's GPU (NVIDIA L4) has only 24,576 MiB" in note


@pytest.mark.parametrize("name", STATE_NAMES)
def test_state_of_each_optimizer_is_known(name: str) -> None:
    assert STATES.get(name, 2) == len(STATE_NAMES[name] - {"step"})


def test_large_staleness_has_a_note() -> None:
    [note] = notes_on(job("synchronisation: {mode: stale, staleness: 3}\n"))
    assert note.startswith("synchronisation.staleness: values above 2 ")


@pytest.mark.parametrize(
    ("workers", "waiting", "raised"), [(2, 39, 40), (3, 26, 27), (2, 40, 0), (None, 20, 0)]
)
def test_too_few_waiting_batches_for_the_live_workers_have_a_note(
    workers: int | None, waiting: int, raised: int
) -> None:
    spec = job(f"{STALE}waiting_batches: {waiting}\n")
    note = window_note(spec, workers)
    assert bool(note) == bool(raised)
    if raised:
        assert f"{workers} workers with {waiting} each allow fewer" in note
        assert f"set it to {raised} or remove it" in note


def test_waiting_batches_note_for_rented_workers_appears_at_submission() -> None:
    rented = "provisioning: {workers: 2}\n"
    assert notes_on(job(f"{STALE}waiting_batches: 40\n{rented}")) == ()
    [note] = notes_on(job(f"{STALE}waiting_batches: 20\n{rented}"))
    assert note.startswith("waiting_batches: stale updates overlap only")
