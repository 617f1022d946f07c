"""A DOLL system as commands see it: each command is written once, against this protocol.

`services.cli.system.direct` fulfils it with Kafka, Redis and storage, `services.cli.system.api`
with the REST API (`doll --api URL`). What is asked and answered is the same, and so are errors and
exit codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from common.api.answers import (
        DeadLettersPage,
        JobList,
        KeptVersions,
        PricesAnswer,
        Progress,
        ProvisioningAnswer,
        RemainsAnswer,
        ToldPlan,
        UpdateAnswer,
    )
    from common.core.events import Wanted
    from common.core.losses import ReadFrom
    from common.jobs.edit import Value
    from common.jobs.progress import State
    from common.jobs.quarantine import QuarantinedBatch, RequeuedBatch
    from common.jobs.store import JobRecord
    from common.spot.planning.compare import Result
    from common.spot.planning.request import PlanRequest
    from common.spot.planning.simulation import SimulateRequest
    from common.storage.find import Wish

    Tell: TypeAlias = Callable[[str], object]  # where a person hears what was left out
    Advance: TypeAlias = Callable[[str, float], None]  # policy, share of its runs that is done


SHOWN_UPDATES = 10  # of a job that somebody watches


class Submitted(NamedTuple):
    """A job that was posted, and what a person should know of how it begins."""

    record: JobRecord
    beginning: str = ""
    notes: tuple[str, ...] = ()
    unchecked: str = ""  # why its task was not checked


class PulledModel(NamedTuple):
    """A model's weights as safetensors, and the update that made them."""

    epoch: int
    version: int
    data: bytes


class Picture(NamedTuple):
    """How a job is that somebody watches; None is what is not known."""

    state: State
    progress: Progress
    alive: int | None  # workers
    leaving: int
    updates: tuple[UpdateAnswer, ...]  # the last ones, newest last


class Watched(Protocol):
    """One job that somebody looks at again and again."""

    def look(self, timeout_s: float) -> Picture:
        """Wait for news up to `timeout_s`, and say how the job is."""

    def close(self) -> None:
        """Look no more."""


class System(Protocol):
    """What a command may ask.

    Every call may raise `UserError` (`NotFoundError`, `ConflictError`) where it makes no sense, and
    `UnavailableError` where a server is unavailable.
    """

    def submit(self, text: str, source: str, *, unchecked: bool = False) -> Submitted:
        """Check a job whole and post it.

        Args:
            text: The job file.
            source: JOB or JOB@VERSION whose checkpoint it begins with; empty: its own version 0.
            unchecked: Do not build its task to check it.
        """

    def jobs(self) -> JobList:
        """All jobs, by name, each with its state."""

    def job(self, name: str) -> JobRecord:
        """One job."""

    def want(self, name: str, wanted: Wanted, reason: str) -> JobRecord:
        """Change what is wanted of a job; return the job as it is then."""

    def resume_after_loss(
        self, name: str, reason: str, *, from_start: bool, read_from: ReadFrom
    ) -> None:
        """Go on with a job that is held since Kafka lost records, with what is left."""

    def change(self, name: str, changed: Mapping[str, Value], reason: str) -> JobRecord:
        """Change settings of a job; see `common.jobs.edit`."""

    def delete(self, name: str) -> None:
        """Take a stopped job out of the list."""

    def remains(self, name: str) -> RemainsAnswer:
        """What a purge of a name would remove."""

    def purge(self, name: str) -> RemainsAnswer:
        """Make a name free, and remove what is left of its jobs: see `common.jobs.purge`."""

    def quarantine(self, name: str) -> list[QuarantinedBatch]:
        """What is quarantined in a job, oldest batch first."""

    def dead_letters(self, name: str, limit: int) -> DeadLettersPage:
        """What a job could not use; so many reasons at most."""

    def requeue(self, name: str, batches: Sequence[int] | None) -> list[RequeuedBatch]:
        """Take batches out of quarantine; see `common.jobs.quarantine`.

        Args:
            name: Of the job.
            batches: None: all for which it is possible.
        """

    def watch(self, name: str) -> Watched:
        """Look at a job."""

    def model(self, name: str, wish: Wish, tell: Tell) -> PulledModel:
        """Take a model out."""

    def versions(self, name: str, tell: Tell) -> KeptVersions:
        """Versions whose weights are kept, newest first."""

    def plan(self, request: PlanRequest) -> ToldPlan:
        """Plan how many workers shall run on spot machines; `GivenError` names fields."""

    def simulate(
        self, request: SimulateRequest, folder: Path, advance: Advance
    ) -> dict[str, Result]:
        """Simulate an experiment under its policies.

        Args:
            request: What to simulate.
            folder: What its files are relative to.
            advance: Is told how far it is, where that can be known.
        """

    def provisioning(self, name: str, limit: int) -> ProvisioningAnswer:
        """How a job's machines are rented, with its last plans."""

    def replan(self, name: str, reason: str) -> None:
        """Ask the policy of a job's machines anew."""

    def prices(self) -> PricesAnswer:
        """What machines cost now."""
