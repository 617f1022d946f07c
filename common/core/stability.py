"""Whether updates keep up with what arrives: both sides of Proposition 1, as loads.

Below 1 a load is carried. The records of all streams together are shared evenly by the workers.
"""

from __future__ import annotations

from math import ceil


def sufficient_load(arrivals_per_s: float, batch_size: int, gradient_s: float) -> float:
    """Give the time of one gradient over the time between batches: mu_C over b / (N lambda_A).

    Below 1 is enough even where one worker has all K batches of every group. It is not necessary:
    while batches are spread, up to N of them are computed at once.

    Args:
        arrivals_per_s: Records of all workers together, N lambda_A.
        batch_size: b.
        gradient_s: mu_C, the mean time of one gradient and its upload.
    """
    return gradient_s * arrivals_per_s / batch_size


def necessary_load(
    arrivals_per_s: float, workers: int, group_size: int, batch_size: int, gradient_s: float
) -> float:
    """Give the shortest round over the time between groups: ceil(K/N) mu_C over K b / (N lambda_A).

    From 1 on no assignment of batches is stable: some worker has at least ceil(K/N) of the K
    batches, and the round waits for it. Gradient times that vary only lengthen a round, as it ends
    with its slowest worker (H_K mu_C for K = N and exponential times).

    Args:
        arrivals_per_s: As above.
        workers: N, at least 1; a worker without records is none.
        group_size: K.
        batch_size: b.
        gradient_s: mu_C.
    """
    return (
        ceil(group_size / workers)
        * sufficient_load(arrivals_per_s, batch_size, gradient_s)
        / group_size
    )
