"""The port of an experiment tracker: where a person compares runs, and finds models by name.

`common.tracking.mlflow` fulfils it, `tests.fakes.tracking` in memory; one contract suite
(tests/contract/test_tracking.py) holds both to the same behaviour. Whoever calls may lose the
answer and call again: nothing is there twice then. Errors are those of `common.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

RunStatus: TypeAlias = Literal["RUNNING", "FINISHED", "KILLED"]


class Metric(NamedTuple):
    """One point of a curve; the same point twice is one."""

    name: str  # folders by slashes
    value: float  # finite
    at_s: float  # since 1970; trackers count milliseconds
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
    """A tracker; belongs to one thread at a time.

    Each call may raise `UnavailableError` (the same call may work later) and `UserError` (what is
    asked is refused: by whom, why, and what to do about it).
    """

    def begin(
        self,
        experiment: str,
        name: str,
        identity: Mapping[str, str],
        parameters: Mapping[str, str],
    ) -> TrackedRun:
        """The run of this identity: found again, or made with it.

        Args:
            experiment: Its name; it must be there.
            name: Of the run, for people.
            identity: Tags by which it is told from all others.
            parameters: What it was started with; written once.
        """

    def log(self, run: str, metrics: Sequence[Metric], tags: Mapping[str, str]) -> None:
        """Add points to curves and, once they are there, set tags of the run."""

    def set_status(self, run: str, status: RunStatus) -> None:
        """Say what became of a run, or that it goes on."""

    def versions(self, model: str, tags: Mapping[str, str]) -> list[ModelVersion]:
        """The versions of a registered model with all these tags; none where there is no model."""

    def register(self, model: str, source: str, run: str, tags: Mapping[str, str]) -> str:
        """Make a version of a registered model, and the model if need be; gives its number.

        Called again it makes another one: whoever lost the answer looks among `versions` first.

        Args:
            model: Its name.
            source: Where the version lies.
            run: What made it.
            tags: What is known of it.
        """

    def set_version_tag(self, model: str, number: str, name: str, value: str) -> None:
        """Change a tag of a version."""

    def set_alias(self, model: str, alias: str, number: str) -> None:
        """Let an alias mean this version."""

    def close(self) -> None:
        """Let go of connections."""
