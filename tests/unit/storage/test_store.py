"""The store finds the newest intact checkpoint, whatever bytes of files are missing or altered."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.messages import GENESIS, ModelId, unused_number
from common.core.snapshots import Snapshot
from common.errors import CorruptError, FutureFormatError, UnavailableError
from common.storage.disk import DiskBlobs
from common.storage.memory import MemoryBlobs
from common.storage.snapshot_file import SnapshotFile, from_store, to_parts
from common.storage.store import TAKEN_BACK_S, CheckpointStore, named_by, taken_back
from load.harness.s3_servers import LIES, Lie
from tests.bad_blobs import DyingBlobs, LyingBlobs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from common.storage.port import Blobs

# When checkpoints that were taken back may be deleted: as times, the epochs here are in early 1970.
LATER_S = TAKEN_BACK_S
OLD, NEW = ModelId(3, 40), ModelId(3, 60)
FOLDER = "clicks/checkpoints/00000000000000000003-000000000060/"


def parts(name: ModelId) -> dict[str, bytes]:
    return to_parts(SnapshotFile(Snapshot(name.epoch, name, 0, 0, {}), bytes(100)))


@pytest.fixture(params=["memory", "disk"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return MemoryBlobs() if request.param == "memory" else DiskBlobs(tmp_path)


def filled(blobs: Blobs, *names: ModelId) -> CheckpointStore:
    store = CheckpointStore(blobs, "clicks")
    for name in names:
        store.save(name, parts(name), 1234.5)
    return store


def rated(blobs: Blobs, losses: Mapping[ModelId, float | None]) -> CheckpointStore:
    store = CheckpointStore(blobs, "clicks")
    for name, loss in losses.items():
        store.save(name, parts(name), 1234.5, samples=name.version, loss=loss)
    return store


def read(store: CheckpointStore, name: ModelId) -> dict[str, bytes]:
    checkpoint = store.open(name)
    return {part: checkpoint.read(part) for part in checkpoint.manifest.parts}


def clear(
    store: CheckpointStore, count: int, begun: ModelId | None = None, now_s: float = LATER_S
) -> list[ModelId]:
    """Delete surplus checkpoints, as a process does that has just read the newest one."""
    known = store.finished()
    witnesses = known if begun is None else [*known, begun]
    counting = [each for each in known if not taken_back(each, witnesses)]
    kept = store.keep(count, counting[0] if counting else None, begun, now_s)
    return [each.name for each in kept]


def best_of(blobs: Blobs) -> ModelId | None:
    """Return the version that the hint for tools names."""
    data = blobs.get("clicks/checkpoints/best")
    return None if data is None else named_by(data.decode())


def newest(store: CheckpointStore) -> tuple[ModelId | None, dict[ModelId, str]]:
    """Return the newest version that can be read completely, and the errors of newer ones."""
    found = from_store(store)
    readable, unreadable = found.readable, dict(found.unreadable)
    for name, stored in readable.items():
        try:
            stored.trainer()
        except CorruptError as error:
            unreadable[name] = str(error)
        else:
            assert read(store, name) == parts(name)
            return name, {other: why for other, why in unreadable.items() if other > name}
    return None, unreadable


# --- without faults ------------------------------------------------------------------------------


def test_checkpoint_is_read_as_it_was_saved(blobs: Blobs) -> None:
    store = filled(blobs, NEW)
    assert read(store, NEW) == parts(NEW)
    with pytest.raises(CorruptError, match=r"does not list optimizer\.bin"):
        store.open(NEW).read("optimizer.bin")


def test_manifest_describes_the_checkpoint(blobs: Blobs) -> None:
    rated(blobs, {OLD: None, NEW: 0.5})
    data = blobs.get(FOLDER + "manifest.json")
    assert data is not None
    manifest = json.loads(data)
    assert (manifest["format"], manifest["epoch"], manifest["version"]) == (1, 3, 60)
    assert (manifest["created_s"], manifest["samples"], manifest["loss"]) == (1234.5, 60, 0.5)
    assert manifest["parts"]["trainer.safetensors"] == {
        "bytes": 100,
        "sha256": hashlib.sha256(bytes(100)).hexdigest(),
    }


def test_later_leader_ranks_above_a_higher_version(blobs: Blobs) -> None:
    names = [ModelId(3, 60), ModelId(20, 5), ModelId(3, 7), ModelId(100, 0)]
    store = filled(blobs, *names)
    assert store.finished() == sorted(names, reverse=True)
    assert newest(store) == (ModelId(100, 0), {})


def test_empty_store_has_no_checkpoint(blobs: Blobs) -> None:
    store = CheckpointStore(blobs, "clicks")
    assert newest(store) == (None, {})
    assert store.latest() is None
    assert best_of(blobs) is None
    assert store.keep(3, None) == ()


def test_store_ignores_checkpoints_of_other_jobs(blobs: Blobs) -> None:
    filled(blobs, NEW)
    assert CheckpointStore(blobs, "click").finished() == []


def test_weights_are_read_only_when_requested(blobs: Blobs) -> None:
    filled(blobs, OLD, NEW)
    # Calls: read hint, list; of each checkpoint, manifest and protocol; the trainer of one.
    frugal = CheckpointStore(DyingBlobs(blobs, 2 + 2 * 2 + 1), "clicks")
    readable = from_store(frugal).readable
    assert readable[NEW].trainer() == bytes(100)
    with pytest.raises(UnavailableError):
        readable[OLD].trainer()


def test_genesis_cannot_be_stored(blobs: Blobs) -> None:
    with pytest.raises(ValueError, match="never stored"):
        CheckpointStore(blobs, "clicks").save(GENESIS, {}, 0.0)


@pytest.mark.parametrize("part", ["manifest.json", "", "a/b", "../a", ".hidden"])
def test_part_with_invalid_name_is_refused(blobs: Blobs, part: str) -> None:
    with pytest.raises(ValueError, match="not a valid name of a checkpoint's part"):
        CheckpointStore(blobs, "clicks").save(NEW, {part: b""}, 0.0)
    assert blobs.names("") == []


def test_saving_an_existing_checkpoint_changes_nothing(blobs: Blobs) -> None:
    store = filled(blobs, NEW)
    store.save(NEW, {"state.msgpack": b"another"}, 99.0)
    assert read(store, NEW) == parts(NEW)


def test_latest_hint_never_moves_back(blobs: Blobs) -> None:
    store = filled(blobs, NEW)
    assert store.latest() == NEW
    filled(blobs, OLD)
    assert store.latest() == NEW
    filled(blobs, ModelId(9, 1))
    assert store.latest() == ModelId(9, 1)


def test_invalid_hint_is_replaced(blobs: Blobs) -> None:
    blobs.put("clicks/checkpoints/latest", b"\xff")
    store = CheckpointStore(blobs, "clicks")
    assert store.latest() is None
    filled(blobs, OLD)
    assert store.latest() == OLD


@given(st.permutations([ModelId(epoch, version) for epoch in (0, 5, 11) for version in (1, 2)]))
def test_hint_ends_at_the_best_checkpoint_in_any_order(names: list[ModelId]) -> None:
    store = filled(MemoryBlobs(), *names)
    assert store.latest() == max(names)


# --- failures at every step ----------------------------------------------------------------------


@pytest.mark.parametrize("last_lands", [False, True])
@pytest.mark.parametrize("calls", range(7))
def test_writer_that_dies_leaves_the_old_or_the_new_checkpoint_complete(
    blobs: Blobs, calls: int, *, last_lands: bool
) -> None:
    """Calls of a save: is there a manifest, part, part, manifest, read hint, move hint."""
    store = filled(blobs, OLD)
    dying = DyingBlobs(blobs, calls, last_lands=last_lands)
    try:
        CheckpointStore(dying, "clicks").save(NEW, parts(NEW), 1234.5)
    except UnavailableError:
        assert calls < 6
    finished = calls + last_lands >= 4
    assert newest(store) == (NEW if finished else OLD, {})
    assert store.latest() == (NEW if calls + last_lands >= 6 else OLD)


@pytest.mark.parametrize("calls", range(7))
def test_failed_save_can_be_repeated(blobs: Blobs, calls: int) -> None:
    dying = CheckpointStore(DyingBlobs(blobs, calls, last_lands=True), "clicks")
    if calls < 6:
        with pytest.raises(UnavailableError):
            dying.save(NEW, parts(NEW), 1.0)
    store = filled(blobs, NEW)
    assert read(store, NEW) == parts(NEW)
    assert store.latest() == NEW


# --- retention -----------------------------------------------------------------------------------


def test_only_newest_checkpoints_are_kept(blobs: Blobs) -> None:
    names = [ModelId(3, version) for version in (10, 20, 30)] + [ModelId(7, 35)]
    store = filled(blobs, *names)
    kept = clear(store, 2)
    assert kept == [ModelId(7, 35), ModelId(3, 30)]
    assert store.finished() == [ModelId(7, 35), ModelId(3, 30)]
    assert all("000010/" not in name for name in blobs.names(""))
    with pytest.raises(ValueError, match="at least 1"):
        store.keep(0, NEW)


def test_checkpoint_of_lowest_loss_is_kept_and_hinted(blobs: Blobs) -> None:
    versions = [ModelId(3, version) for version in (10, 20, 30, 40)]
    store = rated(blobs, dict(zip(versions, (None, 0.2, 0.4, 0.3), strict=True)))
    assert [each.version for each in clear(store, 1)] == [40, 20]
    assert store.finished() == [ModelId(3, 40), ModelId(3, 20)]
    assert best_of(blobs) == ModelId(3, 20)
    clear(rated(blobs, {ModelId(3, 50): 0.1}), 1)
    assert store.finished() == [ModelId(3, 50)]
    assert best_of(blobs) == ModelId(3, 50)


def test_newer_of_two_checkpoints_of_equal_loss_is_best(blobs: Blobs) -> None:
    store = rated(blobs, {OLD: 0.25, NEW: 0.25, ModelId(3, 70): 0.5})
    clear(store, 1)
    assert store.finished() == [ModelId(3, 70), NEW]
    assert best_of(blobs) == NEW


def test_checkpoint_that_a_later_leader_took_back_is_neither_best_nor_kept(blobs: Blobs) -> None:
    # leader 3   20 ── 40 ── 60
    # leader 9          └──── 45 : it began with 40, so 60 is taken back
    losses = {ModelId(3, 20): 0.5, OLD: 0.4, NEW: 0.1, ModelId(9, 45): 0.3}
    store = rated(blobs, losses)
    assert clear(store, 2) == [ModelId(9, 45), OLD]
    assert store.finished() == [ModelId(9, 45), OLD]
    assert best_of(blobs) == ModelId(9, 45)


def test_new_leader_excludes_checkpoints_above_its_base(blobs: Blobs) -> None:
    store = rated(blobs, {OLD: 0.4, NEW: 0.1})
    assert clear(store, 3, begun=ModelId(9, 40)) == [OLD]
    assert best_of(blobs) == OLD
    assert store.finished() == [OLD]


def test_checkpoint_at_or_below_the_base_of_a_leader_is_not_taken_back() -> None:
    assert not taken_back(OLD, [OLD, NEW, ModelId(9, 40), ModelId(2, 7)])
    assert taken_back(NEW, [ModelId(9, 40)])


def test_incomplete_checkpoint_does_not_count_as_kept(blobs: Blobs) -> None:
    store = filled(blobs, OLD, NEW)
    blobs.put("clicks/checkpoints/00000000000000000005-000000000070/state.msgpack", b"")
    clear(store, 1)
    assert store.finished() == [NEW]
    # NEW has three files. The incomplete checkpoint has one, which stays because its writer may
    # still be at work. The last file is the hint.
    assert len(blobs.names("")) == 3 + 1 + 1


def test_unreadable_manifest_does_not_count_as_kept(blobs: Blobs) -> None:
    store = filled(blobs, ModelId(3, 20), OLD, NEW)
    blobs.put(FOLDER + "manifest.json", b"{")
    store.keep(1, OLD)
    assert store.finished() == [NEW, OLD]


def test_checkpoint_of_a_newer_program_is_neither_counted_nor_deleted(blobs: Blobs) -> None:
    store = filled(blobs, ModelId(3, 20), OLD, NEW)
    blobs.put("clicks/checkpoints/00000000000000000003-000000000020/manifest.json", b'{"format":2}')
    clear(store, 1)
    assert store.finished() == [NEW, ModelId(3, 20)]


@pytest.mark.parametrize("newest", [None, OLD, ModelId(3, 70)])
def test_keep_deletes_nothing_if_the_list_does_not_start_with_the_verified_one(
    blobs: Blobs, newest: ModelId | None
) -> None:
    store = filled(blobs, ModelId(3, 20), OLD, NEW)
    before = blobs.names("")
    store.keep(1, newest, begun=ModelId(9, 10), now_s=LATER_S)
    assert blobs.names("") == before


@pytest.mark.parametrize("lie", LIES)
def test_store_that_answers_wrongly_deletes_nothing_that_counts(lie: Lie) -> None:
    # versions   20   40 (the best)   60   80: written while the store answers wrongly
    blobs = LyingBlobs()
    store = rated(blobs, {ModelId(3, 20): 0.5, OLD: 0.1, NEW: 0.4})
    for name in (OLD, NEW):
        store.put_state(name, b"state")
    written = set(blobs.content)
    blobs.lie = lie
    name = ModelId(3, 80)
    try:
        store.save(name, parts(name), 1234.5, loss=0.3)
        store.verify(name)
        store.keep_states([name])
        store.keep(2, name)
    except (CorruptError, UnavailableError):
        pass
    allowed = {each for each in written if "-000000000020/" in each} if lie == "latest" else set()
    assert set(blobs.deleted) <= allowed


def test_checkpoint_that_a_later_leader_took_back_is_kept_for_a_day(blobs: Blobs) -> None:
    # leader 3            40 ── 60
    # leader at 1,000 s    └──── 45
    later = ModelId(unused_number(1000.0, 7), 45)
    store = filled(blobs, OLD, NEW, later)
    clear(store, 1, now_s=1000.0 + TAKEN_BACK_S - 1)
    assert store.finished() == [later, NEW]
    clear(store, 1, now_s=1001.0 + TAKEN_BACK_S)
    assert store.finished() == [later]


def test_best_checkpoint_with_unreadable_manifest_is_not_deleted(blobs: Blobs) -> None:
    store = rated(blobs, {ModelId(3, 20): 0.1, OLD: 0.5, NEW: 0.4})
    clear(store, 2)
    manifest = "clicks/checkpoints/00000000000000000003-000000000020/manifest.json"
    whole = blobs.get(manifest) or b""
    for torn in (b"{", None):
        if torn is None:
            blobs.delete(manifest)
        else:
            blobs.put(manifest, torn)
        clear(store, 1)
        assert best_of(blobs) == ModelId(3, 20)
    blobs.put(manifest, whole)
    assert sorted(read(store, ModelId(3, 20))) == ["protocol.msgpack", "trainer.safetensors"]


def test_verify_compares_a_checkpoint_with_its_manifest(blobs: Blobs) -> None:
    store = filled(blobs, OLD, NEW)
    store.verify(NEW)
    blobs.put(FOLDER + "trainer.safetensors", b"other")
    with pytest.raises(CorruptError, match=r"trainer.safetensors has 5 bytes"):
        store.verify(NEW)
    blobs.delete(FOLDER + "trainer.safetensors")
    with pytest.raises(CorruptError, match=r"does not list trainer.safetensors of 3-60"):
        store.verify(NEW)


def test_states_below_listed_ones_are_deleted_and_those_taken_back_after_a_day(
    blobs: Blobs,
) -> None:
    # states   3-20   3-60, taken back by the leader of 1,000 s, which made 45   70 of that leader
    epoch = unused_number(1000.0, 7)
    store = filled(blobs, ModelId(epoch, 45))
    kept = ModelId(epoch, 70)
    for made in (ModelId(3, 20), NEW, kept):
        store.put_state(made, b"state")
    store.keep_states([ModelId(epoch, 90)], now_s=1e12)
    assert len(blobs.names("clicks/states/")) == 3
    store.keep_states([kept], now_s=2000.0)
    assert blobs.names("clicks/states/") == [
        "clicks/states/3-60.safetensors",
        f"clicks/states/{epoch}-70.safetensors",
    ]
    store.keep_states([kept], now_s=1001.0 + TAKEN_BACK_S)
    assert blobs.names("clicks/states/") == [f"clicks/states/{epoch}-70.safetensors"]


@pytest.mark.parametrize("calls", range(22))
def test_interrupted_deletion_is_finished_by_the_next(blobs: Blobs, calls: int) -> None:
    store = rated(blobs, {ModelId(3, 10): 0.4, OLD: 0.5, NEW: 0.6})
    try:
        CheckpointStore(DyingBlobs(blobs, calls), "clicks").keep(1, NEW)
    except UnavailableError:
        assert newest(store)[0] == NEW
    clear(store, 1)
    assert store.finished() == [NEW, ModelId(3, 10)]
    # Each checkpoint has two parts and a manifest. There are two hints.
    assert len(blobs.names("")) == 2 * 3 + 2


@given(
    st.dictionaries(
        st.builds(ModelId, st.sampled_from((0, 5, 11)), st.integers(0, 9)),
        st.none() | st.floats(0, 1),
        min_size=1,
    ),
    st.integers(1, 4),
)
def test_newest_and_best_valid_checkpoints_are_always_kept(
    losses: dict[ModelId, float | None], count: int
) -> None:
    counting = [name for name in losses if not taken_back(name, losses)]
    known = [(loss, name) for name, loss in losses.items() if loss is not None]
    lowest = min((loss for loss, name in known if name in counting), default=None)
    best = [name for loss, name in known if loss == lowest and name in counting]

    blobs = MemoryBlobs()
    store = rated(blobs, losses)
    kept = clear(store, count)

    assert kept[:count] == sorted(counting, reverse=True)[:count]
    assert set(kept[count:]) <= {max(best)} if best else len(kept) <= count
    assert best_of(blobs) == max(best, default=None)
    assert store.finished() == kept


# --- checkpoints with which a job begins ---------------------------------------------------------


def test_origin_is_found_by_its_checksum(blobs: Blobs) -> None:
    store = filled(blobs, OLD, NEW)
    sha256 = store.put_origin(b"weights")
    assert sha256 == hashlib.sha256(b"weights").hexdigest()
    clear(store, 1)
    assert CheckpointStore(blobs, "clicks").origin(sha256) == b"weights"


def test_corrupt_or_missing_origin_is_refused(blobs: Blobs) -> None:
    store = CheckpointStore(blobs, "clicks")
    sha256 = store.put_origin(b"weights")
    (name,) = blobs.names("clicks/origin/")
    blobs.put(name, b"weighty")
    with pytest.raises(CorruptError, match="has 7 bytes of sha256"):
        store.origin(sha256)
    blobs.delete(name)
    with pytest.raises(CorruptError, match="is missing"):
        store.origin(sha256)


# --- altered -------------------------------------------------------------------------------------

DESCRIBED = b'{"bytes":1,"sha256":""}'


@pytest.mark.parametrize(
    ("part", "data", "reasons"),
    [
        (
            "trainer.safetensors",
            bytes(99),
            ["trainer.safetensors has 99 bytes", "expected 100 bytes"],
        ),
        ("trainer.safetensors", bytes(99) + b"\1", ["trainer.safetensors has 100 bytes of sha256"]),
        ("trainer.safetensors", None, ["trainer.safetensors is missing, expected 100 bytes"]),
        ("manifest.json", None, ["manifest.json is missing"]),
        ("manifest.json", b"{", ["manifest.json does not parse"]),
        ("manifest.json", b"\xff", ["manifest.json does not parse"]),
        ("manifest.json", b"{}", ["manifest.json does not parse", "missing required field"]),
        ("protocol.msgpack", b"", ["protocol.msgpack has 0 bytes"]),
        (
            "manifest.json",
            b'{"format":1,"epoch":3,"version":61,"created_s":0,"parts":{}}',
            ["belongs to 3-61, expected 3-60"],
        ),
        (
            "manifest.json",
            b'{"format":1,"epoch":3,"version":60,"created_s":0,"parts":{"../x":%s}}' % DESCRIBED,
            ["lists '../x'"],
        ),
    ],
)
def test_altered_checkpoint_is_reported_and_skipped(
    blobs: Blobs, part: str, data: bytes | None, reasons: list[str]
) -> None:
    store = filled(blobs, OLD, NEW)
    if data is None:
        blobs.delete(FOLDER + part)
    else:
        blobs.put(FOLDER + part, data)
    name, passed_over = newest(store)
    assert name == OLD
    assert all(reason in passed_over[NEW] for reason in reasons), passed_over


@given(data=st.data())
def test_flipped_bit_never_changes_what_is_loaded(data: st.DataObject) -> None:
    blobs = MemoryBlobs()
    store = filled(blobs, OLD, NEW)
    blob = data.draw(st.sampled_from(blobs.names(FOLDER)), label="blob")
    damaged = bytearray(blobs.content[blob])
    position = data.draw(st.integers(0, len(damaged) - 1), label="position")
    damaged[position] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    blobs.content[blob] = bytes(damaged)
    try:
        name, _ = newest(store)  # verifies all checksums
    except FutureFormatError:
        return
    assert name is not None


@pytest.mark.parametrize("manifest", [b'{"format":2}', b'{"format":3,"epoch":"?","parts":[]}'])
def test_checkpoint_of_a_newer_program_is_not_skipped(blobs: Blobs, manifest: bytes) -> None:
    store = filled(blobs, OLD, NEW)
    blobs.put(FOLDER + "manifest.json", manifest)
    with pytest.raises(FutureFormatError, match=r"checkpoint 3-60 has format [23], expected at"):
        from_store(store)


@pytest.mark.parametrize("lie", ["latest", "page"])
def test_unreadable_hint_is_reported_and_does_not_prevent_listing(lie: Lie) -> None:
    class Unreadable(LyingBlobs):
        """Has no object for the hint."""

        def get(self, name: str) -> bytes | None:
            """Read any object but the hint."""
            if self.lie is not None and name.endswith("/latest"):
                raise UnavailableError("the answer is no object")
            return super().get(name)

    for blobs in (LyingBlobs(), Unreadable()):
        store = filled(blobs, OLD, NEW)
        blobs.lie = lie
        if lie == "latest":
            found = from_store(store)
            assert list(found.readable) == [NEW, OLD]
            assert found.hint.startswith("`latest` ")
        else:
            with pytest.raises(UnavailableError):
                from_store(store)
    assert from_store(CheckpointStore(MemoryBlobs(), "clicks")).hint == ""
    empty = Unreadable()
    empty.lie = "latest"
    with pytest.raises(UnavailableError, match="no object"):
        from_store(CheckpointStore(empty, "clicks"))


def test_checkpoint_that_only_the_hint_names_is_reported_as_missing(blobs: Blobs) -> None:
    store = filled(blobs, OLD, NEW)
    for name in blobs.names(FOLDER):
        blobs.delete(name)
    assert newest(store) == (OLD, {NEW: "manifest.json is missing"})
