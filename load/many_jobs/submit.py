"""Many jobs submitted: how long `doll job submit` takes, its process's start not counted."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING

from common.embedded.services import environment_of
from common.jobs.spec import parse_job
from common.jobs.store import JobStore
from common.ports.servers import NewTopic
from common.runtime.connect import open_log
from load.harness.report import Figure, Found
from load.harness.stack import NotMeasuredError

if TYPE_CHECKING:
    from load.harness.stack import Servers

SUBMITTED_S = 0.2  # the last of all jobs, by the command
_COMMANDS = 5  # the last jobs are submitted by processes of their own
_STREAM = "submitted"
_PARTITIONS = 4
_SPEC = f"""
name: {{name}}
streams: [{_STREAM}]
records:
  fields: {{{{features: {{{{dtype: float32, shape: [41]}}}}, label: {{{{dtype: int64}}}}}}}}
task: {{{{name: tabular-mlp, classes: 2}}}}
batch_size: 256
group_size: 20
optimizer: {{{{name: adam, learning_rate: 1.0e-3}}}}
stop: {{{{deadline_s: 86400}}}}
"""
# Its start is what every command takes: the interpreter, the libraries, the command line's parser.
_COMMAND = """\
import sys
from time import monotonic
import typer.main
import common.adapters.kafka, services.cli.system.direct
from common.runtime.connect import connect
from services.cli.app import app
from services.cli.system.outside import Ways
command = typer.main.get_command(app)
began = monotonic()
command(["job", "submit", *sys.argv[1:]], obj=Ways(connect), standalone_mode=False)
print(f"took {monotonic() - began}")
"""


def measure_submit(on: Servers, jobs: int = 100) -> Found:
    """Submit jobs, most of them by this process, the last ones by commands.

    Raises:
        NotMeasuredError: If a command failed.
    """
    here_s = list[float]()
    with closing(open_log(on.settings, "load")) as log:
        log.create_topics([NewTopic(_STREAM, _PARTITIONS)])
        with closing(JobStore(log)) as book:
            for number in range(jobs - _COMMANDS):
                began = monotonic()
                book.submit(parse_job(_SPEC.format(name=f"submit-{number}")))
                here_s.append(monotonic() - began)
    commands_s = [_submitted(on, f"submit-{number}") for number in range(jobs - _COMMANDS, jobs)]
    figures = (
        Figure("`doll job submit`, median, s", median(commands_s), 3, SUBMITTED_S),
        Figure("`doll job submit`, longest, s", max(commands_s), 3),
        Figure("one process for many, median, s", median(here_s), 3),
        Figure("one process for many, its last, s", here_s[-1], 3),
    )
    data = {"jobs": jobs, "here_s": here_s, "commands_s": commands_s}
    return Found(f"The last of {jobs} jobs submitted; {on.kafka}", figures, data)


def _submitted(on: Servers, name: str) -> float:
    """How long the command took for a job, in seconds."""
    file = on.logs / f"{name}.yaml"
    file.write_text(_SPEC.format(name=name))
    command = (sys.executable, "-c", _COMMAND, str(file))
    environment = environment_of(on.settings)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 -- our own command line
    *_, last = done.stdout.splitlines() or [""]
    if done.returncode or not last.startswith("took "):
        raise NotMeasuredError(f"`doll job submit` failed: {done.stderr[-500:]}")
    return float(last.removeprefix("took "))
