"""Port of an experiment tracker, where people compare runs and find models by name.

`common.tracking.mlflow` implements it, and `tests.fakes.tracking` in memory. One contract suite
(tests/contract/test_tracking.py) tests both. A caller that loses an answer may repeat the call
without a duplicate, except for `register`. Errors are those of `common.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

RunStatus: TypeAlias = Literal["RUNNING", "FINISHED", "KILLED"]


class Metric(NamedTuple):
    """One point of a curve. A point that is sent twice counts once.

    Attributes:
        name: Name of the curve. Slashes make folders.
        value: Finite value.
        at_s: Time in seconds since 1970, rounded to milliseconds by trackers.
        step: Step on the horizontal axis.
    """

    name: str
    value: float
    at_s: float
    step: int


class TrackedRun(NamedTuple):
    """One run of an experiment."""

    id: str
    status: RunStatus
    tags: Mapping[str, str]


class ModelVersion(NamedTuple):
    """One version of a registered model."""

    number: str
    tags: Mapping[str, str]


class Tracking(Protocol):
    """An experiment tracker. For one thread at a time.

    Each call may raise `UnavailableError`, if it may work later, or `UserError`, if the tracker
    refuses the request; the message says why and what to do.
    """

    def begin(
        self,
        experiment: str,
        name: str,
        identity: Mapping[str, str],
        parameters: Mapping[str, str],
    ) -> TrackedRun:
        """Find the run with this identity, or create it.

        Args:
            experiment: Name of an existing experiment.
            name: Name of the run for people.
            identity: Tags that identify the run.
            parameters: Parameters of the run, which are written once.
        """

    def log(self, run: str, metrics: Sequence[Metric], tags: Mapping[str, str]) -> None:
        """Add points to curves, then set tags of the run."""

    def set_status(self, run: str, status: RunStatus) -> None:
        """Set the status of a run."""

    def versions(self, model: str, tags: Mapping[str, str]) -> list[ModelVersion]:
        """Return the versions of a registered model with all these tags; empty without a model."""

    def register(self, model: str, source: str, run: str, tags: Mapping[str, str]) -> str:
        """Create a version of a registered model, and the model if it is missing.

        Each call creates another version. A caller that lost an answer checks `versions` first.

        Args:
            model: Name of the model.
            source: Location of the version's files.
            run: Id of the run that made the version.
            tags: Tags of the version.

        Returns:
            The number of the version.
        """

    def set_version_tag(self, model: str, number: str, name: str, value: str) -> None:
        """Set a tag of a version."""

    def set_alias(self, model: str, alias: str, number: str) -> None:
        """Make an alias refer to a version."""

    def close(self) -> None:
        """Close the connections."""
