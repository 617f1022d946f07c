"""A transactional producer.

Records it commits count once, records it aborts or leaves open never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from confluent_kafka import KafkaError, KafkaException, Producer

if TYPE_CHECKING:
    from common.core.spans import Partition
    from load.harness.producers import Producers

# Records of a transaction: several batches.
_RECORDS = 60
# Timeout of one attempt, because Kafka may be unavailable.
_CALL_S = 5.0
_PROPERTIES = {"transactional.id": "chaos", "log_level": 2}


class Transactions:
    """Writes one transaction after the other in a thread of its own, until the context ends.

    Args:
        bootstrap: Kafka's address.
        places: Partitions to write to.
        producers: Source of the next ids and of those already written.
    """

    def __init__(self, bootstrap: str, places: Sequence[Partition], producers: Producers) -> None:
        self._properties = {**_PROPERTIES, "bootstrap.servers": bootstrap}
        self._places = tuple(places)
        self._producers = producers
        self._open = list[bytes]()
        self._thread = ThreadPoolExecutor(1, "transactions")
        self._operations = list[Future[None]]()
        self._then(self._join)

    def begin(self) -> None:
        """Write new records. Readers stop in front of them."""
        self._then(lambda: self._write(self._producers.take(_RECORDS)))

    def commit(self) -> Future[None]:
        """Commit the open transaction."""
        return self._then(self._commit)

    def begin_again(self) -> None:
        """Write records that were written before. If they counted, they would count twice."""
        self._then(lambda: self._write(self._producers.again(_RECORDS)))

    def abort(self) -> Future[None]:
        """Abort the open transaction."""
        return self._then(self._abort)

    def abandon(self) -> Future[None]:
        """Crash with an open transaction. The successor with its transactional id aborts it."""
        return self._then(self._join)

    def await_all(self) -> None:
        """Wait until all requested operations are done.

        Raises:
            KafkaException: If Kafka refused one for good.
        """
        for operation in self._operations:
            operation.result()
        self._operations.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _join(self) -> None:
        self._producer = Producer(self._properties)
        self._persist(self._producer.init_transactions)

    def _write(self, values: list[bytes]) -> None:
        self._open = values
        self._producer.begin_transaction()
        for number, value in enumerate(values):
            stream, partition = self._places[number % len(self._places)]
            self._producer.produce(stream, value, partition=partition)

    def _commit(self) -> None:
        while True:
            try:
                self._persist(self._producer.commit_transaction)
            except KafkaException as raised:
                if raised.args[0].txn_requires_abort():
                    self._abort()
                elif _is_over(raised):
                    self._join()
                else:
                    raise
                self._write(self._open)
            else:
                return

    def _abort(self) -> None:
        try:
            self._persist(self._producer.abort_transaction)
        except KafkaException as raised:
            if not _is_over(raised):
                raise
            self._join()

    def _persist(self, call: Callable[[float], object]) -> None:
        """Retry a call until Kafka answers."""
        while True:
            try:
                call(_CALL_S)
            except KafkaException as raised:
                if not raised.args[0].retriable():
                    raise
            else:
                return

    def _then(self, do: Callable[[], None]) -> Future[None]:
        self._operations.append(self._thread.submit(do))
        return self._operations[-1]


def _is_over(raised: KafkaException) -> bool:
    """True if Kafka has no transaction that could end this way.

    The transaction was aborted meanwhile, or never reached Kafka. A repeated commit does not
    count, because it succeeds if the first one did.
    """
    return bool(raised.args[0].code() == KafkaError.INVALID_TXN_STATE)
