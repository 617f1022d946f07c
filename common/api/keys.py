"""API keys and their roles, a fold over the keys topic. The key itself is never stored.

A key is 256 random bits, so nobody can guess it from its plain SHA-256. A slow hash, as for
passwords, would only slow down every request.
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

# An operator may also do everything that a viewer may.
Role: TypeAlias = Literal["viewer", "operator"]

# People, and scanners for leaked secrets, recognize a key by this prefix.
_PREFIX = "doll_"
_RANDOM_BYTES = 32  # 43 characters
_LONGEST_NOTE = 200
# Number of changes that the record of a name keeps, over all keys of that name.
_CHANGES_KEPT = 10
# Latest date that Python can represent.
_YEAR_9999_S = 253_370_764_800


class KeyRecord(msgspec.Struct, frozen=True):
    """A key in the keys topic. A revoked key keeps its record, without a hash."""

    name: str
    role: Role
    # Fingerprint of the key; empty if the key is revoked.
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    # Seconds since 1970.
    created_s: Annotated[float, Meta(ge=0, le=_YEAR_9999_S)]
    note: str = ""
    # Creations and revocations of keys with this name, newest last.
    changes: tuple[Change, ...] = ()

    def may(self, needed: Role) -> bool:
        """True if the key may do what requires a role."""
        return needed in ("viewer", self.role)


_RECORD = msgspec.json.Decoder(KeyRecord)


class KeyStore(CompactedTable[KeyRecord]):
    """The keys topic as a table by name, with methods to create and revoke keys."""

    def __init__(self, log: Log, clock: Callable[[], float] = time) -> None:
        # `closed` is True: if this program cannot read a newer program's record, the record that
        # was replaced must not admit anybody.
        super().__init__(log, topics.KEYS, decode_key, "key", closed=True, clock=clock)

    def create(self, name: str, role: Role, note: str = "") -> tuple[str, KeyRecord]:
        """Create a key. It is returned here and cannot be read again.

        Raises:
            UserError: If the name or the note is invalid.
            ConflictError: If the name is taken.
            UnavailableError: If Kafka is unavailable for long.
        """
        try:
            check_name(name)
        except ValueError as error:
            raise UserError(f"name: {error}") from error
        if len(note) > _LONGEST_NOTE or not note.isprintable():
            raise UserError(
                f"note: must be one line of at most {_LONGEST_NOTE} characters, got {note!r}"
            )
        key = new_key()

        def created(taken: KeyRecord | None) -> KeyRecord:
            if taken is not None and taken.sha256:
                raise ConflictError(
                    f'name: there is already a key "{name}"; choose another name, or revoke that'
                    f" key with `doll key revoke {name}`"
                )
            now_s, before = self._clock(), () if taken is None else taken.changes
            what = f"{role}, {note}" if note else role
            changes = _changed(before, now_s, "created", what)
            return KeyRecord(name, role, fingerprint(key), now_s, note, changes)

        return key, self.update(name, created, msgspec.json.encode)

    def revoke(self, name: str) -> None:
        """Revoke a key for good.

        Raises:
            NotFoundError: If there is no key of this name.
            UnavailableError: If Kafka is unavailable for long.
        """

        def revoked(key: KeyRecord | None) -> KeyRecord:
            if key is None or not key.sha256:
                valid = sorted(each.name for each in self.read().values() if each.sha256)
                known = ", ".join(valid) or "none yet; create one with `doll key create NAME`"
                raise NotFoundError(f'there is no key "{name}"; keys: {known}')
            changes = _changed(key.changes, self._clock(), "revoked")
            return msgspec.structs.replace(key, sha256="", changes=changes)

        self.update(name, revoked, msgspec.json.encode)


def _changed(
    changes: tuple[Change, ...], at_s: float, action: str, reason: str = ""
) -> tuple[Change, ...]:
    """Return a key's changes plus one that the user of this process makes now."""
    return (*changes, change_by(local_user(), at_s, action, reason))[-_CHANGES_KEPT:]


class Keys:
    """Valid keys among some records."""

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        valid = [record for record in records if record.sha256]
        self._known = tuple((record.sha256.encode(), record) for record in valid)
        self._records = {record.name: record for record in valid}

    def __contains__(self, record: KeyRecord) -> bool:
        """True if this key is still valid."""
        return self._records.get(record.name) == record

    def role_of(self, presented: str) -> KeyRecord | None:
        """Return the record of a presented key; None if the key is not valid.

        The time that this takes depends neither on the outcome nor on how much of the key is right.
        """
        digest, found = fingerprint(presented).encode(), None
        for known, record in self._known:
            if hmac.compare_digest(known, digest):
                # Continue, or the time would reveal the key's position.
                found = record
        return found


def new_key() -> str:
    """Generate a key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def fingerprint(key: str) -> str:
    """Return the SHA-256 of a key as 64 hexadecimal digits."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def decode_key(key: bytes | None, value: bytes) -> KeyRecord:
    """Decode a key's record.

    Raises:
        WireError: If it does not parse, or the record's key in the topic is not its name.
    """
    record = decoded(_RECORD.decode, value, "key record")
    if key != record.name.encode():
        raise WireError(
            f"key record: must have its name {record.name!r} as the record's key, got {key!r}"
        )
    return record
