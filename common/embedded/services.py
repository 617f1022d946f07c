"""Our own services as child processes: started with settings, killed, stopped and brought back."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Literal, TypeAlias

from common.config.program import command_of, search_path
from common.embedded.process import Child

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from common.config.settings import Settings

Kind: TypeAlias = Literal["worker", "coordinator", "provisioner", "evaluator", "admin", "serve"]

_OURS = "DOLL_"  # variables of our settings begin so


class EmbeddedService(Child):
    """A service in a process of its own, which ends with this one.

    Args:
        kind: Which service; or, by its module, another program that takes its options.
        name: Of this process, unique among its kind; what it says goes to `<name>.log`.
        settings: What the process takes from its environment; it inherits no other.
        logs: An existing folder.
        arguments: Further ones of its command line.
        forks: Whether the fork server may start it, sooner than a machine of its own would.
    """

    stop_s = 10.0  # a worker finishes its gradient, a coordinator its last checkpoint

    def __init__(
        self,
        kind: Kind | str,
        name: str,
        settings: Settings,
        logs: Path,
        arguments: Sequence[str] = (),
        *,
        forks: bool = False,
    ) -> None:
        module = kind if "." in kind else f"services.{kind}"
        super().__init__(
            command_of(module, "--name", name, *arguments),
            logs / f"{name}.log",
            environment_of(settings),
            name=name,
            forks=forks,
        )


def start_machine(
    job: str, settings: Settings, logs: Path, worker: str, environment: Mapping[str, str]
) -> Child:
    """Start a worker as if on a machine of its own, which survives this process.

    Args:
        job: The id of the only one that it works for.
        settings: What it takes from its environment. Their port of metrics is that of who rents
            it, and taken: it has none.
        logs: An existing folder; what it says goes to `<worker>.log`.
        worker: Its name.
        environment: Variables that the settings do not say.

    Raises:
        OSError: If there cannot be another process.
    """
    command = command_of("services.worker", "--job", job, "--name", worker)
    own = settings.model_copy(update={"metrics_port": 0})
    variables = {**environment_of(own), **environment}
    return Child(command, logs / f"{worker}.log", variables, stays=True)


def stop_all(services: Sequence[EmbeddedService]) -> None:
    """Stop services together, which takes as long as the slowest."""
    for service in services:
        service.ask_to_end()
    for service in services:
        service.stop()


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment of a process of ours: this one's, but with these settings and no others."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    here = () if sys.flags.safe_path else (os.curdir,)  # where a task may lie
    others = (*here, *inherited.get("PYTHONPATH", "").split(os.pathsep))
    return {**inherited, "PYTHONPATH": search_path(others), **settings.environ()}
