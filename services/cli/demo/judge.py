"""End of a demo: the model's accuracy on held-out digits, and the proof from Kafka."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from common.config.program import command_of
from common.core.audit import Audit, audit
from common.embedded.process import Child
from common.embedded.services import environment_of
from common.errors import DollError, UnavailableError
from common.kafka import names as topics
from common.kafka.read import read_decoded
from common.wire.messages import decode_audit, decode_claim
from services.cli.demo.summary import Account, DemoBill, DemoSummary

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.settings import Settings
    from common.core.messages import Positions, UpdateApplied
    from common.core.spans import Partition, Span
    from services.cli.demo.run import Demo, DemoFleetView


# Time limit of the test, which may have to load torch on a busy machine.
_TIMEOUT_S = 120.0
_TESTED = msgspec.json.Decoder(dict[str, float])


class ModelTest:
    """Test in progress; create it in a thread that stays, see `Child`.

    Args:
        model: File that the test writes the model to.
        log: File of the test's output, with its result.
    """

    def __init__(self, settings: Settings, job: str, model: Path, log: Path) -> None:
        command = command_of("services.cli.demo.tested_model", job, str(model.absolute()))
        self._child = Child(command, log, environment_of(settings), forks=True)

    def result(self) -> dict[str, float]:
        """Return mean loss and accuracy.

        Raises:
            DollError: If the test did not end within two minutes, or failed. The message quotes the
                last output of the test.
        """
        try:
            exit_code = self._child.await_end(_TIMEOUT_S)
        except UnavailableError as error:
            raise DollError(f"the last model could not be tested: {error}") from error
        finally:
            self._child.kill()
        return result_of(exit_code, self._child.last_words())


def result_of(exit_code: int, said: str) -> dict[str, float]:
    """Read the result of a test from its output, which may contain warnings of libraries.

    Raises:
        DollError: If the test failed.
    """
    results = [line for line in said.splitlines() if line.startswith("{")]
    if exit_code or not results:
        raise DollError(f"the last model could not be tested (exit code {exit_code}): {said}")
    return _TESTED.decode(results[-1])


def judge(demo: Demo, test: ModelTest) -> DemoSummary:
    """Audit the job, account for every record, and return the test's result.

    Raises:
        UnavailableError: If Kafka stops answering.
        DollError: If the model cannot be tested.
    """
    job, first = demo.record.id, demo.record.first
    # Updates are read first, so that the claims of their batches are in the control topic.
    decided = read_decoded(demo.log, topics.updates_topic(job), decode_audit)
    claimed = read_decoded(demo.log, topics.control_topic(job), decode_claim)
    proof = audit(first, claimed, decided)
    updates = proof.updates
    tested = test.result()
    # Without a market, all records produced must be accounted for.
    if demo.fleet is None:
        bill, ends = None, demo.ends
    # With a market, the job may end first, so only records up to its end must be accounted for.
    else:
        bill, ends = _bill(demo, demo.fleet, len(updates)), proof.settled
    return DemoSummary(
        job=demo.plan.name,
        account=account(proof, first, ends),
        flaws=tuple(f"{flaw.kind}: {flaw.where}" for flaw in proof.flaws),
        updates=len(updates),
        test_accuracy=tested["accuracy"],
        prequential_accuracy_at_end=mean_accuracy(updates[-max(1, len(updates) // 10) :]),
        samples_per_s=proof.trained / demo.streaming_s,
        workers=demo.plan.workers,
        preemptions=demo.preemptions,
        pause_after_preemption_s=demo.pause_s,
        bill=bill,
        curve=tuple(mean_accuracy([update]) for update in updates),
    )


def account(audit: Audit, first: Positions, ends: Positions) -> Account:
    """Compare an audit with the records produced.

    Args:
        audit: Audit of the whole job.
        first: Start of each partition.
        ends: Position after the last record produced, by partition.
    """
    produced = sum(ends[place] - first[place] for place in first)
    expired = sum(span.end - span.start for span in audit.expired)
    quarantined = sum(record.batch.samples for record in audit.quarantined)
    used = audit.trained + audit.skipped + expired + quarantined
    duplicated = _overlap(_settled_spans(audit))
    # Records are compared by number and by position, because the total may be right even if a
    # partition was not read to its end.
    missing = produced - (used - duplicated)
    behind = sum(max(0, ends[place] - audit.settled.get(place, first[place])) for place in first)
    return Account(
        produced=produced,
        trained=audit.trained,
        skipped=audit.skipped,
        expired=expired,
        quarantined=quarantined,
        lost=max(missing, behind, 0),
        duplicated=duplicated,
    )


def mean_accuracy(updates: Sequence[UpdateApplied]) -> float:
    """Return the prequential accuracy, measured before each record was learned; 0 without any."""
    judged = [update for update in updates if "accuracy" in update.metrics]
    right = sum(update.metrics["accuracy"] * update.samples for update in judged)
    return right / max(1, sum(update.samples for update in judged))


def _bill(demo: Demo, fleet: DemoFleetView, updates: int) -> DemoBill:
    plan, ledger = demo.plan, fleet.ledger
    if (settled := ledger.settled) is None:
        raise DollError("the provisioner has not settled the cost of the job")
    submitted_s = demo.record.submitted_s
    runtime_s = (demo.progress.updates.last_at_s or submitted_s) - submitted_s
    on_demand_usd, predicted_usd = plan.on_demand_only_usd, settled.predicted_usd or 0.0
    spot_usd = [each.usd_per_hour.get("spot", 0.0) for each in ledger.plans]
    return DemoBill(
        ended=demo.ended_by,
        in_time=updates >= plan.updates and runtime_s <= plan.deadline_s,
        updates_asked=plan.updates,
        runtime_s=runtime_s,
        deadline_s=plan.deadline_s,
        spent_usd=settled.spent_usd,
        on_demand_only_usd=on_demand_usd,
        ratio_to_on_demand=settled.spent_usd / on_demand_usd,
        predicted_usd=predicted_usd,
        off_prediction=settled.spent_usd / predicted_usd - 1 if predicted_usd else 0.0,
        plans=len(ledger.plans),
        reasons=tuple(each.why for each in ledger.plans),
        machines=sum(each.started_s is not None for each in ledger.machines.values()),
        most_at_once=fleet.most_at_once,
        lowest_usd_per_hour=min(spot_usd, default=0.0),
        highest_usd_per_hour=max(spot_usd, default=0.0),
    )


def _settled_spans(audit: Audit) -> Iterable[Span]:
    for update in audit.updates:
        for batch in update.batches:
            yield from batch.address
    for record in audit.quarantined:
        yield from record.batch.address
    yield from audit.expired


def _overlap(spans: Iterable[Span]) -> int:
    """Return how many positions are covered repeatedly, counting each repetition."""
    by_place: defaultdict[Partition, list[Span]] = defaultdict(list)
    for span in spans:
        by_place[span.place].append(span)
    again = 0
    for found in by_place.values():
        reached = 0
        for span in sorted(found):
            again += max(0, min(span.end, reached) - span.start)
            reached = max(reached, span.end)
    return again
