"""Streams whose logs changed: new generations, and the batches that waited."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common.core import commands as do
from common.core import events
from common.core.events import StreamsSeen
from common.core.losses import Divergence
from common.core.messages import Failed, Opened, Quarantined, Requeued
from common.core.spans import LogPosition, Span
from tests.unit.core.bench import QUIET, Bench, changed
from tests.unit.core.examples import A, B, P, Q, answer, of_kind, ready, the

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.core.commands import CoordinatorCommand
    from common.core.messages import ReadFrom
    from common.core.settings import CoordinatorSettings

NEW = 99  # generation
CUT = Divergence(0, LogPosition(15, "id", 2), 40, recreated=False)
ANEW = Divergence(0, LogPosition(0, "other", -1), 7, recreated=True)


def of(generation: int, start: int, end: int) -> Span:
    """Return a span of P in a generation."""
    return Span(*P, start, end, generation, known=end)


def seen(
    diverged: Divergence | None = None, *, sure: bool = True, control_end: int = 0
) -> StreamsSeen:
    """Return the event of one poll of the streams."""
    lost = {} if diverged is None else {P: diverged}
    return StreamsSeen({P: "id", Q: "id"}, NEW, lost, sure, control_end)


def leading(settings: CoordinatorSettings = QUIET) -> Bench:
    """Return a leader that sees A and B."""
    bench = Bench(settings)
    bench.lead()
    bench.see(A, B)
    return bench


def expired(commands: Iterable[CoordinatorCommand]) -> list[int]:
    """Return the offsets of all quarantined batches, and check that each of them expired."""
    records = [command.record for command in of_kind(commands, do.AppendAudit)]
    assert all(isinstance(record, Quarantined) and record.expired for record in records)
    return [record.batch.offset for record in records if isinstance(record, Quarantined)]


def resumed(read_from: ReadFrom = "") -> Bench:
    """Return a leader that was resumed after a loss."""
    bench = Bench()
    bench.feed(events.WantedChanged("running", after_loss=1, read_from=read_from))
    bench.lead()
    return bench


@pytest.mark.parametrize(
    ("diverged", "said"),
    [
        (
            CUT,
            (
                "s[0] lost records that Kafka had acknowledged: it was read up to offset 20, but"
                " its log is another one from offset 15 on; `doll job resume --after-loss`"
                " continues where the logs diverge: 5 records are lost, 0 of them were trained, 5"
                " expire"
            ),
        ),
        (
            ANEW,
            (
                "the topic s was deleted and recreated; `doll job resume --from earliest` reads the"
                " new topic from its beginning (`--from latest`: only records that arrive from then"
                " on); 20 records of the old topic that wait to be trained expire"
            ),
        ),
    ],
)
def test_changed_log_holds_the_job_with_a_remedy(diverged: Divergence, said: str) -> None:
    bench = leading(changed(group_size=9))
    bench.read_control(ready(A, of(0, 0, 10)), ready(A, of(0, 10, 20)))
    commands = bench.feed(seen(diverged))
    assert the(commands, do.Hold).reason == said
    assert of_kind(commands, do.StepDown)
    assert of_kind(commands, do.OpenPartition) == []


@pytest.mark.parametrize(
    ("read_from", "diverged", "opened"),
    [
        ("", CUT, Opened(P, 0, NEW, "id", 15, 2)),
        ("earliest", CUT, Opened(P, 0, NEW, "id", 15, 2)),
        ("earliest", ANEW, Opened(P, 0, NEW, "other", 0, -1)),
        ("latest", ANEW, Opened(P, 0, NEW, "other", 7, -1)),
        ("", ANEW, None),
    ],
)
def test_resumed_leader_opens_streams_that_its_first_comparison_finds_lost(
    read_from: ReadFrom, diverged: Divergence, opened: Opened | None
) -> None:
    bench = resumed(read_from)
    bench.read_control(ready(A, of(0, 0, 20)))
    # Brokers cannot say yet if records are lost.
    bench.feed(seen(sure=False))
    commands = bench.feed(seen(diverged))
    assert bool(of_kind(commands, do.Hold)) == (opened is None)
    records = [command.record for command in of_kind(commands, do.OpenPartition)]
    assert records == ([] if opened is None else [opened])


def test_resume_request_covers_only_the_first_finding() -> None:
    bench = resumed()
    bench.feed(seen())
    assert of_kind(bench.feed(seen(CUT)), do.Hold)


def test_leader_that_has_not_read_all_claims_compares_no_stream() -> None:
    # control    0: claim   1: opened, which the leader has not read at the first poll
    bench = leading()
    opened = Opened(P, 0, NEW, "id", 15, 2)
    assert bench.feed(seen(CUT, control_end=2)) == ()
    bench.read_control(ready(A, of(0, 0, 20)), opened)
    assert of_kind(bench.feed(seen(CUT, control_end=2)), do.Hold) == []


def test_batch_with_lost_records_expires_while_it_waits() -> None:
    # K = 2      0 P 0:10   1 P 10:20   2 P 20:30    opened at 5   4 P 5:15 of the next generation
    #            round: 0 and 1; batch 2 waits
    bench = leading()
    bench.see(A)
    bench.read_control(ready(A, of(0, 0, 10)), ready(A, of(0, 10, 20)), ready(A, of(0, 20, 30)))
    assert [batch.offset for order in bench.orders for batch in order.batches] == [0, 1]
    commands = bench.read_control(Opened(P, 0, NEW, "id", 5, 2))
    assert expired(commands) == [0, 1, 2]
    assert bench.leader_status.waiting == 0

    bench.read_control(ready(A, of(NEW, 5, 15)), ready(A, of(NEW, 15, 25)))
    assert [batch.offset for order in bench.orders for batch in order.batches] == [4, 5]


def test_batch_with_lost_records_and_gradient_expires_only_when_put_back() -> None:
    bench = leading()
    bench.see(A, B)
    bench.read_control(ready(A, of(0, 0, 10)), ready(B, of(0, 10, 20)))
    first = next(order for order in bench.orders if order.worker == A)
    bench.feed(events.RepliesRead((answer(first, bench.model),)))
    commands = bench.read_control(Opened(P, 0, NEW, "id", 5, 2))
    assert expired(commands) == [1]

    commands = bench.feed(events.WantedChanged("stopped"))
    assert expired(commands) == [0]


def test_new_leader_expires_batches_lost_before_it() -> None:
    # control    0: in the round, with its gradient   1   2: opened at 5   the leader dies
    settings = replace(QUIET, hot_every_s=1.0)
    bench = leading(settings)
    bench.read_control(ready(A, of(0, 0, 10)), ready(B, of(0, 10, 20)))
    first = next(order for order in bench.orders if order.worker == A)
    bench.feed(events.RepliesRead((answer(first, bench.model),)))
    bench.read_control(Opened(P, 0, NEW, "id", 5, 2))
    bench.read_updates()
    bench.tick(bench.now + 1.0)
    snapshot = bench.published[-1]
    assert [batch.offset for batch in snapshot.waiting] == [0]

    later = Bench(settings, updates=bench.updates, control=bench.control, name="c2")
    assert expired(later.lead(snapshot)) == [0]
    later.read_control()
    assert later.leader_status.waiting == 0


def test_requeued_batch_with_lost_records_expires() -> None:
    bench = leading(changed(group_size=1, max_failures=0))
    bench.see(A)
    bench.read_control(ready(A, of(0, 0, 10)))
    (order,) = bench.orders
    failed = Failed(A, bench.model, (0,), "raised", "no")
    bench.feed(events.RepliesRead((failed,)))
    bench.read_control(Opened(P, 0, NEW, "id", 5, 2))
    bench.read_updates()
    bench.updates.append(Requeued(order.batches[0], "operator", 0.0))
    commands = bench.read_updates()
    assert expired(commands) == [0]
    assert of_kind(commands, do.PostTrigger) == []
