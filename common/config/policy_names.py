"""Names of the policies that decide which machines a job rents; see `common.spot.policies`."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

# Policies for streams whose records arrive while the job runs.
StreamPolicyName: TypeAlias = Literal[
    # Section V's baseline.
    "on-demand",
    # Theorems 4 and 5, applied once.
    "static",
    # Section V-C.
    "adaptive",
    # Meets the deadline with a given probability.
    "chance",
    # Chooses numbers of machines over several spot pools.
    "pools",
]
# `bidbrain` bids for machines that work off a backlog.
PolicyName: TypeAlias = Literal[StreamPolicyName, "bidbrain"]
STREAM_POLICIES: tuple[StreamPolicyName, ...] = get_args(StreamPolicyName)
