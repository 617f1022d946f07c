"""An experiment tracker in memory that can be unavailable, refuse calls or lose its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import DollError, UnavailableError, UserError
from common.tracking.port import Metric, ModelVersion, RunStatus, TrackedRun


@dataclass
class MemoryRun:
    """A stored run."""

    experiment: str
    name: str
    parameters: dict[str, str]
    tags: dict[str, str]
    status: RunStatus = "RUNNING"
    # No metric is in the list twice.
    metrics: list[Metric] = field(default_factory=list)


@dataclass
class MemoryVersion:
    """A stored version of a model."""

    source: str
    run: str
    tags: dict[str, str]


class MemoryTracking:
    """An MLflow-like store whose content tests may read and change."""

    def __init__(self) -> None:
        self.experiments = {"Default"}
        self.runs = dict[str, MemoryRun]()
        # Keyed by name and version number.
        self.models = dict[str, dict[str, MemoryVersion]]()
        self.aliases = dict[tuple[str, str], str]()
        # Raised by each call.
        self.error: DollError | None = None
        # True to carry each call out, but lose the answer.
        self.loses_answers = False
        self.calls = 0

    def begin(
        self,
        experiment: str,
        name: str,
        identity: Mapping[str, str],
        parameters: Mapping[str, str],
    ) -> TrackedRun:
        self._called()
        if experiment not in self.experiments:
            raise UserError(f'there is no experiment "{experiment}"')
        same = (
            key
            for key, run in self.runs.items()
            if run.experiment == experiment and identity.items() <= run.tags.items()
        )
        key = next(same, f"run-{len(self.runs)}")
        made = MemoryRun(experiment, name, dict(parameters), dict(identity))
        run = self.runs.setdefault(key, made)
        self._answers()
        return TrackedRun(key, run.status, dict(run.tags))

    def log(self, run: str, metrics: Sequence[Metric], tags: Mapping[str, str]) -> None:
        self._called()
        kept = self._run(run)
        kept.metrics += [metric for metric in metrics if metric not in kept.metrics]
        kept.tags |= tags
        self._answers()

    def set_status(self, run: str, status: RunStatus) -> None:
        self._called()
        self._run(run).status = status
        self._answers()

    def versions(self, model: str, tags: Mapping[str, str]) -> list[ModelVersion]:
        self._called()
        return [
            ModelVersion(number, dict(version.tags))
            for number, version in self.models.get(model, {}).items()
            if tags.items() <= version.tags.items()
        ]

    def register(self, model: str, source: str, run: str, tags: Mapping[str, str]) -> str:
        self._called()
        versions = self.models.setdefault(model, {})
        number = str(len(versions) + 1)
        versions[number] = MemoryVersion(source, run, dict(tags))
        self._answers()
        return number

    def set_version_tag(self, model: str, number: str, name: str, value: str) -> None:
        self._called()
        self._version(model, number).tags[name] = value
        self._answers()

    def set_alias(self, model: str, alias: str, number: str) -> None:
        self._called()
        self._version(model, number)
        self.aliases[model, alias] = number
        self._answers()

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _run(self, run: str) -> MemoryRun:
        if run not in self.runs:
            raise UserError(f"there is no run {run}")
        return self.runs[run]

    def _version(self, model: str, number: str) -> MemoryVersion:
        found = self.models.get(model, {}).get(number)
        if found is None:
            raise UserError(f"there is no version {number} of {model}")
        return found

    def _called(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error

    def _answers(self) -> None:
        if self.loses_answers:
            raise UnavailableError("the answer was lost")
