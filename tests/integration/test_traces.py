"""A batch's trace through two services, from its records in Kafka to their update."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from common.runtime.traces import TRACED_SHARE
from common.telemetry.tracing import is_sampled, trace_of
from tests.collector import Collector, Received
from tests.integration.cluster import Cluster, await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.config.settings import Settings

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

# 3,000 batches, so that some of them are certain to be traced.
RECORDS = 24_000
SPANS = {"batch", "batch.read", "batch.announce", "batch.wait", "batch.gradient", "batch.apply"}
OF_A_WORKER = {"batch.read", "batch.announce", "batch.gradient"}
# All processes use the clock of this machine, but Kafka's arrival times are in whole milliseconds.
TICK_S = 0.002


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def test_trace_leads_from_a_record_to_its_update(
    embedded: Settings, collector: Collector, tmp_path: Path
) -> None:
    # batch        ├─────────────────────────────────────────────────────┤
    # read         ├────────┤
    # announce              ├────┤
    # wait                    ├───────────┤
    # gradient                             ├─────────────┤
    # apply                                                ├─────────────┤
    settings = embedded.model_copy(update={"traces": collector.url})
    cluster = Cluster(settings, tmp_path, "traced", RECORDS)
    try:
        for name in ("c1", "w1", "w2"):
            cluster.start("coordinator" if name == "c1" else "worker", name)
        cluster.produce(RECORDS)
        await_condition(cluster.drained, "everything is settled")
        audit = cluster.audit()
        batches = [batch for update in audit.updates for batch in update.batches]
        all_traces = {trace_of(cluster.job, batch.address): batch for batch in batches}
        expected = {
            trace: batch for trace, batch in all_traces.items() if is_sampled(trace, TRACED_SHARE)
        }
        assert expected
        ids = {trace.trace_id for trace in expected}

        def whole() -> set[int]:
            """Return ids of the traces that have all their spans."""
            names = dict[int, set[str]]()
            for span in tuple(collector.spans):
                names.setdefault(span.trace_id, set()).add(span.name)
            return {trace_id for trace_id, found in names.items() if found >= SPANS}

        await_condition(lambda: whole() == ids, "each trace is complete")
        for name in ("w1", "w2", "c1"):
            cluster.stop(name)
    finally:
        cluster.close()

    collected = tuple(collector.spans)
    for trace, batch in expected.items():
        spans = [span for span in collected if span.trace_id == trace.trace_id]
        (root,) = [span for span in spans if span.parent_id == 0]
        assert (root.name, root.span_id) == ("batch", trace.root_id)
        assert {span.parent_id for span in spans if span is not root} == {trace.root_id}
        assert root.attributes["doll.offset"] == batch.offset
        assert root.attributes["doll.worker"] == batch.worker
        assert root.attributes["doll.samples"] == batch.samples
        assert {span.service for span in spans} == {"doll-coordinator", "doll-worker"}
        assert {span.name for span in spans if span.service == "doll-worker"} == OF_A_WORKER
        in_order(spans)
    assert {span.trace_id for span in collected} == ids
    versions = {int(str(s.attributes["doll.version"])) for s in collected if not s.parent_id}
    assert versions <= {update.version for update in audit.updates}


def in_order(spans: list[Received]) -> None:
    """Check that a batch was read, announced, waited, computed and applied, in this order.

    The span of sending a gradient may end after that of applying it, because the leader is quick.
    """
    # A batch may have several gradients.
    first = dict[str, Received]()
    for span in sorted(spans, key=lambda span: span.start_s):
        assert span.start_s <= span.end_s
        first.setdefault(span.name, span)
    root, read, apply = first["batch"], first["batch.read"], first["batch.apply"]
    assert (root.start_s, root.end_s) == (read.start_s, apply.end_s)
    ascending = [
        read.start_s,
        first["batch.announce"].start_s,
        first["batch.wait"].start_s,
        first["batch.gradient"].start_s,
        apply.end_s,
    ]
    assert [late - early for early, late in pairwise(ascending) if late < early - TICK_S] == []
