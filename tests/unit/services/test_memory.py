"""A worker holds only weights that fit into its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from common.learning.host import memory_bytes
from services.worker.memory import check_group_memory, group_bytes, room_for_slices

MIB = 1 << 18  # numbers


def test_group_memory_check_accepts_weights_that_fit() -> None:
    check_group_memory(MIB, 2, 13 << 20)
    check_group_memory(MIB, 0, group_bytes(memory_bytes()))


@pytest.mark.parametrize(
    ("numbers", "allowed"),
    # No machine has this much memory.
    [(MIB, 12 << 20), (MIB << 24, group_bytes(memory_bytes()))],
)
def test_group_memory_check_rejects_weights_that_do_not_fit(numbers: int, allowed: int) -> None:
    with pytest.raises(UserError, match="half of the machine or container"):
        check_group_memory(numbers, 2, allowed)


def test_room_for_slices_follows_the_allowed_memory() -> None:
    # A million numbers take 48 MiB on any member, and with Adam 4 * (4 * 2 + 2 + 6) / 32 MiB per
    # slice.
    def room(mib: int) -> int:
        return room_for_slices(MIB << 2, 2, 32, 6, mib << 20)

    assert [room(mib) for mib in (48, 49, 50, 58, 112, 9000)] == [0, 0, 1, 5, 32, 32]
    with pytest.raises(UserError, match="need 48 MiB in each worker, but only 47"):
        room(47)


# The first write to memory causes a page fault: one per 4,096 bytes, or one per huge page of 2 MiB.
_FAULTS = """
from resource import RUSAGE_SELF, getrusage
from services.worker.memory import keep_freed_memory
keep_freed_memory()
import torch
before = getrusage(RUSAGE_SELF).ru_minflt
kept = torch.ones(16 << 20)
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


def test_large_vectors_use_huge_pages_if_the_system_has_them() -> None:
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not pages.exists() or "[never]" in pages.read_text():
        pytest.skip("this system has none")
    environment = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    found = subprocess.run(  # noqa: S603 -- our own command line, no shell
        [sys.executable, "-c", _FAULTS], env=environment, capture_output=True, check=True, text=True
    )
    # 64 MiB have 16,384 pages of 4,096 bytes.
    assert int(found.stdout) < 16_384 / 2
