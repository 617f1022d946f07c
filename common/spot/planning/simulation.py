"""The API's request for a simulation: an experiment, the number of runs, and limits of its size.

A request over the API can read no file of the machine that answers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import msgspec
from pydantic import ConfigDict, Field, model_validator

from common.config.policy_names import PolicyName  # noqa: TC001 -- pydantic reads both when run
from common.errors import GivenError
from common.spot.experiments.spec import LIVE_STREAMS, Experiment
from common.spot.traces.spec import TraceSpec, WrittenPart

if TYPE_CHECKING:
    from collections.abc import Iterator

# Limit of machines over all runs, whose numbers take half a gigabyte.
MOST_MACHINES = 2_000_000
# Limit of machines times updates in mode analytic: some 20 s.
MOST_STEPS = 2 * 10**10
# Limit of batches over all runs in mode protocol: 20,000 take about a second.
MOST_BATCHES = 500_000
MOST_WORKERS_BY_PROTOCOL = 2_000
# Limit of a learning network's weights over all versions: 200 MB with an optimizer.
MOST_WEIGHTS = 10_000_000
BUILT_IN = "digits"  # a data set that is no file


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result or progress of a simulation in its own process, see `simulation_process`."""

    results: msgspec.Raw = msgspec.Raw(b"null")  # result of `compare.as_data`
    # Reason without results.
    refused: str = ""
    # A policy, and the share of its runs that is done.
    progress: tuple[str, float] | None = None


REPORT = msgspec.json.Decoder(Report)


class SimulateRequest(WrittenPart):
    """An experiment to simulate, the number of its runs, and the policies to compare."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "experiment": {
                    "name": "paper",
                    "workers": 64,
                    "rates": 125,
                    "group_size": 20,
                    "batch_size": 256,
                    "updates": 10000,
                    "deadline_s": 6720,
                    "on_demand": {"usd_per_hour": 0.286},
                    "spot": [{"usd_per_hour": 0.158, "availability": 0.9}],
                },
                "runs": 12,
                "policies": ["on-demand", "static"],
            }
        },
    )

    experiment: Experiment
    runs: Annotated[
        int, Field(ge=1, le=100_000, description="Number of simulated runs per policy.")
    ] = 12
    seed: Annotated[
        int,
        Field(
            ge=0,
            lt=2**63,
            description="Seed of the random numbers for rates, arrivals, prices and preemptions.",
        ),
    ] = 0
    policies: Annotated[
        tuple[PolicyName, ...],
        Field(
            max_length=16,
            description="Policies (rules that decide which machines to rent) to compare. Optional."
            " If unset, only the policy that the experiment names.",
        ),
    ] = ()

    @model_validator(mode="after")
    def _bids_for_a_backlog(self) -> SimulateRequest:
        if "bidbrain" in self.policies and self.experiment.arrivals.process != "backlog":
            raise ValueError(f"policies: {LIVE_STREAMS}")
        return self


def check_size(request: SimulateRequest) -> None:
    """Reject a simulation that takes too long or too much memory.

    Raises:
        GivenError: With the limit.
    """
    experiment, policies = request.experiment, max(len(set(request.policies)), 1)
    machines = experiment.workers * request.runs
    if machines > MOST_MACHINES:
        problem = f"workers x runs must be at most {MOST_MACHINES:,}, got {machines:,}"
        raise GivenError(("experiment.workers", "runs"), problem)
    if experiment.mode == "analytic":
        steps = machines * experiment.updates * policies
        if steps > MOST_STEPS:
            problem = (
                f"workers x runs x updates x policies must be at most {MOST_STEPS:,}, got {steps:,}"
            )
            raise GivenError(("experiment.updates", "runs"), problem)
        return
    if experiment.workers > MOST_WORKERS_BY_PROTOCOL:
        problem = (
            f"must be at most {MOST_WORKERS_BY_PROTOCOL:,} in mode protocol, got"
            f" {experiment.workers:,}"
        )
        raise GivenError(("experiment.workers",), problem)
    if experiment.learning is not None:
        hidden = experiment.learning.hidden
        # Versions that a gradient may still use.
        versions = 1 + experiment.most_staleness
        weights = versions * sum(before * after for before, after in pairwise((1, *hidden, 1)))
        if weights > MOST_WEIGHTS:
            problem = (
                f"weights of the network x {versions:,} versions (1 + staleness) must be at most"
                f" {MOST_WEIGHTS:,}, got {weights:,}"
            )
            raise GivenError(("experiment.learning.hidden",), problem)
    batches = experiment.updates * experiment.group_size * request.runs * policies
    if batches > MOST_BATCHES:
        problem = (
            f"updates x group_size x runs x policies must be at most {MOST_BATCHES:,} in mode"
            f" protocol, got {batches:,}; mode analytic allows more"
        )
        raise GivenError(("experiment.updates", "runs"), problem)


def check_files(request: SimulateRequest) -> None:
    """Reject files: of traces, of a data set.

    Raises:
        GivenError: By the field that names it.
    """
    for field in _files(request.experiment):
        raise GivenError(
            (field,),
            "the API does not read files; run `doll simulate` on the machine that has the file",
        )


def _files(experiment: Experiment) -> Iterator[str]:
    for number, pool in enumerate(experiment.spot):
        for name in ("usd_per_hour", "availability"):
            value = getattr(pool, name)
            if isinstance(value, TraceSpec):
                yield f"experiment.spot[{number}].{name}.file"
    if experiment.arrivals.trace is not None:
        yield "experiment.arrivals.trace.file"
    if experiment.learning is not None and experiment.learning.data != BUILT_IN:
        yield "experiment.learning.data"
