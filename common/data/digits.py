"""The demo's data set: 1,797 handwritten digits of 8x8 pixels that ship with scikit-learn.

Accuracy of a small CNN (two convolutions, two dense layers) on the unwarped held-out part. It was
trained on the endless warped stream of the training part: batches of 64, Adam at 2e-3, two seeds.

| samples | 10,000         | 20,000         | 40,000         | 80,000         | 160,000        |
| ------- | -------------- | -------------- | -------------- | -------------- | -------------- |
|         | 0.925 to 0.964 | 0.936 to 0.969 | 0.975 to 0.983 | 0.989 to 0.989 | 0.983 to 0.992 |
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.data.records import Records, take
from common.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt


IMAGE_SHAPE = (1, 8, 8)

_FILE = "datasets/data/digits.csv.gz"  # path inside scikit-learn
_HELD_OUT_SHARE = 0.2
# The split is fixed, so that accuracies of different runs can be compared.
_SPLIT_SEED = 0
_GREY_LEVELS = 16  # source values are 0 to 16


class Split(NamedTuple):
    """Records to train on and records to test with: image uint8 (n, 1, 8, 8), label int64."""

    train: Records
    held_out: Records


def load_digits() -> Split:
    """Load the digits. The split is always the same.

    Raises:
        UserError: If scikit-learn is not installed.
    """
    images, labels = _read()
    records = {
        "image": np.rint(images * (255 / _GREY_LEVELS)).astype(np.uint8),
        "label": labels.astype(np.int64),
    }
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(images))
    held_out = round(_HELD_OUT_SHARE * len(images))
    return Split(take(records, order[held_out:]), take(records, order[:held_out]))


def _read() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the digits as they ship, (n, 1, 8, 8), and their labels, (n,).

    Scikit-learn itself is not imported, because that takes 1.5 seconds (torch takes 2).
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise UserError(
            "the digits come with scikit-learn: install it with `pip install 'doll[embedded]'`"
        )
    with gzip.open(Path(found.origin).parent / _FILE, "rt") as file:
        rows = np.loadtxt(file, np.uint8, delimiter=",")  # (n, 65): pixels and label
    return rows[:, :-1].reshape(-1, *IMAGE_SHAPE), rows[:, -1]
