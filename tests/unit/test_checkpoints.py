"""Whatever is cut off or altered, the best checkpoint that is whole is found, byte by byte."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.adapters.disk_blobs import DiskBlobs
from common.checkpoints import CheckpointStore
from common.core.messages import GENESIS, ModelId
from common.errors import CorruptError, UnavailableError
from common.testing.blobs import DyingBlobs, MemoryBlobs

if TYPE_CHECKING:
    from pathlib import Path

    from common.ports import Blobs

OLD, NEW = ModelId(3, 40), ModelId(3, 60)
FOLDER = "clicks/checkpoints/00000000000000000003-000000000060/"


def parts(name: ModelId) -> dict[str, bytes]:
    return {"state.msgpack": repr(name).encode(), "model.safetensors": bytes(100)}


@pytest.fixture(params=["memory", "disk"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return MemoryBlobs() if request.param == "memory" else DiskBlobs(tmp_path)


def filled(blobs: Blobs, *names: ModelId) -> CheckpointStore:
    store = CheckpointStore(blobs, "clicks")
    for name in names:
        store.save(name, parts(name), 1234.5)
    return store


# --- when nothing goes wrong ---------------------------------------------------------------------


def test_a_checkpoint_is_loaded_as_it_was_saved(blobs: Blobs) -> None:
    loaded = filled(blobs, NEW).load(NEW)
    assert (loaded.name, loaded.created_s, loaded.parts) == (NEW, 1234.5, parts(NEW))


def test_its_manifest_says_what_is_in_it(blobs: Blobs) -> None:
    filled(blobs, NEW)
    data = blobs.get(FOLDER + "manifest.json")
    assert data is not None
    manifest = json.loads(data)
    assert (manifest["format"], manifest["epoch"], manifest["version"]) == (1, 3, 60)
    assert manifest["parts"]["model.safetensors"] == {
        "bytes": 100,
        "sha256": hashlib.sha256(bytes(100)).hexdigest(),
    }


def test_a_later_leader_ranks_above_a_higher_version(blobs: Blobs) -> None:
    names = [ModelId(3, 60), ModelId(20, 5), ModelId(3, 7), ModelId(100, 0)]
    store = filled(blobs, *names)
    assert store.candidates() == sorted(names, reverse=True)
    best, passed_over = store.best()
    assert best is not None
    assert best.name == ModelId(100, 0)
    assert passed_over == ()


def test_where_there_is_none_there_is_no_best(blobs: Blobs) -> None:
    store = CheckpointStore(blobs, "clicks")
    assert store.best() == (None, ())
    assert store.latest() is None
    store.keep(3)


def test_jobs_do_not_see_each_others(blobs: Blobs) -> None:
    filled(blobs, NEW)
    assert CheckpointStore(blobs, "click").candidates() == []


def test_the_genesis_is_never_stored(blobs: Blobs) -> None:
    with pytest.raises(ValueError, match="never stored"):
        CheckpointStore(blobs, "clicks").save(GENESIS, {}, 0.0)


@pytest.mark.parametrize("part", ["manifest.json", "", "a/b", "../a", ".hidden"])
def test_a_part_needs_a_plain_name(blobs: Blobs, part: str) -> None:
    with pytest.raises(ValueError, match="no name for a part"):
        CheckpointStore(blobs, "clicks").save(NEW, {part: b""}, 0.0)
    assert blobs.names("") == []


def test_a_checkpoint_never_changes(blobs: Blobs) -> None:
    store = filled(blobs, NEW)
    store.save(NEW, {"state.msgpack": b"another"}, 99.0)
    assert store.load(NEW).parts == parts(NEW)


def test_one_that_a_later_leader_took_back_is_passed_over(blobs: Blobs) -> None:
    best, passed_over = filled(blobs, OLD, NEW).best(allowed=lambda name: name != NEW)
    assert best is not None
    assert best.name == OLD
    assert [(each.name, each.reason) for each in passed_over] == [
        (NEW, "taken back by a later leader")
    ]


def test_the_hint_moves_on_and_never_back(blobs: Blobs) -> None:
    store = filled(blobs, NEW)
    assert store.latest() == NEW
    filled(blobs, OLD)
    assert store.latest() == NEW
    filled(blobs, ModelId(9, 1))
    assert store.latest() == ModelId(9, 1)


def test_a_hint_that_makes_no_sense_is_replaced(blobs: Blobs) -> None:
    blobs.put("clicks/checkpoints/latest", b"\xff")
    store = CheckpointStore(blobs, "clicks")
    assert store.latest() is None
    filled(blobs, OLD)
    assert store.latest() == OLD


@given(st.permutations([ModelId(epoch, version) for epoch in (0, 5, 11) for version in (1, 2)]))
def test_in_whatever_order_they_come_the_hint_ends_at_the_best(names: list[ModelId]) -> None:
    store = filled(MemoryBlobs(), *names)
    assert store.latest() == max(names)


# --- cut off at every step -----------------------------------------------------------------------


@pytest.mark.parametrize("last_lands", [False, True])
@pytest.mark.parametrize("calls", range(7))
def test_a_writer_that_dies_leaves_the_old_or_the_new_one_whole(
    blobs: Blobs, calls: int, *, last_lands: bool
) -> None:
    """Calls of a save: is there a manifest, part, part, manifest, read hint, move hint."""
    store = filled(blobs, OLD)
    dying = DyingBlobs(blobs, calls, last_lands=last_lands)
    try:
        CheckpointStore(dying, "clicks").save(NEW, parts(NEW), 1234.5)
    except UnavailableError:
        assert calls < 6
    best, passed_over = store.best()
    assert best is not None
    complete = calls + last_lands >= 4
    assert best.name == (NEW if complete else OLD)
    assert dict(best.parts) == parts(best.name)
    torn = {each.name: each.reason for each in passed_over}
    assert torn in ({}, {NEW: "manifest.json is missing: it was never finished"})
    assert store.latest() == (NEW if calls + last_lands >= 6 else OLD)


@pytest.mark.parametrize("calls", range(7))
def test_a_save_that_failed_can_be_repeated(blobs: Blobs, calls: int) -> None:
    dying = CheckpointStore(DyingBlobs(blobs, calls, last_lands=True), "clicks")
    if calls < 6:
        with pytest.raises(UnavailableError):
            dying.save(NEW, parts(NEW), 1.0)
    store = filled(blobs, NEW)
    assert store.load(NEW).parts == parts(NEW)
    assert store.latest() == NEW


def test_only_the_best_few_are_kept(blobs: Blobs) -> None:
    names = [ModelId(3, version) for version in (10, 20, 30)] + [ModelId(7, 5)]
    store = filled(blobs, *names)
    store.keep(2)
    assert store.candidates() == [ModelId(7, 5), ModelId(3, 30)]
    assert all("000010/" not in name for name in blobs.names(""))
    with pytest.raises(ValueError, match="at least one"):
        store.keep(0)


def test_a_torn_one_does_not_count_as_kept(blobs: Blobs) -> None:
    store = filled(blobs, OLD, NEW)
    torn = ModelId(5, 70)
    blobs.put("clicks/checkpoints/00000000000000000005-000000000070/state.msgpack", b"")
    store.keep(1)
    assert store.candidates() == [torn, NEW]  # somebody may be writing it


@pytest.mark.parametrize("calls", range(14))
def test_a_deletion_that_was_cut_off_is_finished_by_the_next(blobs: Blobs, calls: int) -> None:
    names = [ModelId(3, 10), OLD, NEW]
    store = filled(blobs, *names)
    try:
        CheckpointStore(DyingBlobs(blobs, calls), "clicks").keep(1)
    except UnavailableError:
        best, _ = store.best()
        assert best is not None
        assert best.name == NEW
    store.keep(1)
    assert store.candidates() == [NEW]
    assert len(blobs.names("")) == 4  # two parts, a manifest and the hint


DESCRIBED = b'{"bytes":1,"sha256":""}'

# --- altered -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "data", "reasons"),
    [
        ("model.safetensors", bytes(99), ["model.safetensors has 99 bytes", "expected 100 bytes"]),
        ("model.safetensors", bytes(99) + b"\1", ["model.safetensors has 100 bytes of sha256"]),
        ("model.safetensors", None, ["model.safetensors is missing, expected 100 bytes"]),
        ("manifest.json", None, ["manifest.json is missing"]),
        ("manifest.json", b"{", ["manifest.json does not parse"]),
        ("manifest.json", b"\xff", ["manifest.json does not parse"]),
        ("manifest.json", b"{}", ["manifest.json does not parse", "missing required field"]),
        (
            "manifest.json",
            b'{"format":2,"epoch":3,"version":60,"created_s":0,"parts":{}}',
            ["format 2, expected 1"],
        ),
        (
            "manifest.json",
            b'{"format":1,"epoch":3,"version":61,"created_s":0,"parts":{}}',
            ["is that of", "000061, expected", "000060"],
        ),
        (
            "manifest.json",
            b'{"format":1,"epoch":3,"version":60,"created_s":0,"parts":{"../x":%s}}' % DESCRIBED,
            ["lists '../x'"],
        ),
    ],
)
def test_what_was_altered_is_named_and_passed_over(
    blobs: Blobs, part: str, data: bytes | None, reasons: list[str]
) -> None:
    store = filled(blobs, OLD, NEW)
    if data is None:
        blobs.delete(FOLDER + part)
    else:
        blobs.put(FOLDER + part, data)
    with pytest.raises(CorruptError) as corrupt:
        store.load(NEW)
    assert all(reason in str(corrupt.value) for reason in reasons), corrupt.value
    best, passed_over = store.best()
    assert best is not None
    assert best.name == OLD
    assert [(each.name, each.reason) for each in passed_over] == [(NEW, str(corrupt.value))]


@given(data=st.data())
def test_a_flipped_bit_never_changes_what_is_loaded(data: st.DataObject) -> None:
    blobs = MemoryBlobs()
    store = filled(blobs, OLD, NEW)
    name = data.draw(st.sampled_from(blobs.names(FOLDER)), label="name")
    damaged = bytearray(blobs.content[name])
    position = data.draw(st.integers(0, len(damaged) - 1), label="position")
    damaged[position] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    blobs.content[name] = bytes(damaged)
    best, _ = store.best()
    assert best is not None
    assert best.parts == parts(best.name)
