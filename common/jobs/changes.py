"""Changes of jobs and keys: what their records keep of a change, and the audit log line about it.

    audit by=olga role=operator action=paused job=digits reason="prices are high" outcome=done

Name and role are those of the authenticated author, never a text from the request.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from common.core.field_types import Count
from common.telemetry.logging import event_logger

Outcome: TypeAlias = Literal["done", "refused", "unknown"]

# Maximum length of the name of a key or of a person who signed in.
NAME_CHARACTERS = 100
# Maximum length of a reason: a sentence or two. A record keeps up to 50 reasons.
REASON_CHARACTERS = 500

_log = event_logger(__name__)


class Change(msgspec.Struct, frozen=True):
    """A change of a job or a key, as its record keeps it.

    Attributes:
        at_s: Seconds since 1970.
        action: Past participle, such as "paused".
        by: Name of a key, a person, a local user or a service.
        role: Role of the key or the person, name of the service, or "cli" for a command that writes
            to Kafka itself.
        revision: Revision of a job's specification after the change.
        changed: Settings that differ from the previous revision, with their new values.
        reason: Reason that the author gave; empty for none.
    """

    at_s: float
    action: str
    by: str
    role: str
    revision: Count = 0
    changed: dict[str, Any] = {}
    reason: str = ""


class Author(Protocol):
    """Author of a change: a key, a person who signed in, a local user, or a service."""

    @property
    def name(self) -> str:
        """Name of the author, which a caller cannot choose for a request."""

    @property
    def role(self) -> str:
        """Role that permits the change."""


class NamedActor(NamedTuple):
    """An author that is neither a key nor a person who signed in."""

    name: str
    role: str


COORDINATOR = NamedActor("coordinator", "coordinator")


def local_user() -> NamedActor:
    """Return this process's user from the operating system, because variables can be forged."""
    try:
        return NamedActor(pwd.getpwuid(os.getuid()).pw_name, "cli")
    except KeyError:
        return NamedActor(f"uid {os.getuid()}", "cli")


def change_by(by: Author, at_s: float, action: str, reason: str = "", **more: Any) -> Change:  # noqa: ANN401 -- fields of all kinds
    """Return a change, with its texts cut off at their limits.

    Args:
        by: Author of the change.
        at_s: Seconds since 1970.
        action: Past participle, such as "paused".
        reason: Reason that the author gave; empty for none.
        **more: Further fields of the change.
    """
    name, why = by.name[:NAME_CHARACTERS], reason[:REASON_CHARACTERS]
    return Change(at_s, action, name, by.role, reason=why, **more)


def audit(changes: Iterable[Change], outcome: Outcome = "done", **subject: str) -> None:
    """Log changes, or attempts at them.

    Args:
        changes: Changes, in order.
        outcome: "unknown" if Kafka did not confirm the changes, which may have been made.
        **subject: `job` or `key`, by name.
    """
    emit = _log.warning if outcome == "refused" else _log.info
    for each in changes:
        who = {"by": each.by, "role": each.role, "action": each.action}
        emit("audit", **who, **subject, reason=each.reason, outcome=outcome)
