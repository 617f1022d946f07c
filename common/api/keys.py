"""API keys and their roles, as a fold over the keys topic; a key itself is stored nowhere.

A key is 256 random bits, so its plain SHA-256 cannot be guessed back: a slow hash, made for what
people think up, would only make every request slow.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from time import time
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import ConflictError, NotFoundError, UserError, WireError, decoded
from common.jobs.changes import Change, change_by, local_user
from common.kafka import names as topics
from common.kafka.names import check_name
from common.kafka.table import CompactedTable

if TYPE_CHECKING:
    from common.kafka.port import Log

Role: TypeAlias = Literal["viewer", "operator"]  # an operator may do what a viewer may

_PREFIX = "doll_"  # so that scanners for lost secrets, and people, know one when they see it
_RANDOM_BYTES = 32  # 43 characters
_LONGEST_NOTE = 200
# Changes that the record of a name keeps, of all its keys.
_CHANGES_KEPT = 10
_YEAR_9999_S = 253_370_764_800  # dates end there


class KeyRecord(msgspec.Struct, frozen=True):
    """One key as the topic has it; a key that is revoked keeps its record, without a hash."""

    name: str
    role: Role
    # Fingerprint of the key; empty if the key is revoked.
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    created_s: Annotated[float, Meta(ge=0, le=_YEAR_9999_S)]  # since 1970
    note: str = ""
    # Who created and revoked the keys of this name, newest last.
    changes: tuple[Change, ...] = ()

    def may(self, needed: Role) -> bool:
        """Whether it may do what needs a role."""
        return needed in ("viewer", self.role)


_RECORD = msgspec.json.Decoder(KeyRecord)


class KeyStore(CompactedTable[KeyRecord]):
    """The keys topic by name: such a table in all it does, with two ways to write it."""

    def __init__(self, log: Log, clock: Callable[[], float] = time) -> None:
        # Closed: whatever a newer program says of a key, what it replaced must not let anybody in.
        super().__init__(log, topics.KEYS, decode_key, "key", closed=True, clock=clock)

    def create(self, name: str, role: Role, note: str = "") -> tuple[str, KeyRecord]:
        """Make a key; it is returned here and nowhere else, ever.

        Raises:
            UserError: If the name or the note is not a legal one.
            ConflictError: If the name is taken.
            UnavailableError: If Kafka is unavailable for long.
        """
        try:
            check_name(name)
        except ValueError as error:
            raise UserError(f"the name of a key {error}") from error
        if len(note) > _LONGEST_NOTE or not note.isprintable():
            raise UserError(
                f"the note of a key must be at most {_LONGEST_NOTE} characters in one line"
            )
        key = new_key()

        def created(taken: KeyRecord | None) -> KeyRecord:
            if taken is not None and taken.sha256:
                raise ConflictError(
                    f'there is a key "{name}" already: choose another name, or make this one'
                    f" invalid with `doll key revoke {name}`"
                )
            now_s, before = self._clock(), () if taken is None else taken.changes
            what = f"{role}, {note}" if note else role
            changes = _changed(before, now_s, "created", what)
            return KeyRecord(name, role, fingerprint(key), now_s, note, changes)

        return key, self.update(name, created, msgspec.json.encode)

    def revoke(self, name: str) -> None:
        """Make a key invalid for good.

        Raises:
            NotFoundError: If there is none of this name.
            UnavailableError: If Kafka is unavailable for long.
        """

        def revoked(key: KeyRecord | None) -> KeyRecord:
            if key is None or not key.sha256:
                valid = sorted(each.name for each in self.read().values() if each.sha256)
                known = ", ".join(valid) or "none yet, make one with `doll key create NAME`"
                raise NotFoundError(f'there is no key "{name}"; keys: {known}')
            changes = _changed(key.changes, self._clock(), "revoked")
            return msgspec.structs.replace(key, sha256="", changes=changes)

        self.update(name, revoked, msgspec.json.encode)


def _changed(
    changes: tuple[Change, ...], at_s: float, action: str, reason: str = ""
) -> tuple[Change, ...]:
    """Return the changes of a key, and what the user of this process does to it now."""
    return (*changes, change_by(local_user(), at_s, action, reason))[-_CHANGES_KEPT:]


class Keys:
    """Who may come in, as of some records."""

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        valid = [record for record in records if record.sha256]
        self._known = tuple((record.sha256.encode(), record) for record in valid)
        self._records = {record.name: record for record in valid}

    def __contains__(self, record: KeyRecord) -> bool:
        """Whether whoever came in with this record would still get in so."""
        return self._records.get(record.name) == record

    def role_of(self, presented: str) -> KeyRecord | None:
        """The record of a key that somebody presents, None if it is not valid.

        Takes the same time whichever it is, and however much of it is right.
        """
        digest, found = fingerprint(presented).encode(), None
        for known, record in self._known:
            if hmac.compare_digest(known, digest):
                found = record  # and go on: where it stands must not be measurable
        return found


def new_key() -> str:
    """Make a key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def fingerprint(key: str) -> str:
    """SHA-256 of a key, as 64 hexadecimal digits."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def decode_key(key: bytes | None, value: bytes) -> KeyRecord:
    """Read a key's record.

    Raises:
        WireError: If it does not parse or stands under another name than its own.
    """
    record = decoded(_RECORD.decode, value, "key record")
    if key != record.name.encode():
        raise WireError(f"key record: stands under the key {key!r}, its name is {record.name!r}")
    return record
