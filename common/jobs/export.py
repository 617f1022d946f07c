"""Export of a model in a separate process: `python -m common.jobs.export FILE ENTRYPOINT...`.

The export loads PyTorch and a job's own task, which the command line does not. It reads the model
from standard input, as the self-contained file that `doll model pull` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from common.errors import DollError, UserError
from common.jobs.spec import RecordsSpec
from common.learning.checkpoint import unpack
from common.learning.export import export
from common.learning.tasks import make_task


class _Task(msgspec.Struct):
    name: str
    options: dict[str, Any]


_TASK = msgspec.json.Decoder(_Task)


def main(model: bytes, path: Path, allowed: Collection[str]) -> None:
    """Export a model."""
    try:
        weights, about = unpack(model)
        if not {"task", "records"} <= about.keys():
            raise UserError(
                "the model file has no task and records in its metadata; use a file of"
                " `doll model pull`"
            )
        described = _TASK.decode(about["task"])
        fields = RecordsSpec.model_validate_json(about["records"]).described()
        task = make_task(described.name, described.options, allowed)
        export(task, weights, fields, about, path)
    except DollError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.stdin.buffer.read(), Path(sys.argv[1]), sys.argv[2:])
