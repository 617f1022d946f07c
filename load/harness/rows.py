"""Rows for sparse tasks: real clicks and ratings, and generated ones that resemble them.

The real samples are small (`shared/data`). Generated rows are drawn field by field from the
sample's contents, and planted weights make their labels, so that there is something to learn.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from common.data.codecs import make_codec
from common.data.readers import read_bytes, read_records
from common.data.records import Records, count, take
from common.errors import UserError
from common.jobs.spec import RecordsSpec
from doll.yaml_file import as_json

if TYPE_CHECKING:
    import numpy.typing as npt


_DATA = Path(__file__).parents[3] / "shared" / "data"
CLICKS = _DATA / "ctr" / "criteo-kaggle-train-head-1400.csv.gz"
RATINGS = _DATA / "ratings" / "ml-latest-small-centred.csv.gz"
# Columns of Criteo's rows.
_NUMBERS, _SYMBOLS = 13, 26
ENTRIES = _NUMBERS + _SYMBOLS
# Buckets of the symbols. Each column of numbers has one feature, before the buckets.
BUCKETS = 100_000
FEATURES = _NUMBERS + BUCKETS
# Share of rows with a click.
_CLICKED = 0.22


class Split(NamedTuple):
    """Training rows and test rows."""

    train: Records
    test: Records


def clicks_like(rows: int, seed: int, sample: Path = CLICKS) -> Records:
    """Draw rows like Criteo's: `index` int32 (n, 39), `value` float32 (n, 39), `label`.

    A symbol that is in the sample more than once is drawn as often as it occurs there. Symbols that
    occur once stand for a long tail, which is drawn by Zipf's law.

    Raises:
        UserError: If there is no sample of Criteo's rows.
    """
    random = np.random.default_rng(seed)
    known = _clicks(sample)
    columns = [_drawn(random, known, number, rows) for number in range(_SYMBOLS)]
    numbers = np.array(
        [[_damped(row[f"I{place + 1}"]) for place in range(_NUMBERS)] for row in known]
    )
    index = np.concatenate(
        (np.tile(np.arange(_NUMBERS), (rows, 1)), np.stack(columns, axis=1)), axis=1
    )
    value = np.ones((rows, ENTRIES))
    value[:, :_NUMBERS] = numbers[random.integers(0, len(known), rows)]
    logits = (_planted()[index] * value).sum(axis=1)
    logits -= np.quantile(logits, 1 - _CLICKED)
    labels = random.random(rows) < 1 / (1 + np.exp(-logits))
    return {
        "index": index.astype(np.int32),
        "value": value.astype(np.float32),
        "label": labels.astype(np.int64),
    }


def _clicks(sample: Path) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(io.StringIO(read_bytes(sample).decode())))
    except UserError as error:
        raise UserError(f"{error}; Criteo's rows are not part of this repository") from error


def _drawn(
    random: np.random.Generator, known: list[dict[str, str]], number: int, rows: int
) -> npt.NDArray[np.int64]:
    """Return the features of one column's symbols, of shape (n,)."""
    counts = Counter(row[f"C{number + 1}"] or "none" for row in known)
    often = {symbol: count for symbol, count in counts.items() if count > 1}
    weights = np.array([*often.values(), len(counts) - len(often)], float)
    head = np.array([_NUMBERS + crc32(f"{number}={text}".encode()) % BUCKETS for text in often])
    picked = random.choice(len(weights), rows, p=weights / weights.sum())
    scattered = random.zipf(1.3, rows).astype(np.uint64) * np.uint64(2654435761)
    tail = _NUMBERS + (scattered + np.uint64(number * 97)).astype(np.int64) % BUCKETS
    found: npt.NDArray[np.int64] = np.append(head, 0)[picked]
    return np.where(picked < len(head), found, tail)


def _planted() -> npt.NDArray[np.float64]:
    """Return the weights that decide the generated labels, of shape (FEATURES,)."""
    weights = np.random.default_rng(123).normal(0, 0.35, FEATURES)
    weights[:_NUMBERS] = np.random.default_rng(5).normal(0, 0.5, _NUMBERS)
    return weights


def _damped(text: str) -> float:
    return 0.25 * float(np.log1p(max(float(text or 0), 0)))


def read_clicks(sample: Path, features: int) -> Records:
    """Read the buckets, values and label of Criteo's rows, like `hashed` in a job file."""
    shape = {"shape": [ENTRIES]}
    fields = {"index": {"dtype": "int32"} | shape, "value": {"dtype": "float32"} | shape}
    rows = read_records(sample, rows=True, leave_out=["Id"], texts=["C*"])
    return _read(rows, fields | {"label": {"dtype": "int64", "from": "Label"}}, features)


def read_ratings(sample: Path) -> Records:
    """Read the user, item and rating of MovieLens' ratings."""
    ids = {"user": "userId", "item": "movieId"}
    fields: dict[str, dict[str, Any]] = {
        name: {"dtype": "int32", "from": path} for name, path in ids.items()
    }
    return _read(read_records(sample, rows=True), fields | {"rating": {"dtype": "float32"}})


def _read(rows: Records, fields: dict[str, dict[str, Any]], buckets: int = 0) -> Records:
    described = RecordsSpec.model_validate_json(as_json({"codec": "json", "fields": fields}))
    codec = make_codec("json", described.described(), buckets)
    return dict(codec.decode(rows["row"].tolist()).records)


def clicks(sample: Path = CLICKS) -> Split:
    """Read Criteo's rows. Four of five are for training.

    Raises:
        UserError: If the rows are missing.
    """
    records = read_clicks(sample, FEATURES)
    return _split(records, count(records) * 4 // 5, np.random.default_rng(1))


def ratings(sample: Path = RATINGS) -> Split:
    """Read MovieLens' ratings, each less its mean. Nine of ten are for training.

    Raises:
        UserError: If the ratings are missing.
    """
    try:
        records = read_ratings(sample)
    except UserError as error:
        raise UserError(f"{error}; the ratings are not part of this repository") from error
    for ids in ("user", "item"):
        # Only few of the possible ids occur.
        ranks = np.unique(records[ids], return_inverse=True)[1]
        records[ids] = ranks.astype(np.int32)
    return _split(records, count(records) * 9 // 10, np.random.default_rng(1))


def ratings_like(
    users: int = 480_189, items: int = 17_770, rows: int = 1_000_000, seed: int = 0
) -> Split:
    """Draw ratings made by planted rows of six numbers, with ids drawn by Zipf's law."""
    random = np.random.default_rng(seed)
    who, what = (_frequent(random, size, rows) for size in (users, items))
    own, theirs = (random.normal(0, 0.55, (size, 6)) for size in (users, items))
    rated = (own[who] * theirs[what]).sum(axis=1) + random.normal(0, 0.7, rows)
    records = {"user": who, "item": what, "rating": rated.astype(np.float32)}
    return _split(records, rows * 19 // 20, random)


def _frequent(random: np.random.Generator, size: int, rows: int) -> npt.NDArray[np.int32]:
    weights = 1 / (1 + np.arange(size))
    return random.choice(size, rows, p=weights / weights.sum()).astype(np.int32)


def _split(records: Records, cut: int, random: np.random.Generator) -> Split:
    order: npt.NDArray[Any] = random.permutation(count(records))
    return Split(take(records, order[:cut]), take(records, order[cut:]))
