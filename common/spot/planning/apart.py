"""Simulates in a process of its own: `python -m common.spot.planning.apart`, which can be killed.

One line of JSON comes on standard input, one goes to standard output. The process ends when its
standard input does: whoever asked has gone.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from common.errors import UserError
from common.spot.planning.simulation import Report, SimulateRequest

_NICER = 10  # the API goes first
# What is within the limits of `simulation` takes some 800 MB, most of it libraries. What takes more
# shall be refused here, before the machine ends whoever else runs on it.
MOST_BYTES = 2 << 30


def simulated(asked: bytes) -> Report:
    """Simulate what a `common.spot.planning.simulation.SimulateRequest` in JSON says."""
    # These bring scipy, and some torch.
    from common.spot.planning.compare import as_data, compare, with_policies  # noqa: PLC0415 -- above

    request = SimulateRequest.model_validate_json(asked)
    variants = with_policies(request.experiment, request.policies)
    here = Path()  # it names no files
    try:
        results = compare(variants, here, request.runs, request.seed, lambda _name, _share: None)
    except UserError as error:
        return Report(refused=str(error))
    except MemoryError:
        return Report(refused="it takes more memory than there is: ask for fewer runs or workers")
    data = as_data(request.experiment, request.seed, results)
    return Report(msgspec.Raw(msgspec.json.encode(data)))


def main(asked: BinaryIO, answer: Callable[[bytes], object]) -> None:
    """Read an order, carry it out, answer."""
    order = asked.readline()
    threading.Thread(target=_end_with, args=(asked,), daemon=True).start()
    os.nice(_NICER)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    least = MOST_BYTES if most == resource.RLIM_INFINITY else min(MOST_BYTES, most)
    resource.setrlimit(resource.RLIMIT_DATA, (least, most))
    answer(msgspec.json.encode(simulated(order)) + b"\n")


def _end_with(asked: BinaryIO) -> None:
    asked.read()
    os._exit(1)  # nothing of ours is to be saved


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer.write)
    sys.stdout.buffer.flush()
    os._exit(0)  # a thread still waits for the end of the input
