"""What is known of one job: a pure fold over its topics, and looks at the rest.

`common.jobs.progress` says how it is and how far. What only this service tells is here: curves over
time, machines and money, verdicts of evaluators. Memory is bounded however long the job runs, but
for what `FleetLedger` keeps of each machine. Times are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from common.api.answers import (
    CurvesAnswer,
    LagCurve,
    StreamsAnswer,
    SwitchAnswer,
    UpdatesPage,
    WorkersAnswer,
)
from common.api.jobs import progress_answer, update_answers
from common.core.messages import AuditRecord, Drifted, Evaluated, UpdateApplied
from common.core.thinned import Thinned
from common.jobs.progress import KEPT, JobProgress, Look
from common.spot.provisioning.ledger import FleetLedger
from services.admin.live.answers import lives_of, workers_of
from services.admin.live.evaluations import Evaluations
from services.admin.live.loss_curve import POINTS, LossCurve

if TYPE_CHECKING:
    from common.api.answers import Progress
    from common.jobs.store import JobRecord
    from common.spot.theory.billing import Billing


class JobView:
    """One job. For one thread at a time.

    Attributes:
        job: How it is, and how far.
        ledger: Its machines.

    Args:
        updates_start: Offset of the first record of its updates topic that is still there.
        control_start: Likewise of its control topic.
        billing: How machines are paid for, by pool.
        kept: Updates that are kept singly; of older ones curves and sums remain.
    """

    def __init__(
        self,
        record: JobRecord,
        updates_start: int = 0,
        control_start: int = 0,
        billing: Mapping[str, Billing] | None = None,
        kept: int = KEPT,
    ) -> None:
        self.job = JobProgress(record, updates_start, control_start, kept)
        self.ledger = FleetLedger(billing)
        self._losses = LossCurve()
        self._lags = Thinned[tuple[float, list[int | None]]](POINTS)  # of all streams, at a time
        self._evaluations = Evaluations(record.spec.streams)

    # --- what happens ----------------------------------------------------------------------------

    def feed_update(
        self, offset: int, record: AuditRecord | None, written_s: float | None, seen_s: float
    ) -> bool:
        """Fold a record of the updates topic; True where it counts: see `JobProgress`.

        Raises:
            ValueError: If `offset` was fed before.
        """
        before = self.job.version
        if not self.job.feed_update(offset, record, written_s, seen_s):
            if not isinstance(record, Evaluated | Drifted) or not self.job.holds(record.model):
                return False
            self._evaluations.feed(record)
            return True
        if self.job.version < before:
            self._take_back(self.job.version)
        row = self.job.newest() if isinstance(record, UpdateApplied) else None
        if row is not None:
            if row.version != before + 1:  # whom the first records showed to lead did not
                self._losses = LossCurve()
            self._losses.append(row)
        return True

    def look(self, look: Look) -> bool:
        """Take in what the board and the streams said; True if they said something new."""
        is_new = self.job.look(look)
        self._lags.add((look.at_s, [stream.lag for stream in self.job.streams()]))
        return is_new

    # --- what is told ----------------------------------------------------------------------------

    def progress(self, now: float) -> Progress:
        """How far the job is."""
        return progress_answer(self.job, now, self._evaluations.latest())

    def page(self, after: int, limit: int) -> UpdatesPage:
        """Effective updates above a version, at most so many."""
        columns = self.job.columns
        first = max(after + 1, columns.oldest or 1)
        updates = update_answers(self.job, first, first + limit - 1)
        more = bool(updates) and updates[-1].version < columns.newest
        return UpdatesPage(
            updates=updates,
            next=updates[-1].version if more else None,
            newest=self.job.version,
            oldest=columns.oldest,
        )

    def workers(self, now: float) -> WorkersAnswer:
        """Who works, and which machines send no heartbeat."""
        look = self.job.seen
        samples = self.job.samples_of(now)
        workers = workers_of(self.ledger, look.statuses, samples, look.leader_status)
        return WorkersAnswer(workers=workers, board_away=look.board_away)

    def streams(self) -> StreamsAnswer:
        """The datastreams as of the last look."""
        return StreamsAnswer.model_validate({"streams": self.job.streams()})

    def curves(self, now: float) -> CurvesAnswer:
        """Everything over time, thinned."""
        lags = self._lags.samples()
        reviews = self.ledger.reviews.samples()
        return CurvesAnswer(
            now_s=now,
            **self._losses.points()._asdict(),
            lag_at_s=tuple(at_s for at_s, _ in lags),
            lag=tuple(
                LagCurve(stream=name, lag=tuple(lag[index] for _, lag in lags))
                for index, name in enumerate(self.job.record.spec.streams)
            ),
            lives=lives_of(self.ledger),
            cost_at_s=tuple(review.at_s for review in reviews),
            spent_usd=tuple(review.spent_usd for review in reviews),
            on_demand_only_usd=tuple(review.on_demand_only_usd for review in reviews),
            stability=tuple(review.stability for review in reviews),
            running=tuple(review.running for review in reviews),
            evaluation=self._evaluations.curves(),
            switches=tuple(map(SwitchAnswer.model_validate, self.job.columns.switches)),
        )

    def _take_back(self, version: int) -> None:
        self._evaluations.take_back(version)
        left = self.job.columns.rows(self._losses.first_of(version), version)
        self._losses.take_back(version, left)
