"""A call that hangs keeps its turn, and no other call waits longer than its limit."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from common.errors import UnavailableError
from services.admin.limiter import Limiter


def test_caller_of_hanging_work_gets_an_error_and_turns_resume_afterwards() -> None:
    going_on, begun = threading.Event(), list[int]()

    def hang(number: int) -> int:
        begun.append(number)
        going_on.wait()
        return number

    async def scenario() -> None:
        turns = Limiter("a test", 1, 0.2)
        waiting = [turns.run(partial(hang, number)) for number in range(5)]
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, UnavailableError) for each in found)
        # All calls share one thread.
        assert begun == [0]
        going_on.set()
        assert await turns.run(partial(hang, 6)) == 6
        # The calls that timed out before they began are never made.
        assert begun == [0, 6]

    asyncio.run(scenario())


def test_error_of_the_work_is_raised_and_releases_the_turn() -> None:
    def fail() -> None:
        raise UnavailableError("Kafka is unavailable")

    async def scenario() -> None:
        turns = Limiter("a test", 1, 10.0)
        for _ in range(3):
            with pytest.raises(UnavailableError, match="Kafka is unavailable"):
                await turns.run(fail)

    asyncio.run(scenario())
