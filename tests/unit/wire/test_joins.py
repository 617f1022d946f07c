"""What a join keeps comes back as it was, and what is none of it is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.spans import LogPosition
from common.errors import WireError
from common.joining.machine import SIDES, Entry, Progress, Side
from common.wire.joins import (
    PROGRESS,
    JoinProgress,
    KeptEntry,
    decode_kept,
    encode_entry,
    encode_progress,
    entry_key,
)

WHOLE = st.integers(0, 2**53)
ENTRIES = st.builds(
    Entry,
    WHOLE,
    st.text(),
    WHOLE,
    st.dictionaries(st.text(), st.text()).map(lambda each: json.dumps(each).encode()),
    st.none() | st.binary(),
    st.integers(-(2**62), 2**53),
    st.sampled_from(("unmatched", "double", "joined")),
)


@given(st.sampled_from(SIDES), ENTRIES)
def test_an_entry_comes_back_as_it_was(side: Side, entry: Entry) -> None:
    kept = decode_kept(entry_key(side, entry.offset), encode_entry(side, entry))
    assert kept == KeptEntry(side, entry)


def test_progress_comes_back_as_it_was() -> None:
    progress = JoinProgress("a and b", LogPosition(1, "id", 2), LogPosition(3), Progress(5), 7)
    assert decode_kept(PROGRESS, encode_progress(progress)) == progress


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b"{}"),
        (b"left 1", b"not JSON"),
        (b"left 1", b'{"side":"left","offset":2,"key":"a","time_ms":1,"value":{}}'),
        (b"middle 1", b'{"side":"middle","offset":1,"key":"a","time_ms":1,"value":{}}'),
        (PROGRESS, b'{"identity":"a"}'),
    ],
)
def test_what_is_none_of_ours_is_refused(key: bytes | None, value: bytes) -> None:
    with pytest.raises(WireError, match="of a join"):
        decode_kept(key, value)
