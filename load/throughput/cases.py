"""Cases of the pipeline benchmark: a model, its records, and the job that trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.data.readers import read_records
from load.harness.counting import spec_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from common.data.records import Records
    from common.jobs.spec import JobSpec

# Records in memory. Beyond the size of the caches their number does not affect the speed.
_RECORDS = 16_384
_IMAGES = "mnist-train-00000-47999-images-idx3-ubyte.gz"


@dataclass(frozen=True)
class Case:
    """A model and its records."""

    name: str
    task: str
    # Options of the task, sizes included.
    options: Mapping[str, object]
    fields: Mapping[str, Mapping[str, object]]
    learning_rate: float = 1e-3  # Adam
    batch_size: int = 256  # b
    group_size: int = 4  # K

    def job(self, name: str, topic: str, **more: object) -> JobSpec:
        """Return the job that trains it from a topic. The rest is as in a job file."""
        own = {
            "task": {"name": self.task, "classes": self.options["classes"]},
            "batch_size": self.batch_size,
            "group_size": self.group_size,
            "optimizer": {"name": "adam", "learning_rate": self.learning_rate},
        }
        return spec_of(dict(self.fields), name=name, streams=[topic], **own | more)


CASES = {
    "cnn": Case(
        "cnn",
        "image-classifier",
        {"classes": 10, "channels": 1, "height": 28, "width": 28},
        {"image": {"dtype": "uint8", "shape": [1, 28, 28]}, "label": {"dtype": "int64"}},
    ),
    "logistic": Case(
        "logistic",
        "logistic-regression",
        {"classes": 2, "features": 41},
        {"features": {"dtype": "float32", "shape": [41]}, "label": {"dtype": "int64"}},
    ),
}


def find_records(case: Case, data: Path | None, seed: int) -> Records:
    """Return the case's records: digits from a folder with MNIST, otherwise random numbers.

    Args:
        case: The case.
        data: The folder. A gradient takes as long for noise as for digits.
        seed: Seed of the records and their order.
    """
    rng = np.random.default_rng(seed)
    if case.name == "cnn" and data is not None:
        digits = read_records(data / _IMAGES)
        rows = rng.permutation(len(digits["label"]))[:_RECORDS]
        # Copied to get the strides of decoded records. numpy's choice for the single channel would
        # let torch use its channels-last format, with gradients 25 % faster.
        return {name: column[rows].copy() for name, column in digits.items()}
    labels = rng.integers(0, 2, _RECORDS)
    if case.name == "cnn":
        images = rng.integers(0, 256, (_RECORDS, 1, 28, 28), np.uint8)
        return {"image": images, "label": labels}
    return {"features": rng.standard_normal((_RECORDS, 41), np.float32), "label": labels}
