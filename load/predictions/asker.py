"""Sends requests to a model server on a schedule, and prints the results as JSON.

It is a process of its own. In the process that observes the training, its requests would be late
whenever an observer runs, and the latency would include that delay.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import numpy as np

from common.core.messages import ModelId
from load.harness.asking import Address, Answer, on_schedule


class _Parameters(msgspec.Struct):
    version: int
    epoch: int


class _AnswerVersion(msgspec.Struct):
    """The part of an answer that names its version."""

    parameters: _Parameters


_ANSWER = msgspec.json.Decoder(_AnswerVersion)


class Came(msgspec.Struct):
    """Results of the requests."""

    # Latency of each request, from the time it was due.
    seconds: list[float]
    failed: int  # answers other than 200
    # Time of each answer, monotonic, and the version that gave it.
    notes: list[tuple[float, ModelId]]


CAME = msgspec.json.Decoder(Came)


def request(address: Address, job: str) -> bytes:
    """Return a request about one image."""
    image = np.random.default_rng(0).integers(0, 256, 784).tolist()
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 28, 28], "data": image}
    body = msgspec.json.encode({"inputs": [tensor]})
    return address.request("POST", f"/v2/models/{job}/infer", body)


def asked(address: Address, job: str, rate: float, seconds: float) -> Came:
    """Send requests at a rate for a time."""
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
