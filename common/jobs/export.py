"""Exports a model in a process of its own: `python -m common.jobs.export FILE ENTRYPOINT...`.

What exports loads PyTorch and a job's own task, which the command line does not. The model comes by
standard input as the file that `doll model pull` writes, which says all that there is to know.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from common.config.program import command_of, search_path
from common.errors import DollError, UserError
from common.jobs.spec import RecordsSpec
from common.learning.checkpoint import unpack

SUFFIXES = (".pt2", ".onnx")
FAILED = 3


class _Task(msgspec.Struct):
    name: str
    options: dict[str, Any]


_TASK = msgspec.json.Decoder(_Task)


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written here.

    Raises:
        UserError: If its name says no format, or what writes that is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: the name must end with {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written: there is no folder {path.parent}")
    if path.suffix == ".onnx" and find_spec("onnxscript") is None:
        raise UserError(
            "what writes ONNX is not installed here: `pip install 'doll[export]'`, or export .pt2"
        )


def export_apart(model: bytes, path: Path, allowed: Collection[str]) -> None:
    """Export a model.

    Args:
        model: Its file.
        path: See `check_output`.
        allowed: Entrypoints that may be imported here (DOLL_TASKS).

    Raises:
        UserError: If that cannot be done.
    """
    command = command_of("common.jobs.export", str(path), *allowed)
    environment = {**os.environ, "PYTHONPATH": search_path(sys.path)}  # the task is found as here
    done = subprocess.run(  # noqa: S603 -- our own command line
        command, input=model, capture_output=True, check=False, env=environment
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it ended"]
        raise UserError(words[-1])


# --- in the other process -------------------------------------------------------------------------


def main(model: bytes, path: Path, allowed: Collection[str]) -> int:
    """Export a model; returns the exit status."""
    # These bring torch.
    from common.learning.export import export  # noqa: PLC0415 -- see above
    from common.learning.tasks import make_task  # noqa: PLC0415 -- likewise

    try:
        weights, about = unpack(model)
        if not {"task", "records"} <= about.keys():
            raise UserError("the file does not say of which task and records its model is")
        described = _TASK.decode(about["task"])
        fields = RecordsSpec.model_validate_json(about["records"]).described()
        task = make_task(described.name, described.options, allowed)
        export(task, weights, fields, about, path)
    except DollError as error:
        print(error, file=sys.stderr)  # noqa: T201 -- to whoever started it
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer.read(), Path(sys.argv[1]), sys.argv[2:]))
