"""Estimates of a running job's remaining work, and the rates of its batches."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.messages import GENESIS, Batch, BatchReady, Lead, UpdateApplied, WorkerId
from common.core.spans import Span
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded
from common.spot.planning.plan import gather
from common.spot.planning.remaining import rates_of, remaining
from common.spot.planning.request import PlanRequest
from common.wire.messages import decode_claim, encode_audit, encode_claim
from services.cli import exits
from tests.unit.cli.test_plan import PAPER, planned

if TYPE_CHECKING:
    from tests.unit.cli.conftest import World

PRICES = {name: PAPER[name] for name in ("--availability", "--spot-price", "--on-demand-price")}
JOB = """
name: paper
streams: [a, b]
records: {codec: tensor, fields: {image: {dtype: uint8, shape: [1, 8, 8]}, label: {dtype: int64}}}
task: {name: image-classifier, classes: 10}
batch_size: 10
group_size: 2
optimizer: {name: sgd, learning_rate: 0.1}
stop: {updates: 100, deadline_s: 500}
on_preemption: hold
"""


def claim(worker: str, topic: str, start: int, *, at_s: float, rate: float = 5.0) -> bytes:
    """Return the claim of ten records. One arrives every 1 / rate seconds from `at_s` on."""
    span = Span(topic, 0, start, start + 10)
    return encode_claim(
        BatchReady(WorkerId(worker), (span,), 10, (), 1000 + at_s, 1000 + at_s + 9 / rate)
    )


def update(epoch: int, version: int) -> bytes:
    batch = Batch(version - 1, WorkerId("w1"), (Span("a", 0, 0, 10),), 10)
    return encode_audit(UpdateApplied(epoch, version, (batch,), 10, 0.5))


def submitted(world: World, job: str = JOB) -> None:
    for stream in ("a", "b"):
        world.log.create_topics([NewTopic(stream)])
    world.run("job", "submit", "-", typed=job)


def running(world: World, job: str = JOB) -> None:
    """A job: stream a gives 5 records/s to w1, stream b 20 to w2, and 3 of 100 updates are made."""
    submitted(world, job)
    for n in range(20):
        world.write(
            "doll.paper.control",
            claim("w1", "a", 10 * n, at_s=2.0 * n),
            claim("w2", "b", 10 * n, at_s=0.5 * n, rate=20),
        )
    world.write(
        "doll.paper.updates",
        encode_audit(Lead(-1, GENESIS, "c1", 0)),
        *(update(0, version) for version in (1, 2, 3)),
    )


def from_job(**changed: object) -> list[str]:
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in changed.items()}
    merged = {"--job": "paper", **PRICES, **named}
    return [word for option in merged.items() for word in option]


def test_remaining_work_and_rates_come_from_the_job_and_its_claims(world: World) -> None:
    running(world)
    given_options = PlanRequest(
        job="paper", availability=0.9, spot_usd_per_hour=0.158, on_demand_usd_per_hour=0.286
    )
    record = json.loads(world.run("job", "show", "paper").stdout)
    asked = gather(given_options, lambda: world.log, record["submitted_s"] + 120)
    work = asked.work
    assert (work.group_size, work.batch_size) == (2, 10)
    assert work.updates == 97
    assert work.deadline_s == pytest.approx(380)
    assert asked.names == ("w1", "w2")
    assert work.rates_per_s == pytest.approx([5.0, 20.0], rel=0.02)


def test_plan_of_a_job_names_its_workers(world: World) -> None:
    running(world)
    found = world.run("plan", *from_job(deadline=81), "--json")
    data = json.loads(found.stdout)
    assert data["feasible"]
    # Worker w1 is the slow one.
    assert data["spot_workers"] == [0]
    assert data["workers"] == ["w1", "w2"]
    assert "rates are those of 2 workers" in found.stderr
    shown = world.run("plan", *from_job(deadline=81)).stdout
    assert re.search(r"spot workers +w1\b", shown)


def test_plan_options_take_precedence_over_the_job(world: World) -> None:
    running(world)
    found = planned(world, *from_job(updates=10, workers=4, rate=100, deadline=30))
    assert found["spot"] + found["on_demand"] == 4


@pytest.mark.parametrize(
    ("change", "option"),
    [(("updates: 100, ", ""), "--updates"), ((", deadline_s: 500", ""), "--deadline")],
)
def test_plan_needs_options_that_the_job_does_not_define(
    world: World, change: tuple[str, str], option: str
) -> None:
    running(world, JOB.replace(*change))
    said = world.run("plan", *from_job(), code=exits.REFUSED).stderr
    assert said == f"error: {option}: must be given; the job paper does not have it\n"
    world.run("plan", *from_job(), option, "100")


def test_plan_of_a_job_without_batches_needs_a_rate(world: World) -> None:
    submitted(world)
    said = world.run("plan", *from_job(), code=exits.REFUSED).stderr
    assert "error: --rate: the arrival rates of paper are not known yet" in said
    assert (
        'there is no job "other"'
        in world.run("plan", *from_job(job="other"), code=exits.REFUSED).stderr
    )


def test_plan_of_a_job_that_reassigns_streams_warns_about_its_assumption(world: World) -> None:
    running(world, JOB.replace("on_preemption: hold", "on_preemption: reassign"))
    assert "on_preemption: reassign" in world.run("plan", *from_job()).stderr
    world.run("job", "change", "paper", "--synchronisation", "asynchronous")
    assert "paper is not always synchronous" in world.run("plan", *from_job()).stderr


def test_reverted_updates_count_as_remaining(world: World) -> None:
    running(world)
    world.write("doll.paper.updates", encode_audit(Lead(0, GENESIS, "c2", 4)))
    assert remaining("paper", world.log, 0.0).updates == 100


def test_only_the_newest_claims_are_read(world: World) -> None:
    running(world)
    topic = "doll.paper.control"
    whole = read_decoded(world.log, topic, decode_claim)
    assert read_decoded(world.log, topic, decode_claim, last=3) == whole[-3:]
    assert read_decoded(world.log, topic, decode_claim, last=99) == whole


def test_lost_worker_and_its_successor_count_as_one() -> None:
    """Worker w1 reads stream a until 20 s, then w3: the rate is that of the stream.

    a  | w1 w1 w1 w1 w1 w1 w1 w1 w1 w1 | w3 w3 w3 ...
    """
    claims = [
        BatchReady(
            WorkerId("w1" if n < 10 else "w3"),
            (Span("a", 0, 10 * n, 10 * n + 10),),
            10,
            (),
            2.0 * n + 1,
            2.0 * n + 2.8,
        )
        for n in range(20)
    ]
    # Repeated claims are ignored.
    found = rates_of([*claims, None, claims[3], claims[19]])
    assert found is not None
    assert found.workers == ("w3",)
    assert found.rates_per_s == pytest.approx([5.0], rel=0.02)


@given(seed=st.integers(0, 10_000), split=st.booleans())
def test_rates_are_estimated_from_poisson_arrivals(seed: int, *, split: bool) -> None:
    """A worker reads two streams at 30 and 70 records/s, in joint or in separate batches."""
    rng = np.random.default_rng(seed)
    arrivals = {p: np.cumsum(rng.exponential(1 / rate, 2000)) for p, rate in ((0, 30), (1, 70))}
    claims = []
    if split:
        for p, times in arrivals.items():
            claims += [(p, start, times[start], times[start + 49]) for start in range(0, 2000, 50)]
        ready = [
            BatchReady(WorkerId("w"), (Span("a", p, s, s + 50),), 50, (), first + 1, last + 1)
            for p, s, first, last in claims
        ]
    else:
        ready, ends = [], {0: 0, 1: 0}
        for until in np.arange(1.0, 28.0):
            parts = {p: int(np.searchsorted(times, until)) for p, times in arrivals.items()}
            spans = tuple(Span("a", p, ends[p], end) for p, end in parts.items() if end > ends[p])
            samples = sum(span.end - span.start for span in spans)
            ready.append(BatchReady(WorkerId("w"), spans, samples, (), until, until + 1))
            ends = parts
    found = rates_of(ready)
    assert found is not None
    # The longer of the two streams has 2,000 records: 5 standard errors are below 12 %.
    assert found.rates_per_s.sum() == pytest.approx(100, rel=0.15)


def test_claims_without_times_give_no_rates() -> None:
    assert rates_of([]) is None
    assert rates_of([BatchReady(WorkerId("w"), (Span("a", 0, 0, 10),), 10)]) is None


def test_traffic_per_update_is_what_workers_reported(world: World) -> None:
    running(world)
    assert remaining("paper", world.log, 0.0).update_mb is None
    batch = Batch(3, WorkerId("w1"), (Span("a", 0, 30, 40),), 10)
    world.write("doll.paper.updates", encode_audit(UpdateApplied(0, 4, (batch,), 10, 0.5, moved=7)))
    assert remaining("paper", world.log, 0.0).update_mb == pytest.approx(7e-6)
