"""Command lines of our services as processes, and the packages that they find.

A user's working directory or PYTHONPATH may contain folders named `common` and `services`, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse

# Exit status of a service with invalid settings: restarting it will not help.
EXIT_USAGE = 2
# Directory with our packages, in a checkout or installed.
_ROOT = str(Path(__file__).parents[2])


def command_of(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line for a module of ours, to be run with a PYTHONPATH by `search_path`.

    If the process dies of a fault such as SIGSEGV, it writes the stacks of all threads to its log.
    """
    # Without -P, the working directory would be searched first.
    return (sys.executable, "-P", "-X", "faulthandler", "-m", module, *arguments)


def search_path(others: Iterable[str]) -> str:
    """Return a PYTHONPATH with our packages first, followed by other directories."""
    return os.pathsep.join(dict.fromkeys((_ROOT, *filter(None, others))))


class ServiceHelp(NamedTuple):
    """Texts for the help of a service."""

    description: str
    example: str
    # Help of `--job`; empty if the service has no such option.
    job: str = ""
    # Further options, each with its arguments for argparse.
    options: Mapping[str, Mapping[str, str]] = {}


SERVICES = {
    "worker": ServiceHelp(
        "Run a worker, which reads a job's streams and computes gradients.",
        "python -m services.worker --job digits --name w1",
        "name of the only job to work for; if unset, jobs that need workers",
    ),
    "coordinator": ServiceHelp(
        "Run a replica of the coordinator, which leads jobs or stands by to take over.",
        "python -m services.coordinator --name c1",
    ),
    "provisioner": ServiceHelp(
        "Run a provisioner, which rents machines from the market in DOLL_MARKET for jobs with a"
        " `provisioning` block.",
        "DOLL_MARKET=market.yaml python -m services.provisioner --name p1",
    ),
    "evaluator": ServiceHelp(
        "Run an evaluator, which evaluates models of jobs with an `evaluation` block and detects"
        " drift in their streams.",
        "python -m services.evaluator --job digits",
        "name of the only job to evaluate; if unset, all jobs with an `evaluation` block",
    ),
    "admin": ServiceHelp(
        "Run the admin service: the REST API and the live page. Its settings are DOLL_API_..."
        " variables; `doll key create` creates API keys.",
        "DOLL_API_PORT=8080 python -m services.admin",
    ),
    "serve": ServiceHelp(
        "Run a model server, which answers prediction requests with a job's model and follows its"
        " updates. It speaks HTTP (Open Inference Protocol v2) on DOLL_API_HOST and DOLL_API_PORT.",
        "DOLL_API_PORT=8081 doll serve digits --shadow best",
        options={
            "job": {"help": "name of the job whose model to serve"},
            "--alias": {
                "default": "newest",
                "help": "newest, best or a version of the model; if unset, newest",
            },
            "--shadow": {
                "help": "second model (newest, best or a version) that answers the same requests;"
                " its answers are not returned"
            },
            "--predictions": {
                "metavar": "TOPIC",
                "help": "Kafka topic to which answers are also written, with the model's version",
            },
            "--from": {
                "dest": "source",
                "metavar": "TOPIC",
                "help": "Kafka topic whose records are answered, too; requires --to",
            },
            "--to": {
                "metavar": "TOPIC",
                "help": "Kafka topic for the answers to records of --from, each written once",
            },
            "--keys": {
                "action": "store_true",
                "help": "require an API key, of any role (`doll key create`)",
            },
        },
    ),
}


def command_line(service: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a service's command line: `name`, and `job` if the service has that option.

    Args:
        service: Name of the service, a key of `SERVICES`.
        arguments: Arguments after the service's name; None for those of this process.

    Raises:
        SystemExit: If help is requested, or the arguments are invalid.
    """
    import argparse  # noqa: PLC0415 -- `doll --help` needs the rest of this module alone
    import socket  # noqa: PLC0415 -- as above

    description, example, job, options = SERVICES[service]
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{service}", description=description, epilog=f"example: {example}"
    )
    if job:
        parser.add_argument("--job", help=job)
    for option, explained in options.items():
        parser.add_argument(option, **explained)  # type: ignore[arg-type]  # texts alone
    name, called = (
        socket.gethostname(),
        "name of this process, shown to people; if unset, the host's name",
    )
    if service == "worker":
        name = f"{name}-{os.getpid()}"
        called = "unique name of this worker; if unset, host name and process id"
    parser.add_argument("--name", default=name, help=called)
    return parser.parse_args(arguments)
