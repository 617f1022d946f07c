"""The ring of events has one copy of each event, for readers at different positions."""

from __future__ import annotations

import asyncio
import threading

from services.admin.live.feed import Feed


def test_feed_returns_events_since_a_position() -> None:
    feed = Feed("life")
    feed.publish("update", b'{"version":1}')
    feed.publish("update", b'{"version":2}')
    found = feed.since(1)
    assert found == (b'id: life-1\nevent: update\ndata: {"version":2}\n\n', 2)
    assert feed.since(2) == (b"", 2)


def test_reader_behind_the_ring_gets_none() -> None:
    feed = Feed("life", capacity=3)
    for number in range(5):
        feed.publish("update", b"%d" % number)
    assert feed.since(1) is None
    found = feed.since(2)
    assert found is not None
    assert found[0].count(b"event: update") == 3


def test_event_id_resumes_while_its_successor_is_in_the_ring() -> None:
    feed = Feed("life", capacity=3)
    for _ in range(5):
        feed.publish("update", b"{}")
    assert [feed.after(f"life-{number}") for number in range(6)] == [None, 2, 3, 4, 5, None]
    for strange in ("", "other-3", "life", "life-", "life-x", "life--1", "life-²", "x" * 10_000):
        assert feed.after(strange) is None


def test_publish_wakes_and_close_ends_readers_of_several_loops() -> None:
    feed, woken = Feed("life"), list[str]()
    listening = threading.Barrier(3)

    async def read() -> None:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        feed.listen(loop, news)
        await asyncio.to_thread(listening.wait, 10)
        async with asyncio.timeout(10):
            await news.wait()
            woken.append("event")
            news.clear()
            while not feed.closed:
                await news.wait()
        feed.unlisten(news)

    threads = [threading.Thread(target=asyncio.run, args=(read(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    listening.wait(120)
    assert feed.listeners == 2
    feed.publish("update", b"{}")
    feed.close()
    feed.publish("update", b"{}")  # without subscribers
    for thread in threads:
        thread.join(120)
    assert woken == ["event", "event"]
    assert (feed.listeners, feed.end) == (0, 1)


def test_closed_event_loop_is_forgotten() -> None:
    feed = Feed("life")

    async def come_and_go() -> None:
        feed.listen(asyncio.get_running_loop(), asyncio.Event())

    asyncio.run(come_and_go())
    feed.publish("update", b"{}")
    assert feed.listeners == 0
