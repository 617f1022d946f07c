"""CSV becomes features and labels by plain rules, or is refused with row and column."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from common.data.columns import bucket_of, damped
from common.data.tables import row_records, table_records
from common.errors import UserError

CELLS = st.sampled_from(["", "0", "1", "1.5", "-2e3", "007", "nan", "red", "68fd1e64", "12345678"])
TABLE = b"size,colour,,kind\n1,red,0,0\n2.5,blue,,1\n,red,7,0\n"


NUMBERS = b"size,price,,kind\n1,3,0,2\n2.5,,,1\n,4,7,2\n"


def test_table_keeps_numbers_and_uses_the_last_column_as_label() -> None:
    records = table_records(NUMBERS, "t", label=None, leave_out=())
    expected = [[1.0, 3, 0], [2.5, 0, 0], [0, 4, 7]]
    np.testing.assert_array_equal(records["features"], np.array(expected, np.float32))
    assert records["features"].dtype == np.float32
    assert records["label"].tolist() == [2, 1, 2]


def test_table_without_header_selects_columns_by_index() -> None:
    records = table_records(b"1,5,1\n0,6,2\n", "t", label="0", leave_out=["-1"])
    assert records["features"].tolist() == [[5.0], [6.0]]
    assert records["label"].tolist() == [1, 0]


def test_row_records_parse_each_cell_on_its_own() -> None:
    table = b'id,code,n,note\n7,007,-1.50e3,"a ""b"""\n8,,1e,\n'
    rows = row_records(table, "t", ["id"])["row"].tolist()
    first, second = map(msgspec.json.decode, rows)
    assert first == {"code": "007", "n": -1500.0, "note": 'a "b"'}
    assert second == {"code": None, "n": "1e", "note": None}
    texts = row_records(b"C1,C2,n\n12,34e5,5\n", "t", [], ["C*"])["row"].tolist()
    assert texts == [b'{"C1":"12","C2":"34e5","n":5}']


def test_integer_labels_are_kept() -> None:
    records = table_records(b"1,5\n2,3\n", "t", label=None, leave_out=())
    assert records["label"].tolist() == [5, 3]


@pytest.mark.parametrize(
    ("data", "label", "found"),
    [
        (b"", None, "t: contains no rows"),
        (b"a,b\n", None, "t: contains a header but no rows"),
        (b"1,2\n3\n", None, "t: row 2 has 1 cells, the first has 2"),
        (b"\xff\xfe", None, "t: is not CSV in UTF-8"),
        (TABLE, "weight", "t: no column 'weight'; there are size, colour, , kind"),
        (TABLE, "9", "t: no column '9'"),
        (b"x,y\n1,0.5\n", None, "t: label column 'y': labels must be whole numbers, found"),
        (b"x,y\n1,\n", None, "t: label column 'y': row 1 has no label"),
        (b"x,y\ninf,1\n", None, "t: column 'x': contains a number that is not finite"),
        (b"x,y\n1e99,1\n", None, "t: column 'x': contains a number that is not finite"),
        (b"5\n6\n", None, "t: no column is left for features"),
        (b"x,y\ns,1\n", None, "t: column 'x': must contain only numbers; use `--rows`"),
        (b"x,y\n1,s\n", None, "t: label column 'y': must contain only numbers; use `--rows`"),
    ],
)
def test_invalid_table_is_rejected_with_row_and_column(
    data: bytes, label: str | None, found: str
) -> None:
    with pytest.raises(UserError) as caught:
        table_records(data, "t", label=label, leave_out=())
    assert str(caught.value).startswith(found)


def test_bucket_of_and_damped_return_fixed_values() -> None:
    assert [bucket_of("C1", "68fd1e64", 10**5), bucket_of("I1", None, 10**5)] == [80363, 63369]
    assert damped(np.array([-1.0, 0.0, 1e6])).tolist() == pytest.approx(
        [-np.log(2), 0, np.log(1 + 1e6)]
    )
