"""Tests the model of a demo's last checkpoint: `python -m services.cli.demo.tested_model JOB FILE`.

This process shares torch with the other processes of a demo. If the process that judges loaded
torch once more, the result would come 2 s later.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import msgspec

from common.api.model import about_model
from common.config.settings import read_settings
from common.data.digits import load_digits
from common.jobs.models import find_model, whole_model
from common.jobs.store import JobStore
from common.learning.evaluate import evaluate
from common.learning.parameters import FlatModel
from common.learning.tasks import task_of
from common.runtime.connect import connect

_BATCH = 512  # records per forward pass


def main() -> int:
    """Test the model of a job, write it to a file, and print its loss and accuracy."""
    job, output = sys.argv[1:]
    outside = connect(read_settings(os.environ))
    with closing(outside.open_log()) as log, closing(JobStore(log)) as job_store:
        record = job_store.get(job)
        found = find_model(record.id, "newest", outside, log, _report_skipped)
    task = task_of(record.spec, ())
    model = FlatModel(task.build())
    model.check(found.kind.layout)
    about = about_model(record, found.kept)
    Path(output).write_bytes(whole_model(record.id, found, outside, about))
    tested = evaluate(task, model, found.weights, load_digits().held_out, _BATCH)
    sys.stdout.write(f"{msgspec.json.encode(tested).decode()}\n")
    return 0


def _report_skipped(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
