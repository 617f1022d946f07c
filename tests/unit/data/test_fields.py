"""Fields refuse invalid settings; batches assembled from polls are ready for torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data.codecs import make_codec
from common.data.fields import Columns, Field, concatenate
from common.errors import UserError


@pytest.mark.parametrize("name", ["", "a\n", 'a"', "a\\b"])
def test_field_with_an_invalid_name_is_rejected(name: str) -> None:
    with pytest.raises(UserError, match="a name must be"):
        Field(name, "uint8")


def test_field_with_a_dimension_of_zero_is_rejected() -> None:
    with pytest.raises(UserError, match="'x'"):
        Field("x", "uint8", (3, 0))


def test_concatenate_returns_arrays_that_torch_uses_without_copying() -> None:
    # The label is not aligned inside a record of 3 + 8 bytes, and decoded columns are read-only.
    codec = make_codec("tensor", [Field("rgb", "uint8", (3,)), Field("label", "int64")])
    written: Columns = {
        "rgb": np.arange(30, dtype=np.uint8).reshape(10, 3),
        "label": np.arange(10) - 5,
    }
    polls = [codec.decode(codec.encode(written)).records for _ in range(2)]
    batch = concatenate(
        [
            {name: column[6:] for name, column in polls[0].items()},
            {name: column[:3] for name, column in polls[1].items()},
        ]
    )
    assert batch["label"].tolist() == [1, 2, 3, 4, -5, -4, -3]
    for column in batch.values():
        assert torch.from_numpy(column).data_ptr() == column.ctypes.data
        assert column.flags.writeable
        assert column.flags.c_contiguous


def test_concatenate_copies_a_single_part() -> None:
    part = {"x": np.arange(3)}
    assert not np.shares_memory(concatenate([part])["x"], part["x"])
