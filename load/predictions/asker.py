"""Asks a model server on a schedule, in a process of its own, and prints what came, as JSON.

Beside the training's other observers in one process, it would measure how these hold it up.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run by path: this checkout's packages

import msgspec
import numpy as np

from common.core.messages import ModelId
from load.harness.asking import Address, Answer, on_schedule


class _Parameters(msgspec.Struct):
    version: int
    epoch: int


class _AnswerVersion(msgspec.Struct):
    """What an answer says of its version."""

    parameters: _Parameters


_ANSWER = msgspec.json.Decoder(_AnswerVersion)


class Came(msgspec.Struct):
    """What came of the requests."""

    seconds: list[float]  # latency of each, from when it was due
    failed: int  # not answered with 200
    notes: list[tuple[float, ModelId]]  # when each was answered, monotonic, and by which version


CAME = msgspec.json.Decoder(Came)


def request(address: Address, job: str) -> bytes:
    """A request about one image."""
    image = np.random.default_rng(0).integers(0, 256, 784).tolist()
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 28, 28], "data": image}
    body = msgspec.json.encode({"inputs": [tensor]})
    return address.request("POST", f"/v2/models/{job}/infer", body)


def asked(address: Address, job: str, rate: float, seconds: float) -> Came:
    """Ask for so long."""
    notes = list[tuple[float, ModelId]]()

    def note(answer: Answer) -> None:
        if answer.status == 200:
            made = _ANSWER.decode(answer.body).parameters
            notes.append((time.monotonic(), ModelId(made.epoch, made.version)))

    found = asyncio.run(on_schedule(address, request(address, job), rate, seconds, note))
    failed = found.statuses.total() - found.statuses[200]
    return Came(found.seconds, failed, notes)


if __name__ == "__main__":
    port, name, per_s, for_s = sys.argv[1:]
    came = asked(Address("127.0.0.1", int(port), ""), name, float(per_s), float(for_s))
    sys.stdout.buffer.write(msgspec.json.encode(came))
