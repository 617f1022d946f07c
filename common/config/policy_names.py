"""Names of the policies that say which machines a job rents; see `common.spot.policies`."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

StreamPolicyName: TypeAlias = Literal[  # for streams that arrive as the job goes
    "on-demand",  # section V's yardstick
    "static",  # Theorems 4 and 5, once
    "adaptive",  # section V-C
    "chance",  # the deadline with a probability
    "pools",  # machines are counted, over several kinds of spot ones
]
PolicyName: TypeAlias = Literal[StreamPolicyName, "bidbrain"]  # that bids for a backlog
STREAM_POLICIES: tuple[StreamPolicyName, ...] = get_args(StreamPolicyName)
