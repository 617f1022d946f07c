"""The model of a demo's last checkpoint on digits that it has never seen, in a process of its own.

It takes torch, which the processes of a demo share: loaded once more, in the process that judges,
it would be 2 s of a processor that the result waits for.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common.config.program import command_of
from common.embedded.process import Child
from common.embedded.services import environment_of
from common.errors import CorruptError, DollError, UnavailableError

if TYPE_CHECKING:
    from common.config.settings import Settings

_BATCH = 512  # records per forward pass
_TIMEOUT_S = 120.0  # torch may have to be loaded, on a busy machine
_TESTED = msgspec.json.Decoder(dict[str, float])


class ModelTest:
    """A test in progress; make it in a thread that stays, see `Child`.

    Args:
        model: File that the test writes the model to.
        log: File of the test's output, with its result.
    """

    def __init__(self, settings: Settings, job: str, model: Path, log: Path) -> None:
        command = command_of(__name__, job, str(model.absolute()))
        self._child = Child(command, log, environment_of(settings), forks=True)

    def result(self) -> dict[str, float]:
        """Mean loss and accuracy.

        Raises:
            DollError: If the test did not end within two minutes, or failed. The message quotes
                the last output of the test.
        """
        try:
            exit_code = self._child.await_end(_TIMEOUT_S)
        except UnavailableError as error:
            raise DollError(f"the last model could not be tested: {error}") from error
        finally:
            self._child.kill()
        return result_of(exit_code, self._child.last_words())


def result_of(exit_code: int, said: str) -> dict[str, float]:
    """Read the result of a test from its output, in which a library may have warned.

    Raises:
        DollError: If the test failed.
    """
    results = [line for line in said.splitlines() if line.startswith("{")]
    if exit_code or not results:
        raise DollError(f"the last model could not be tested (exit code {exit_code}): {said}")
    return _TESTED.decode(results[-1])


def main() -> int:
    """Test the model of a job, write it, and say how good it is."""
    # These bring torch, which who starts the test must not load.
    from common.api.model import about_model
    from common.config.settings import read_settings
    from common.data.digits import load_digits
    from common.jobs.build import task_of
    from common.jobs.models import KeptModel
    from common.jobs.store import JobStore
    from common.kafka.opening import open_log
    from common.learning.checkpoint import save_weights, weights_in
    from common.learning.evaluate import evaluate
    from common.learning.parameters import FlatModel
    from common.storage.port import open_blobs
    from common.storage.snapshot_file import from_checkpoint
    from common.storage.store import CheckpointStore

    job, output = sys.argv[1:]
    settings = read_settings(os.environ)
    with closing(open_log(settings, "test")) as log, closing(JobStore(log)) as job_store:
        record = job_store.get(job)
    store = CheckpointStore(open_blobs(settings), record.id)
    latest = store.latest()
    if latest is None:
        raise CorruptError("the last checkpoint is gone")
    found = from_checkpoint(store.open(latest))
    weights, layout = weights_in(found.trainer())
    task = task_of(record.spec, ())
    model = FlatModel(task.build())
    model.check(layout)
    about = about_model(record, KeptModel(found.title, found.snapshot, {}))
    Path(output).write_bytes(save_weights(layout, weights, about))
    tested = evaluate(task, model, weights, load_digits().held_out, _BATCH)
    sys.stdout.write(f"{msgspec.json.encode(tested).decode()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
