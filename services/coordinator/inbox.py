"""A job's inbox: the queue that other threads fill, and the topics that its actor reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from common.core import events
from common.core.messages import Gradient, Reply
from common.core.vectors import numbers_in
from common.errors import UnavailableError
from services.coordinator.tails import TopicTail

if TYPE_CHECKING:
    from common.telemetry.outages import Outage
    from services.coordinator.replies import SoundReplies

T = TypeVar("T")

# Adding a gradient up to this size takes less time than waking the actor for it. Larger gradients
# are added while others are computed.
SMALL_BYTES = 64 << 10

# An event, an answer that the actor turns into events, or a server's error.
InboxItem: TypeAlias = (
    "events.CoordinatorEvent | Callable[[], Iterable[events.CoordinatorEvent]] | Exception"
)
# The first number is the leadership that the item is meant for.
_Delivered: TypeAlias = "tuple[int, InboxItem | list[Reply]]"


class CoordinatorInbox:
    """Events for one job's actor, from any thread.

    Attributes:
        leadership: Number of the current leadership. Items for another leadership are dropped,
            except those for leadership 0, which are for every role.
        sound: Rejects malformed replies. If None, all replies are dropped.
        tails: Topics of the job that the actor reads on.

    Args:
        wake: Makes the actor take its next turn soon.
        outage: Notes whether Redis answers.
    """

    def __init__(self, wake: Callable[[], None], outage: Outage) -> None:
        self.wake = wake
        self.leadership = 0
        self.sound: SoundReplies | None = None
        self.tails = list[TopicTail]()
        self.outage = outage
        self._queue = deque[_Delivered]()
        # Number of outstanding batches that must arrive before their gradients wake the actor,
        # which then reads everything else, too. If 0, every item wakes it.
        self._awaited = 0
        # Batches whose gradients arrived (counted by the reply thread) and were read (by the
        # actor).
        self._came = self._read = 0

    def put(self, leadership: int, news: InboxItem, *, wakes: bool = True) -> None:
        """Deliver an event, an answer or an error.

        Args:
            leadership: Leadership that the item is meant for. If 0, it counts in every role.
            news: The item.
            wakes: False if the item can wait for the actor's next turn.
        """
        self._queue.append((leadership, news))
        if wakes:
            self.wake()

    def put_replies(self, leadership: int, replies: list[Reply]) -> None:
        """Deliver workers' replies."""
        self._queue.append((leadership, replies))
        self._came += _batches_of(replies)
        some_are_to_come = self._came - self._read < self._awaited
        if not (some_are_to_come and all(map(_can_wait, replies))):
            self.wake()

    def answer(
        self,
        judge: Callable[[T], Iterable[events.CoordinatorEvent]],
        *,
        any_role: bool = False,
        wakes: Callable[[T], bool] = lambda _: True,
    ) -> Callable[[T | Exception], None]:
        """Return a callback for an answer of the exchange.

        Args:
            judge: Makes events from the answer, in the actor's turn.
            any_role: True if the answer counts in every role, False if only in this leadership.
            wakes: Returns True if an answer should wake the actor. Most answers repeat an earlier
                one.
        """
        leadership = 0 if any_role else self.leadership

        def deliver(answer: T | Exception) -> None:
            if isinstance(answer, Exception):
                self.put(leadership, answer)
            else:
                self.put(leadership, partial(judge, answer), wakes=wakes(answer))

        return deliver

    def wake_for_records(self) -> None:
        """Wake the actor for new records, unless it waits for gradients and reads them then."""
        if not self._awaited:
            self.wake()

    def await_gradients(self, batches: int) -> bool:
        """Wake the actor once gradients of this many batches have arrived; see `Leader.awaited`.

        Returns:
            True if enough arrived while the actor was not woken, so that it should read at once.
        """
        before, self._awaited = self._awaited, batches
        return before > 0 and self._came - self._read >= batches

    def read(self) -> Iterator[events.CoordinatorEvent]:
        """Return everything that counts for this leadership.

        Raises:
            Exception: If another thread delivered an error other than an outage.
        """
        replies = list[tuple[int, Reply]]()
        while self._queue:
            leadership, news = self._queue.popleft()
            if isinstance(news, list):
                self._read += _batches_of(news)
                replies += ((leadership, reply) for reply in news)
            elif leadership in {0, self.leadership}:
                yield from self._events(news)
        number, sound = self.leadership, self.sound
        if replies and sound is not None:
            own = [sound(reply) for leadership, reply in replies if leadership == number]
            if kept := tuple(reply for reply in own if reply is not None):
                yield events.RepliesRead(kept)
        for tail in tuple(self.tails):
            for event in tail.read() if number == self.leadership else ():
                if number == self.leadership:
                    yield event

    def _events(self, news: InboxItem) -> Iterable[events.CoordinatorEvent]:
        if isinstance(news, UnavailableError):
            self.outage.met(news)
            return ()
        if isinstance(news, Exception):
            raise news
        if callable(news):
            self.outage.quiet()
            return news()
        return (news,)

    def end_leadership(self) -> None:
        """Make `read` drop everything delivered for this leadership, and close its topics."""
        self.leadership += 1
        self.sound = None
        self.close_tails()

    def close_tails(self) -> None:
        """Stop reading the job's topics."""
        for tail in self.tails:
            tail.close()
        self.tails = []


def _batches_of(replies: Iterable[Reply]) -> int:
    return sum(len(reply.batches) for reply in replies if isinstance(reply, Gradient))


def _can_wait(reply: Reply) -> bool:
    """Return True if a reply is a gradient so small that it is quickly added with the others."""
    if not isinstance(reply, Gradient):
        return False
    return reply.vector is None or numbers_in(reply.vector).nbytes <= SMALL_BYTES
