"""A valid API key gives its role, and nothing else is accepted, even if the topic has garbage."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.api.keys import KeyRecord, Keys, KeyStore, decode_key, fingerprint, new_key
from common.core.spans import Partition
from common.errors import ConflictError, NotFoundError, UserError
from common.jobs.changes import Change, local_user
from common.kafka import names as topics
from common.kafka.memory import MemoryLog
from common.kafka.table import NUMBER
from tests.fakes.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = Partition(topics.KEYS, 0)
SHA_256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


def stored(log: MemoryLog) -> bytes:
    """Return the complete content of the keys topic."""
    tail = log.tail(KEYS, 0)
    return b"".join((record.key or b"") + (record.value or b"") for record in tail.read(1000, 0.0))


def write(log: MemoryLog, value: bytes | None, key: bytes | None, number: int = 1) -> None:
    writer = log.writer()
    writer.append(topics.KEYS, value, key=key, headers=[(NUMBER, b"%d" % number)])
    assert writer.flush(1.0)


def test_new_key_has_a_prefix_and_43_header_safe_characters() -> None:
    key = new_key()
    assert key.startswith("doll_")
    assert len(key) == 48
    assert set(key) <= set(string.ascii_letters + string.digits + "_-")


def test_new_keys_are_unique() -> None:
    assert len({new_key() for _ in range(1000)}) == 1000


def test_fingerprint_is_the_sha_256_of_the_key() -> None:
    assert fingerprint("abc") == SHA_256_OF_ABC


def test_created_key_is_stored_only_as_its_fingerprint(log: MemoryLog) -> None:
    key, record = KeyStore(log, clock=lambda: 1000.0).create("ci", "operator", "for the pipeline")
    made = Change(1000.0, "created", local_user().name, "cli", reason="operator, for the pipeline")
    note = "for the pipeline"
    assert record == KeyRecord("ci", "operator", fingerprint(key), 1000.0, note, (made,))
    assert KeyStore(log).read() == {"ci": record}
    assert key.encode() not in stored(log)
    assert key not in repr(record)


def test_valid_key_has_its_role_and_other_keys_have_none(log: MemoryLog) -> None:
    key_store = KeyStore(log)
    made = {name: key_store.create(name, "viewer") for name in ("a", "b", "c")}
    keys = Keys(key_store.read().values())
    assert [keys.role_of(key) for key, _ in made.values()] == [
        record for _, record in made.values()
    ]
    assert keys.role_of(new_key()) is None
    assert Keys([]).role_of(new_key()) is None


@given(st.text(max_size=60))
def test_any_text_can_be_checked_as_a_key(presented: str) -> None:
    key = "doll_" + 43 * "k"
    record = KeyRecord("ci", "viewer", fingerprint(key), 0.0)
    assert Keys([record]).role_of(presented) is None
    assert Keys([record]).role_of(key) is record


def test_fingerprint_is_not_accepted_as_a_key(log: MemoryLog) -> None:
    key_store = KeyStore(log)
    _, record = key_store.create("ci", "operator")
    assert Keys(key_store.read().values()).role_of(record.sha256) is None


def test_operator_has_the_rights_of_a_viewer_but_not_vice_versa() -> None:
    viewer = KeyRecord("v", "viewer", "", 0.0)
    operator = KeyRecord("o", "operator", "", 0.0)
    assert (viewer.may("viewer"), viewer.may("operator")) == (True, False)
    assert (operator.may("viewer"), operator.may("operator")) == (True, True)


def test_create_with_a_used_name_fails_until_it_is_revoked(log: MemoryLog) -> None:
    key_store = KeyStore(log)
    first, _ = key_store.create("ci", "viewer")
    with pytest.raises(ConflictError, match=r'there is already a key "ci".*`doll key revoke ci`'):
        KeyStore(log).create("ci", "operator")
    key_store.revoke("ci")
    second, record = KeyStore(log).create("ci", "operator")
    keys = Keys(key_store.read().values())
    assert keys.role_of(first) is None
    assert keys.role_of(second) == record


def test_revoked_key_is_invalid_after_the_next_refresh(log: MemoryLog) -> None:
    watcher, writer = KeyStore(log), KeyStore(log)
    key, record = writer.create("ci", "viewer")
    assert Keys(watcher.refresh(0.0).values()).role_of(key) == record
    writer.revoke("ci")
    assert Keys(watcher.refresh(0.0).values()).role_of(key) is None


def test_revoke_of_an_unknown_key_lists_the_known_ones(log: MemoryLog) -> None:
    key_store = KeyStore(log)
    with pytest.raises(
        NotFoundError, match="keys: none yet; create one with `doll key create NAME`"
    ):
        key_store.revoke("ci")
    key_store.create("page", "viewer")
    with pytest.raises(NotFoundError, match='there is no key "ci"; keys: page'):
        key_store.revoke("ci")


@pytest.mark.parametrize("name", ["", "CI", "-x", "a b", "a/b", "ä", "a" * 101])
def test_create_with_an_invalid_name_raises(log: MemoryLog, name: str) -> None:
    with pytest.raises(UserError, match="name: must be 1 to 100 lower case letters"):
        KeyStore(log).create(name, "viewer")


@pytest.mark.parametrize("note", ["two\nlines", "\x1b[31m", "n" * 201])
def test_create_with_an_invalid_note_raises(log: MemoryLog, note: str) -> None:
    with pytest.raises(UserError, match="note: must be one line of at most 200 characters"):
        KeyStore(log).create("ci", "viewer", note)


class RacingLog(MemoryLog):
    """Lets another process act between the check and the write."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] | None = None

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        """Return the partitions. The writer asks first, once; the other acts before its answer."""
        if self.meanwhile:
            act, self.meanwhile = self.meanwhile, None
            act()
        return super().partitions(topic)


def test_first_of_two_concurrent_creations_gets_the_name() -> None:
    log, made = RacingLog(), list[str]()
    key_store = KeyStore(log)
    key_store.read()
    log.meanwhile = lambda: made.append(KeyStore(log).create("ci", "operator")[0])
    with pytest.raises(ConflictError, match='there is already a key "ci"'):
        key_store.create("ci", "viewer")
    for each in (key_store, KeyStore(log)):
        record = Keys(each.read().values()).role_of(made[0])
        assert record is not None
        assert record.role == "operator"


def test_unparsable_record_invalidates_the_key_that_it_replaces(
    log: MemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    KeyStore(log).create("ci", "operator")
    KeyStore(log).create("page", "viewer")
    write(log, b'{"name": "ci", "role": "deputy"}', b"ci", 2)
    key_store = KeyStore(log)
    assert list(key_store.read()) == ["page"]
    assert caplog.text.count("key_rejected") == 1


def test_unparsable_records_are_logged_and_do_not_affect_other_keys(
    log: MemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    _, record = KeyStore(log).create("ci", "viewer")
    other = msgspec.json.encode(record)
    short = other.replace(record.sha256.encode(), b"abc").replace(b'"ci"', b'"z"')
    late = other.replace(b'"created_s":', b'"created_s":9e99').replace(b'"ci"', b'"z"')
    for number, (value, key) in enumerate(((b"", b"x"), (b"\xff", b"x"), (other, b"y")), 1):
        write(log, value, key, number)
    write(log, short, b"z")
    write(log, late, b"z", 2)
    key_store = KeyStore(log)
    assert key_store.read() == {"ci": record}
    assert caplog.text.count("key_rejected") == 5


def test_unknown_field_of_a_later_version_is_ignored() -> None:
    record = KeyRecord("ci", "viewer", SHA_256_OF_ABC, 1.0)
    later = msgspec.json.encode(record)[:-1] + b', "expires_s": 2.0}'
    assert decode_key(b"ci", later) == record


def test_compaction_does_not_change_the_keys(log: MemoryLog) -> None:
    key_store = KeyStore(log)
    key_store.create("ci", "viewer")
    key_store.revoke("ci")
    key, _ = key_store.create("ci", "operator")
    log.punch(KEYS, 0)
    log.punch(KEYS, 1)
    assert KeyStore(log).read() == key_store.read()
    assert Keys(KeyStore(log).read().values()).role_of(key)


def test_reader_behind_the_start_of_the_topic_starts_again(log: MemoryLog) -> None:
    late, key_store = KeyStore(log), KeyStore(log)
    assert late.read() == {}
    key_store.create("a", "viewer")
    key_store.create("b", "viewer")
    log.expire(KEYS, 1)
    assert list(late.read()) == ["b"]


def test_concurrent_revoke_and_create_leave_no_revoked_key_valid() -> None:
    log = RacingLog()
    key_store = KeyStore(log)
    leaked, _ = key_store.create("ci", "operator")
    made = list[str]()

    def replace() -> None:
        KeyStore(log).revoke("ci")
        made.append(KeyStore(log).create("ci", "viewer")[0])

    log.meanwhile = replace
    # The key that exists when it is revoked.
    key_store.revoke("ci")
    keys = Keys(KeyStore(log).read().values())
    assert keys.role_of(leaked) is None
    assert keys.role_of(made[0]) is None


def test_record_of_another_program_grants_no_access(log: MemoryLog) -> None:
    key, record = KeyStore(log).create("ci", "viewer")
    writer = log.writer()
    theirs = KeyRecord("ci", "operator", fingerprint("theirs"), 0.0)
    writer.append(topics.KEYS, msgspec.json.encode(theirs), key=b"ci")
    writer.append(topics.KEYS, None, key=b"ci")
    assert writer.flush(1.0)
    keys = Keys(KeyStore(log).read().values())
    assert keys.role_of("theirs") is None
    assert keys.role_of(key) == record


def test_key_record_keeps_who_created_and_revoked_it(log: MemoryLog) -> None:
    clock = ManualClock(1000.0)
    key_store = KeyStore(log, clock)
    key_store.create("ci", "viewer")
    clock.advance(5.0)
    key_store.revoke("ci")
    assert KeyStore(log).read()["ci"].sha256 == ""
    _, record = key_store.create("ci", "operator", "again")
    assert [(each.at_s, each.action, each.by, each.role) for each in record.changes] == [
        (1000.0, "created", *local_user()),
        (1005.0, "revoked", *local_user()),
        (1005.0, "created", *local_user()),
    ]
    assert [each.reason for each in record.changes] == ["viewer", "", "operator, again"]
    assert KeyStore(log).read() == {"ci": record}


def test_record_of_a_name_with_many_keys_stays_small(log: MemoryLog) -> None:
    key_store = KeyStore(log)
    for _ in range(20):
        key_store.create("ci", "viewer")
        key_store.revoke("ci")
    changes = key_store.read()["ci"].changes
    assert (len(changes), changes[-1].action) == (10, "revoked")


@given(st.text(max_size=60))
def test_no_text_matches_a_revoked_key(presented: str) -> None:
    keys = Keys([KeyRecord("ci", "operator", "", 0.0)])
    assert keys.role_of(presented) is None
    assert KeyRecord("ci", "operator", "", 0.0) not in keys
