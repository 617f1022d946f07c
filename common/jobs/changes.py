"""Who changes jobs and keys: what their records keep of a change, and the log line that says it.

    audit by=olga role=operator action=paused job=digits reason="prices are high" outcome=done

The name and the role are those of whoever came in, never a text that they sent.
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

# The longest name of a key, and of somebody who signed in.
NAME_CHARACTERS = 100
# A sentence or two; a record keeps 50 of them.
REASON_CHARACTERS = 500

_log = event_logger(__name__)


class Change(msgspec.Struct, frozen=True):
    """One change of a job or a key, as its record keeps it.

    Attributes:
        at_s: Seconds since 1970.
        action: Past participle, such as "paused".
        by: Name of a key, a person, a local user or a service.
        role: Role of the key or the person, name of the service, or "cli" for a command that writes
            to Kafka itself.
        revision: Revision of a job's specification after the change.
        changed: Settings that differ from the revision before, with their new values.
        reason: Reason that somebody gave; empty for none.
    """

    at_s: float
    action: str
    by: str
    role: str
    revision: Count = 0
    changed: dict[str, Any] = {}
    reason: str = ""


class Author(Protocol):
    """Somebody who changes something: a key, a person who signed in, a local user, a service."""

    @property
    def name(self) -> str:
        """Name, which a caller cannot choose for a request."""

    @property
    def role(self) -> str:
        """Role by which the change is allowed."""


class NamedActor(NamedTuple):
    """An actor that is neither a key nor a person who signed in."""

    name: str
    role: str


COORDINATOR = NamedActor("coordinator", "coordinator")


def local_user() -> NamedActor:
    """Return the user of this process, by the operating system's word: any variable may lie."""
    try:
        return NamedActor(pwd.getpwuid(os.getuid()).pw_name, "cli")
    except KeyError:
        return NamedActor(f"uid {os.getuid()}", "cli")


def change_by(by: Author, at_s: float, action: str, reason: str = "", **more: Any) -> Change:  # noqa: ANN401 -- fields of all kinds
    """Return a change, its texts cut off at their limits.

    Args:
        by: Who makes it.
        at_s: Seconds since 1970.
        action: Past participle, such as "paused".
        reason: Reason that somebody gave; empty for none.
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
