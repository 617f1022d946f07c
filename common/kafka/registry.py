"""A schema registry of Confluent's API, such as Confluent's own, Karapace and Apicurio."""

from __future__ import annotations

import asyncio
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import monotonic
from typing import TYPE_CHECKING, Annotated, TypeAlias
from urllib.parse import quote

import msgspec
from confluent_kafka.schema_registry import SchemaRegistryClient

from common.core.messages import Reference, Schema, SchemaKind
from common.errors import LateError, RefusedError, UnavailableError, UserError, decoded
from common.http.client import BoundedClient

if TYPE_CHECKING:
    from collections.abc import Mapping

_Place: TypeAlias = tuple[str, int]  # a subject and a version

# A caller repeats its request after this time, because a restarted registry never answers an old
# one. An answer to an old request still counts until `ANSWER_S`.
REPEAT_S = 2.5
ANSWER_S = 30.0
MOST_REFERENCES = 100
DEEPEST_REFERENCE = 20
# Limit with all references, because one record of the schemas topic holds them all.
SCHEMA_CHARACTERS = 500_000
# The registry's own code for a missing schema. A 404 without it means a wrong address.
_NO_SCHEMA = 40403
_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"
# Some registries return a Protobuf schema as a descriptor; others return it unchanged.
_FORMAT = {"format": "serialized"}


class _Reference(msgspec.Struct, frozen=True):
    name: str
    subject: str
    version: Annotated[int, msgspec.Meta(ge=1)]


class _Registered(msgspec.Struct, frozen=True, rename="camel"):
    schema: str
    schema_type: SchemaKind | None = None
    references: list[_Reference] | None = None


class _Refusal(msgspec.Struct, frozen=True):
    error_code: int = 0
    message: str = ""


class _Token(msgspec.Struct, frozen=True):
    access_token: str
    expires_in: float = 300.0


_REGISTERED = msgspec.json.Decoder(_Registered)
_REFUSAL = msgspec.json.Decoder(_Refusal)
_TOKEN = msgspec.json.Decoder(_Token)


class ConfluentRegistry:
    """Client of a registry. Safe to use from several threads.

    Args:
        properties: Properties by the names in Confluent's clients.

    Raises:
        UserError: If the properties make no sense.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = properties
        self._name = f"the schema registry at {properties['url']}"
        # Confluent's client checks the properties and loads the certificates.
        try:
            client = SchemaRegistryClient(dict(properties))._rest_client  # noqa: SLF001 -- sends no request
        except (OSError, TypeError, ValueError) as error:
            raise UserError(f"DOLL_SCHEMA_REGISTRY_*: {error}") from error
        self._http = BoundedClient(
            self._name, ANSWER_S, verify=client.verify, auth=client.auth, proxy=client.proxy
        )
        self._urls = client.base_urls
        # Index of the URL to try first.
        self._first = 0
        fetches = properties.get("bearer.auth.credentials.source") == "OAUTHBEARER"
        self._token = properties.get("bearer.auth.token", "")
        self._token_until = float("-inf" if fetches else "inf")
        # Requests that were not answered within `REPEAT_S`, by the schema's id.
        self._late = dict[int, Future[Schema | None]]()

    def schema(self, number: int) -> Schema | None:
        """See the port."""
        late = [self._late.pop(number)] if number in self._late else []
        asked = [*late, self._http.submit(self._schema(number))]
        done, _ = wait(asked, REPEAT_S, FIRST_COMPLETED)
        for each in asked if done else asked[1:]:
            each.cancel()
        if done:
            return min(done, key=lambda each: each.exception() is not None).result()
        self._late[number] = asked[0]
        self._first += 1
        raise LateError(f"{self._name} did not answer in {REPEAT_S:g} s")

    async def _schema(self, number: int) -> Schema | None:
        references = dict[Reference, None]()
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._get(f"schemas/ids/{number}")
                if found is None:
                    return None
                await self._add_references(found, (), {}, references)
        except TimeoutError as error:
            raise LateError(f"{self._name} did not answer in {ANSWER_S:g} s") from error
        if len(found.schema) + sum(len(each.text) for each in references) > SCHEMA_CHARACTERS:
            raise self._odd(f"schema {number} has more than {SCHEMA_CHARACTERS:,} characters")
        return Schema(found.schema_type or "AVRO", found.schema, tuple(references))

    async def _add_references(
        self,
        schema: _Registered,
        above: tuple[_Place, ...],
        known: dict[_Place, _Registered],
        references: dict[Reference, None],
    ) -> None:
        """Add a schema's references, each once and after its own references.

        Args:
            schema: The schema.
            above: The references that lead to it.
            known: All references that were read, by subject and version.
            references: The collected references.
        """
        for each in schema.references or ():
            place = each.subject, each.version
            if place in above or len(above) >= DEEPEST_REFERENCE or len(known) > MOST_REFERENCES:
                raise self._odd(f"the references of schema {place} form a loop or are too many")
            if place not in known:
                path = f"subjects/{quote(each.subject, safe='')}/versions/{each.version}"
                other = await self._get(path)
                if other is None:
                    raise self._odd(f"{path} does not exist")
                known[place] = other
                await self._add_references(other, (*above, place), known, references)
            references[Reference(each.name, known[place].schema)] = None

    async def _get(self, path: str) -> _Registered | None:
        """Try each URL until one answers; None if the registry has no such schema.

        Raises:
            UnavailableError: If no URL answers, or the answer makes no sense.
        """
        headers = {"Accept": _ACCEPT, **await self._credentials()}
        for left in reversed(range(len(self._urls))):
            url = f"{self._urls[self._first % len(self._urls)]}/{path}"
            try:
                status, body = await self._http.answer("GET", url, params=_FORMAT, headers=headers)
            except UnavailableError:
                self._first += 1
                if not left:
                    raise
            else:
                break
        if status in (401, 403):
            raise RefusedError(f"{self._name} denies access to {path}: status {status}")
        what = f"{self._name}: {path}: status {status}"
        if status == 200:
            return decoded(_REGISTERED.decode, body, what, UnavailableError)
        refusal = decoded(_REFUSAL.decode, body, what, UnavailableError)
        if refusal.error_code == _NO_SCHEMA:
            return None
        self._first += 1
        raise self._odd(f"{path}: status {status}: {refusal.message[:300]}")

    async def _credentials(self) -> dict[str, str]:
        """Return the headers of a bearer token, which is renewed if it is about to expire."""
        bearer = {
            name.removeprefix("bearer.auth."): value for name, value in self._properties.items()
        }
        if "credentials.source" not in bearer:
            return {}
        if monotonic() >= self._token_until:
            form = {"grant_type": "client_credentials", "scope": bearer["scope"]}
            auth = bearer["client.id"], bearer["client.secret"]
            url = bearer["issuer.endpoint.url"]
            status, body = await self._http.answer("POST", url, data=form, auth=auth)
            if status != 200:
                raise RefusedError(f"{url} returned no token: status {status}")
            what = f"{self._name}: {url} returned no token"
            token = decoded(_TOKEN.decode, body, what, UnavailableError)
            self._token = token.access_token
            self._token_until = monotonic() + 0.8 * token.expires_in
        headers = {
            "Authorization": f"Bearer {self._token}",
            "target-sr-cluster": bearer.get("logical.cluster", ""),
            "Confluent-Identity-Pool-Id": bearer.get("identity.pool.id", ""),
        }
        return {name: value for name, value in headers.items() if value}

    def _odd(self, why: str) -> UnavailableError:
        return UnavailableError(f"{self._name}: {why}")
