"""Building of a custom task for `check`: `python -m common.jobs.task_check`."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from common.errors import GivenError, TaskMissingError, UserError
from common.jobs.check import MOST_MIB, CheckReport, CheckRequest
from common.jobs.spec import job_from_json

_ORDER = msgspec.json.Decoder(CheckRequest)
_MIB = 1 << 20


def built(order: CheckRequest) -> CheckReport:
    """Build the task, and report what was found."""
    # These import torch.
    from common.learning.errors import one_line  # noqa: PLC0415 -- see above
    from common.learning.parameters import tensor_options  # noqa: PLC0415 -- see above
    from common.learning.tasks import task_of, try_model  # noqa: PLC0415 -- see above

    spec = job_from_json(bytes(order.spec))
    try:
        by = spec.optimizer
        check = partial(tensor_options, groups=by.groups, no_decay=by.no_decay)
        size_mb = try_model(task_of(spec, order.allowed), spec.seed, check)
        if size_mb is None:
            return CheckReport(
                unended=f"the model needs more than the {MOST_MIB:,} MiB that a check may use"
            )
        return CheckReport(model_mb=size_mb)
    except GivenError as error:
        return CheckReport(refused=error.problem, fields=error.fields)
    except TaskMissingError as error:
        return CheckReport(missing=str(error))
    except UserError as error:
        return CheckReport(refused=str(error))
    except Exception as error:  # noqa: BLE001 -- the task is the user's code and may raise anything
        return CheckReport(
            refused=f"the task raised an error when it was checked: {one_line(error)}"
        )


def main(asked: BinaryIO, answer: Callable[[bytes], object]) -> None:
    """Read a request, build the task within limits, and write the report."""
    # If memory runs out nevertheless, the kernel should kill this process.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = MOST_MIB * _MIB
    least = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_DATA, (least, most))
    answer(msgspec.json.encode(built(_ORDER.decode(asked.read()))))


if __name__ == "__main__":
    parts = os.fdopen(os.dup(1), "wb")
    # Output of the task must not mix with the report.
    os.dup2(2, 1)
    main(sys.stdin.buffer, parts.write)
    parts.close()
