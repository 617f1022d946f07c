"""Services as child processes that can be killed, stopped and restarted."""

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

# Prefix of the environment variables of settings.
_OURS = "DOLL_"


class EmbeddedService(Child):
    """A service in a child process, which ends with this process.

    Args:
        kind: Service, or the module of another program with the same options.
        name: Name of the process, unique among its kind. Its output goes to `<name>.log`.
        settings: Settings of the process. It inherits no others.
        logs: Existing folder for the log.
        arguments: Further arguments of the command line.
        forks: True if the fork server may start the process.
    """

    # A worker completes its gradient in this time, and a coordinator its last checkpoint.
    stop_s = 10.0

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
    """Start a worker that survives this process, as if on another machine.

    Args:
        job: Id of the only job that the worker takes part in.
        settings: Settings of the worker. It serves no metrics, because the provisioner uses the
            port in these settings.
        logs: Existing folder for the log `<worker>.log`.
        worker: Name of the worker.
        environment: Environment variables besides the settings.

    Raises:
        OSError: If the process cannot be started.
    """
    command = command_of("services.worker", "--job", job, "--name", worker)
    own = settings.model_copy(update={"metrics_port": 0})
    variables = {**environment_of(own), **environment}
    return Child(command, logs / f"{worker}.log", variables, stays=True)


def stop_all(services: Sequence[EmbeddedService]) -> None:
    """Stop services at the same time, which takes as long as the slowest one."""
    for service in services:
        service.ask_to_end()
    for service in services:
        service.stop()


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the environment of a child: the one of this process, with only these settings."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    # A task may be in the working directory.
    here = () if sys.flags.safe_path else (os.curdir,)
    others = (*here, *inherited.get("PYTHONPATH", "").split(os.pathsep))
    return {**inherited, "PYTHONPATH": search_path(others), **settings.environ()}
