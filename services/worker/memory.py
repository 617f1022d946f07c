"""Memory of a worker: what is freed is kept, and no more weights are held than there is room for.

A gradient frees and takes the same megabytes at each batch.

By default the allocator gives large blocks back to the system at once and takes them anew, page by
page: 20-29 % of the time of a small CNN's gradient went into that. Only the main arena can do
better, since those of other threads are made of pieces of 64 MB that are unmapped when empty; so
all threads share it. The gradient thread took 81 ms for a batch with an arena of its own, 57 ms so.

What is larger than the allocator keeps comes in pages of 2 MiB, where the system has them: 4,096
bytes at a time 100 MB take 50 ms of a processor to come, and 10 ms so. NumPy asks for that itself.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from common.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)
KEPT_BYTES = 1 << 30  # freed memory that the process keeps at the top of its heap
_CGROUP = Path("/sys/fs/cgroup/memory.max")
# Read by torch at its first allocation.
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# Numbers that a member holds for each of the model's: in the trainer weights, of the module weights
# and gradient, what a backward pass makes before it is added, a gradient that waits, what is added
# up in place, a copy on its way, and two on the way to the board.
_HELD = 9
# Likewise where slices have owners: weights, the next ones, a sum; of the module weights and
# gradient; a gradient that waits, what is sent, what is gathered; a copy on its way, twice, and two
# on the way to the board.
_HELD_OF_ALL = 12
LARGEST_BYTES = 32 << 20  # the largest that glibc lets the heap serve; above it maps anyway


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed; False where it does not take such advice.

    Before any other thread is started: one that has an arena keeps it. And before torch makes its
    first tensor: later it takes large pages no more.
    """
    os.environ.setdefault(_LARGE_PAGES, "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    advice = {M_MMAP_THRESHOLD: LARGEST_BYTES, M_TRIM_THRESHOLD: KEPT_BYTES, M_ARENA_MAX: 1}
    return all(mallopt(parameter, value) for parameter, value in advice.items())


def check_group_memory(numbers: int, states: int, allowed: int) -> None:
    """Refuse weights for which a member of a group has no room.

    Args:
        numbers: P + B, of the model.
        states: How many the optimizer keeps for each.
        allowed: Bytes, such as `group_bytes`.

    Raises:
        UserError: If they are too many.
    """
    # A copy has the optimizer's state, too.
    _check_fits(4 * numbers * (_HELD + 2 * states), allowed)


def room_for_slices(numbers: int, states: int, count: int, members: int, allowed: int) -> int:
    """How many slices a member can own; refuses weights for which there is no room even so.

    An owner holds of each slice the optimizer's state, the next one, one on its way to another
    owner and one to storage, the weights with the latter, what all members send of it, and the sum.

    Args:
        numbers: P + B, of the model.
        states: How many the optimizer keeps for each.
        count: Of all slices.
        members: How many send gradients of it.
        allowed: Bytes, such as `group_bytes`.

    Raises:
        UserError: If they are too many.
    """
    base = 4 * numbers * _HELD_OF_ALL
    _check_fits(base, allowed)
    each = 4 * -(-numbers // count) * (4 * states + 2 + members)
    return min((allowed - base) // each, count)


def group_bytes() -> int:
    """Memory for the weights of a job and all that goes with them: half of the machine's.

    The rest is for torch, batches and the system. Of a container its limit counts.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        machine = min(machine, int(_CGROUP.read_text()))
    return machine >> 1


def _check_fits(needed: int, allowed: int) -> None:
    if needed >> 20 > allowed >> 20:
        raise UserError(
            f"aggregation.mode: the weights of this job take {needed >> 20:,} MiB of each worker,"
            f" more than {allowed >> 20:,}, half of its machine or container: take larger ones, or"
            " mode: board"
        )
