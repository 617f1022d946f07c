"""Keep freed memory in the process: a gradient frees and takes the same megabytes at each batch.

By default the allocator gives large blocks back to the system at once and takes them anew, page by
page: 20-29 % of the time of a small CNN's gradient went into that. Only the main arena can do
better, since those of other threads are made of pieces of 64 MB that are unmapped when empty; so
all threads share it. The gradient thread took 81 ms for a batch with an arena of its own, 57 ms so.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)
KEPT_BYTES = 1 << 30  # freed memory that the process keeps at the top of its heap
LARGEST_BYTES = 32 << 20  # the largest that glibc lets the heap serve; above it maps anyway


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed; False where it does not take such advice.

    Before any other thread is started: one that has an arena keeps it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    advice = {M_MMAP_THRESHOLD: LARGEST_BYTES, M_TRIM_THRESHOLD: KEPT_BYTES, M_ARENA_MAX: 1}
    return all(mallopt(parameter, value) for parameter, value in advice.items())
