"""A batch's trace has the same ids and the same sampling decision in every process."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from common.config.settings import Settings
from common.core.messages import BatchReady, WorkerId
from common.core.spans import Span, address_of
from common.errors import UserError
from common.runtime.traces import open_tracer
from common.telemetry.tracing import BatchTrace, NoTracer, is_sampled, trace_of
from common.wire.messages import decode_claim, encode_claim

if TYPE_CHECKING:
    from common.core.spans import Address

names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
topics = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)
places = st.tuples(topics, st.integers(0, 1000))
lengths = st.tuples(st.integers(0, 2**62), st.integers(1, 2**40))


@st.composite
def addresses(draw: st.DrawFn) -> Address:
    spans = draw(st.dictionaries(places, lengths, min_size=1, max_size=5))
    return address_of(Span(*place, at, at + length) for place, (at, length) in spans.items())


@given(names, addresses())
def test_claim_and_its_batch_have_the_same_trace(job: str, address: Address) -> None:
    claim = decode_claim(encode_claim(BatchReady(WorkerId("w"), address, 1)))
    assert claim is not None
    assert trace_of(job, claim.address) == trace_of(job, address)


@given(names, names, addresses(), addresses())
def test_other_batches_have_other_traces(
    job: str, other: str, address: Address, elsewhere: Address
) -> None:
    assume((job, address) != (other, elsewhere))
    one, two = trace_of(job, address), trace_of(other, elsewhere)
    assert one.trace_id != two.trace_id
    assert one.root_id != two.root_id


@given(names, addresses())
def test_ids_are_valid_for_opentelemetry(job: str, address: Address) -> None:
    trace = trace_of(job, address)
    assert 0 < trace.trace_id < 1 << 128
    assert 0 < trace.root_id < 1 << 64


@given(names, addresses(), st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_larger_share_includes_the_traces_of_a_smaller_one(
    job: str, address: Address, one: float, two: float
) -> None:
    trace = trace_of(job, address)
    low, high = sorted((one, two))
    assert is_sampled(trace, low) <= is_sampled(trace, high)
    assert is_sampled(trace, 1.0)


def test_sampled_share_matches_the_ratio() -> None:
    traces = [trace_of("digits", (Span("s", 0, at, at + 1),)) for at in range(20_000)]
    assert sum(is_sampled(trace, 0.1) for trace in traces) == pytest.approx(2000, rel=0.1)


def test_trace_has_the_same_ids_in_every_process() -> None:
    # Python's own `hash` differs between processes. A program that derives other ids splits traces
    # that contain spans of workers with an older program.
    address = (Span("clinic-a", 0, 10, 20), Span("clinic-b", 3, 0, 7))
    expected = BatchTrace(0xB2C676ADD51C41C9C97769DA7EFBAF79, 0xE049D8DA18292AC6)
    result = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", PEEK], capture_output=True, text=True, check=True
    )
    assert trace_of("digits", address) == expected
    assert result.stdout.strip() == f"{expected.trace_id:032x} {expected.root_id:016x}"


PEEK = """
from common.core.spans import Span
from common.telemetry.tracing import trace_of
trace = trace_of("digits", (Span("clinic-a", 0, 10, 20), Span("clinic-b", 3, 0, 7)))
print(f"{trace.trace_id:032x} {trace.root_id:016x}")
"""


def test_nothing_is_sampled_without_a_collector() -> None:
    tracer = open_tracer(Settings(), "worker", "w1")
    assert isinstance(tracer, NoTracer)
    assert tracer.trace("digits", (Span("s", 0, 0, 1),)) is None


def test_collector_without_its_library_fails_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "common.telemetry.otlp", None)
    settings = Settings(traces="http://collector:4318")
    with pytest.raises(UserError, match=r"DOLL_TRACES: .*pip install 'doll\[tracing\]'"):
        open_tracer(settings, "worker", "w1")


@given(st.integers(1, (1 << 128) - 1), st.floats(1e-6, 1.0))
def test_sampling_matches_opentelemetry(trace_id: int, ratio: float) -> None:
    theirs = TraceIdRatioBased(ratio).should_sample(None, trace_id, "batch").decision
    ours = is_sampled(BatchTrace(trace_id, 1), ratio)
    assert ours == (theirs is Decision.RECORD_AND_SAMPLE)
