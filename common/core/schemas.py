"""Schemas of records, as a registry has them: under ids that never name another one."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

SchemaKind: TypeAlias = Literal["AVRO", "PROTOBUF", "JSON"]


class Reference(msgspec.Struct, frozen=True):
    """A schema that another one uses types of."""

    name: str  # by which that one imports it
    text: str


class Schema(msgspec.Struct, frozen=True):
    """What a record's bytes mean."""

    kind: SchemaKind
    text: str
    references: tuple[Reference, ...] = ()  # each behind those that it uses


class SchemaFound(msgspec.Struct, frozen=True, tag="schema-found"):
    """What a registry had under an id when a worker of a job met it; of two, the first counts."""

    # In the four bytes before a record.
    id: Annotated[int, Meta(ge=0, lt=2**32)]
    schema: Schema
