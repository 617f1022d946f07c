"""A schema registry of Confluent's API, such as Confluent's own, Karapace and Apicurio."""

from __future__ import annotations

import asyncio
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import monotonic
from typing import TYPE_CHECKING, Annotated, TypeAlias
from urllib.parse import quote

import httpx2
import msgspec
from confluent_kafka.schema_registry import SchemaRegistryClient

from common.core.liveness import REGISTRY_LATE, REGISTRY_REFUSES, REGISTRY_UNREACHABLE, WAITING
from common.core.schemas import Reference, Schema, SchemaKind
from common.errors import SchemaAwayError, UserError, WireError
from common.http.client import BoundedClient, decoded

if TYPE_CHECKING:
    from collections.abc import Mapping

_Place: TypeAlias = tuple[str, int]  # a subject and a version

# A caller repeats its question after this time, because a registry that was restarted never answers
# an old one. An answer to an old question counts nevertheless until `ANSWER_S`.
REPEAT_S = 2.5
ANSWER_S = 30.0
MOST_REFERENCES = 100
DEEPEST_REFERENCE = 20
SCHEMA_CHARACTERS = 500_000  # with its references: a record of the schemas topic holds them all
_NO_SCHEMA = 40403  # the registry's own code; any other 404 means a wrong address
_REFUSED = (401, 403)
_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"
# Registries that can, return a Protobuf schema as a descriptor; others return it as it is.
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
    """Client of a registry; may be shared between threads.

    Args:
        properties: By the names that Confluent's clients have for them.

    Raises:
        UserError: If they make no sense.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = properties
        try:  # Confluent's client checks the properties, and loads the certificates.
            client = SchemaRegistryClient(dict(properties))._rest_client  # noqa: SLF001 -- sends no request
            self._http = BoundedClient(
                ANSWER_S, verify=client.verify, auth=client.auth, proxy=client.proxy
            )
        except (OSError, TypeError, ValueError) as error:
            raise UserError(f"DOLL_SCHEMA_REGISTRY_*: {error}") from error
        self._urls = client.base_urls
        self._first = 0  # index of the URL to try first
        self._token, self._token_until = properties.get("bearer.auth.token", ""), float("inf")
        if properties.get("bearer.auth.credentials.source") == "OAUTHBEARER":
            self._token_until = float("-inf")
        # Questions that were not answered within `REPEAT_S`, by the schema's id.
        self._late = dict[int, Future[Schema | None]]()

    def schema(self, number: int) -> Schema | None:
        """See the port."""
        asked = [self._http.submit(self._schema(number))]
        if (late := self._late.pop(number, None)) is not None:
            asked.insert(0, late)
        done, open_ = wait(asked, REPEAT_S, FIRST_COMPLETED)
        keeps = None if done else asked[0]
        for each in open_:
            if each is not keeps:
                each.cancel()
        if keeps is not None:
            self._late[number] = keeps
            self._first += 1
            raise self._away(REGISTRY_LATE, f"no answer in {REPEAT_S:g} s")
        return min(done, key=lambda each: each.exception() is not None).result()

    async def _schema(self, number: int) -> Schema | None:
        references = dict[Reference, None]()
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._get(f"schemas/ids/{number}")
                if found is None:
                    return None
                await self._add_references(found, (), {}, references)
        except TimeoutError as error:
            raise self._away(REGISTRY_LATE, f"no answer in {ANSWER_S:g} s") from error
        size = len(found.schema) + sum(len(each.text) for each in references)
        if size > SCHEMA_CHARACTERS:
            raise self._away(
                WAITING, f"schema {number} has more than {SCHEMA_CHARACTERS:,} letters"
            )
        return Schema(found.schema_type or "AVRO", found.schema, tuple(references))

    async def _add_references(
        self,
        schema: _Registered,
        above: tuple[_Place, ...],
        known: dict[_Place, _Registered],
        references: dict[Reference, None],
    ) -> None:
        """Add what a schema uses, each behind what that uses, once.

        Args:
            schema: The schema.
            above: The references that lead to it.
            known: All references that were read, by subject and version.
            references: What is added to.
        """
        for each in schema.references or ():
            place = each.subject, each.version
            if place in above or len(above) >= DEEPEST_REFERENCE or len(known) > MOST_REFERENCES:
                raise self._away(WAITING, f"the references of {place} form a loop, or are too many")
            if place not in known:
                path = f"subjects/{quote(each.subject, safe='')}/versions/{each.version}"
                other = await self._get(path)
                if other is None:
                    raise self._away(WAITING, f"{path} does not exist")
                known[place] = other
                await self._add_references(other, (*above, place), known, references)
            references[Reference(each.name, known[place].schema)] = None

    async def _get(self, path: str) -> _Registered | None:
        """Ask each URL until one answers.

        Raises:
            SchemaAwayError: If none does, or the answer makes no sense.
        """
        trouble = self._away(REGISTRY_UNREACHABLE, "no URL")
        for _ in self._urls:
            url = self._urls[self._first % len(self._urls)]
            try:
                headers = {"Accept": _ACCEPT, **await self._credentials()}
                status, body = await self._http.answer(
                    "GET", f"{url}/{path}", params=_FORMAT, headers=headers
                )
                if status == 200:
                    return decoded(_REGISTERED, body)
                refusal = _Refusal() if status in _REFUSED else decoded(_REFUSAL, body)
            except httpx2.TimeoutException as error:
                trouble = self._away(REGISTRY_LATE, error)
            except (httpx2.TransportError, httpx2.InvalidURL) as error:
                trouble = self._away(REGISTRY_UNREACHABLE, error)
            except (httpx2.HTTPError, WireError) as error:
                trouble = self._away(WAITING, f"{path}: {error}")
            else:
                if refusal.error_code == _NO_SCHEMA:
                    return None
                told = f"{path}: status {status} {refusal.message[:300]}"
                trouble = self._away(REGISTRY_REFUSES if status in _REFUSED else WAITING, told)
            self._first += 1
        raise trouble

    async def _credentials(self) -> dict[str, str]:
        """Return the headers of a bearer token, which is renewed if it is about to expire."""
        if "bearer.auth.credentials.source" not in self._properties:
            return {}
        if monotonic() >= self._token_until:
            names = ("client.id", "client.secret", "scope", "issuer.endpoint.url")
            user, secret, scope, url = (self._properties[f"bearer.auth.{name}"] for name in names)
            form = {"grant_type": "client_credentials", "scope": scope}
            status, body = await self._http.answer("POST", url, data=form, auth=(user, secret))
            if status != 200:
                raise httpx2.ConnectError(f"{url} gives no token: status {status}")
            token = decoded(_TOKEN, body)
            self._token, self._token_until = (
                token.access_token,
                monotonic() + 0.8 * token.expires_in,
            )
        headers = {
            "Authorization": f"Bearer {self._token}",
            "target-sr-cluster": self._properties.get("bearer.auth.logical.cluster"),
            "Confluent-Identity-Pool-Id": self._properties.get("bearer.auth.identity.pool.id"),
        }
        return {name: value for name, value in headers.items() if value}

    def _away(self, status: str, why: object) -> SchemaAwayError:
        return SchemaAwayError(f"the schema registry at {self._properties['url']}: {why}", status)
