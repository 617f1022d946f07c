"""All readers of a job's records use the same schemas, even if the registry's answers change."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.messages import Reference, Schema, SchemaFound
from common.core.spans import Partition
from common.errors import UnavailableError, UnknownTopicError
from common.kafka.memory import MemoryLog
from common.kafka.names import schemas_topic
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded
from common.kafka.schemas import JobSchemas
from common.wire.messages import decode_schema, encode_schema

if TYPE_CHECKING:
    from collections.abc import Callable

JOB = "job"


class Registry:
    """A registry that may be down, may lack a schema, and may be replaced by another one."""

    def __init__(self) -> None:
        self.schemas: dict[int, Schema] | None = {}  # None: unavailable
        self.asked = 0
        # Runs before the answer is used.
        self.between: Callable[[], None] = lambda: None

    def schema(self, number: int) -> Schema | None:
        """See the port.

        Raises:
            UnavailableError: If the registry is down.
        """
        self.asked += 1
        if self.schemas is None:
            raise UnavailableError("the registry is away")
        answer = self.schemas.get(number)
        self.between()
        return answer


def avro(text: str) -> Schema:
    return Schema("AVRO", text, (Reference("a", "b"),))


def written(log: MemoryLog) -> list[tuple[int, SchemaFound | None]]:
    try:
        return read_decoded(log, schemas_topic(JOB), decode_schema)
    except UnknownTopicError:
        return []


def test_schema_is_requested_once_and_then_read_from_the_topic() -> None:
    log, registry = MemoryLog(), Registry()
    registry.schemas = {7: avro("one")}
    assert JobSchemas(log, JOB, registry).get(7) == avro("one")
    registry.schemas = None
    assert JobSchemas(log, JOB, registry).get(7) == avro("one")
    assert JobSchemas(log, JOB, None).get(7) == avro("one")
    assert registry.asked == 1
    assert written(log) == [(0, SchemaFound(7, avro("one")))]


def test_first_of_two_schemas_written_for_an_id_counts() -> None:
    """The second worker freezes with the answer of a registry that is replaced meanwhile."""
    log, registry = MemoryLog(), Registry()
    first, second = JobSchemas(log, JOB, registry), JobSchemas(log, JOB, registry)
    registry.schemas = {7: avro("old")}

    def meanwhile() -> None:
        registry.between = lambda: None
        registry.schemas = {7: avro("new")}
        assert first.get(7) == avro("new")

    registry.between = meanwhile
    assert second.get(7) == avro("new")
    assert [found and found.schema for _, found in written(log)] == [avro("new"), avro("old")]
    assert JobSchemas(log, JOB, None).get(7) == avro("new")


def test_unknown_schema_id_is_requested_again() -> None:
    log, registry = MemoryLog(), Registry()
    schemas = JobSchemas(log, JOB, registry)
    assert schemas.get(7) is None
    registry.schemas = {7: avro("late")}
    assert schemas.get(7) == avro("late")


def test_missing_schema_raises_while_registry_is_unavailable() -> None:
    log, registry = MemoryLog(), Registry()
    registry.schemas = None
    with pytest.raises(UnavailableError, match="the registry is away"):
        JobSchemas(log, JOB, registry).get(7)
    with pytest.raises(UnavailableError, match="set DOLL_SCHEMA_REGISTRY_URL"):
        JobSchemas(log, JOB, None).get(7)


def test_invalid_schema_records_are_skipped() -> None:
    log = MemoryLog()
    log.create_topics([NewTopic(schemas_topic(JOB), kept_forever=True)])
    writer = log.writer()
    good = encode_schema(SchemaFound(1, avro("good")))
    for value in (None, b"{", good.replace(b'"id":1', b'"id":-1'), good):
        writer.append(schemas_topic(JOB), value)
    assert JobSchemas(log, JOB, None).get(1) == avro("good")


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # worker
        st.sampled_from(["get", "restarted", "fails", "returns", "replaced", "outdated"]),
        st.integers(1, 2),  # id
    ),
    max_size=25,
)


@given(steps=STEPS)
def test_all_workers_use_the_schema_of_the_topic(
    steps: list[tuple[int, str, int]],
) -> None:
    """Workers are killed and restarted; the registry fails, returns, and is replaced."""
    log, registry, build = MemoryLog(), Registry(), 0
    registry.schemas = saved = {1: avro("0"), 2: avro("0")}
    workers = [JobSchemas(log, JOB, registry) for _ in range(3)]
    used = dict[int, Schema]()
    for who, step, number in steps:
        if step in {"get", "outdated"}:
            # Another schema is written while the worker has an answer, which it then writes.
            if step == "outdated":

                def meanwhile(number: int = number, who: int = who) -> None:
                    registry.between = lambda: None
                    registry.schemas = saved = {1: avro("outdated"), 2: avro("outdated")}
                    assert saved
                    workers[who - 1].get(number)

                registry.between = meanwhile
            with suppress(UnavailableError):
                schema = workers[who].get(number)
                assert schema is not None
                # All workers use the first schema that was written for the id.
                first = next(f for _, f in written(log) if f is not None and f.id == number)
                assert schema == used.setdefault(number, schema) == first.schema
            registry.between = lambda: None
        elif step == "restarted":
            workers[who] = JobSchemas(log, JOB, registry)
        elif step == "replaced":
            build += 1
            registry.schemas = saved = {1: avro(str(build)), 2: avro(str(build))}
        else:
            registry.schemas = saved if step == "returns" else None


def test_threads_may_share_job_schemas() -> None:
    log, registry = MemoryLog(), Registry()
    registry.schemas = {number: avro(str(number)) for number in range(20)}
    schemas, wrong = JobSchemas(log, JOB, registry), list[int]()

    def ask() -> None:
        wrong.extend(number for number in range(20) if schemas.get(number) != avro(str(number)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert log.bounds(Partition(schemas_topic(JOB), 0)).end == 20
