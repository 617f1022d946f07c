"""Comparison of floats that were added up in different orders.

The order of additions depends on the processor, because each kernel of BLAS, oneDNN and torch has
its own, and on the division of records into batches. So sums of the same numbers differ by some
units in the last place (ulps) of the largest number that was added, however small the sum is. A
fixed tolerance could be less than one such unit; these tolerances can't. Tests of results that must
be equal bit by bit use `==`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def assert_within_ulps(
    found: npt.ArrayLike, expected: npt.ArrayLike, ulps: int, scale: npt.ArrayLike | None = None
) -> None:
    """Fail if numbers differ by more than `ulps` units in the last place of `scale`, a float32.

    Args:
        found: Numbers, (n, ...).
        expected: As many numbers.
        ulps: Largest difference that rounding may cause.
        scale: Largest numbers that were rounded on the way. By default the largest of `expected`.
    """
    expected = np.asarray(expected, np.float64)
    largest = np.abs(expected).max() if scale is None else np.abs(scale)
    unit = np.spacing(np.asarray(largest, np.float32)).astype(np.float64)
    found_ulps = float((np.abs(np.asarray(found, np.float64) - expected) / unit).max())
    assert found_ulps <= ulps, f"differ by {found_ulps:g} units in the last place of {largest}"
