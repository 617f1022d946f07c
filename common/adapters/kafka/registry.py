"""A schema registry of Confluent's API, such as Confluent's own, Karapace and Apicurio."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import httpx2
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError

from common.core.schemas import Reference, Schema, SchemaKind
from common.errors import UnavailableError, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka.schema_registry import Schema as Registered
    from confluent_kafka.schema_registry import SchemaReference

_TIMEOUT_S = 5.0
_NO_SCHEMA = 40403  # the registry's own words; a 404 of anybody else's means a wrong address
# A schema of Protobuf comes as a descriptor from registries that can give one, else as it is.
_FORMAT = "serialized"
_KINDS: dict[str, SchemaKind] = {kind: kind for kind in get_args(SchemaKind)}


class ConfluentRegistry:
    """Asks a registry.

    Args:
        properties: By the names that Confluent's clients have for them.

    Raises:
        UserError: If they make no sense.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._url = properties["url"]
        patience = {"timeout": _TIMEOUT_S, "max.retries": 0}  # whoever asks will ask again
        try:
            self._client = SchemaRegistryClient({**properties, **patience})
        except (OSError, TypeError, ValueError) as error:
            raise UserError(f"DOLL_SCHEMA_REGISTRY_*: {error}") from error

    def schema(self, number: int) -> Schema | None:
        """See the port."""
        try:
            found = self._client.get_schema(number, fmt=_FORMAT)
            kind, text = _KINDS[found.schema_type or "AVRO"], found.schema_str or ""
            return Schema(kind, text, tuple(self._references(found)))
        except SchemaRegistryError as error:
            if error.error_code == _NO_SCHEMA:
                return None
            raise self._unavailable(error) from error
        except (httpx2.HTTPError, OAuthTokenError, LookupError, TypeError, ValueError) as error:
            raise self._unavailable(error) from error

    def _references(self, schema: Registered) -> dict[Reference, None]:
        """What it uses, each behind what that uses, once."""
        found = dict[Reference, None]()
        for each in schema.references or ():
            other = self._referenced(each)
            found |= self._references(other)
            found[Reference(each.name or "", other.schema_str or "")] = None
        return found

    def _referenced(self, reference: SchemaReference) -> Registered:
        subject, version = reference.subject or "", reference.version or 1
        return self._client.get_version(subject, version, fmt=_FORMAT).schema

    def _unavailable(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"the schema registry at {self._url}: {error or type(error).__name__}"
        )
