"""A worker's memory: freed blocks are kept, and weights that do not fit are refused.

A gradient frees and allocates the same megabytes at each batch. By default the allocator returns
large blocks to the system at once and gets them again page by page, which took 20-29 % of the time
of a small CNN's gradient. Only the main arena can keep them: other threads' arenas consist of
pieces of 64 MB that are unmapped when empty. So all threads share the main arena. The gradient
thread took 81 ms for a batch with an arena of its own, and 57 ms with the shared one.

Blocks larger than the allocator keeps come in pages of 2 MiB, if the system has them. To map 100 MB
takes 50 ms of a processor in pages of 4,096 bytes, and 10 ms in large pages. NumPy asks for large
pages itself.
"""

from __future__ import annotations

import ctypes
import os

from common.errors import UserError
from common.learning.host import memory_bytes

# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
# Freed memory that the process keeps at the top of its heap.
KEPT_BYTES = 1 << 30
# Torch reads this at its first allocation.
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# Numbers that a member holds for each number of the model: the trainer's weights, the module's
# weights and gradient, the intermediate result of a backward pass, a waiting gradient, the sum, a
# copy in transit, and two on the way to Redis.
_HELD = 9
# The same if slices have owners: the weights, the next weights, and a sum; the module's weights and
# gradient; a waiting gradient, a vector to send, and a gathered one; two of a copy in transit, and
# two on the way to Redis.
_HELD_OF_ALL = 12
# The largest block that glibc serves from the heap; it always maps larger ones.
LARGEST_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory; return False if it has no such setting.

    Call this before starting any other thread, because a thread keeps its arena, and before torch
    makes its first tensor, because torch reads its setting only once.
    """
    os.environ.setdefault(_LARGE_PAGES, "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    advice = {M_MMAP_THRESHOLD: LARGEST_BYTES, M_TRIM_THRESHOLD: KEPT_BYTES, M_ARENA_MAX: 1}
    return all(mallopt(parameter, value) for parameter, value in advice.items())


def check_group_memory(numbers: int, states: int, allowed: int) -> None:
    """Refuse weights that do not fit into a group member.

    Args:
        numbers: P + B of the model.
        states: Numbers that the optimizer keeps for each of them.
        allowed: Bytes, such as `group_bytes`.

    Raises:
        UserError: If the weights do not fit.
    """
    # A copy includes the optimizer's state.
    _check_fits(4 * numbers * (_HELD + 2 * states), allowed)


def room_for_slices(numbers: int, states: int, count: int, members: int, allowed: int) -> int:
    """Return how many slices a member can own; refuse weights that do not fit by themselves.

    For each slice an owner holds the optimizer's state, the next state, a state in transit to
    another owner and one to storage with its weights, the gradients of all members, and their sum.

    Args:
        numbers: P + B of the model.
        states: Numbers that the optimizer keeps for each of them.
        count: Number of all slices.
        members: Number of members that send gradients of a slice.
        allowed: Bytes, such as `group_bytes`.

    Raises:
        UserError: If the weights do not fit.
    """
    base = 4 * numbers * _HELD_OF_ALL
    _check_fits(base, allowed)
    each = 4 * -(-numbers // count) * (4 * states + 2 + members)
    return min((allowed - base) // each, count)


def group_bytes(device_bytes: int) -> int:
    """Return the bytes for a job's weights and everything beside them: half of the memory.

    The rest is for torch, batches and the system. In a container, its limit counts instead.

    Args:
        device_bytes: Memory of the member's device. The smaller memory counts.
    """
    return min(memory_bytes(), device_bytes) >> 1


def _check_fits(needed: int, allowed: int) -> None:
    if needed >> 20 > allowed >> 20:
        raise UserError(
            f"aggregation.mode: the weights of this job need {needed >> 20:,} MiB in each worker,"
            f" but only {allowed >> 20:,} MiB (half of the machine or container) may be used; use"
            " larger machines or `mode: board`"
        )
