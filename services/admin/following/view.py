"""What is known of one job: a pure fold over its updates and plans topics, and looks at the rest.

Times are arguments. It is right across takeovers, since `common.core.history` says what counts, and
its memory is bounded however long the job runs, but for what `FleetLedger` keeps of each machine.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import Drifted, Evaluated, Lead, Quarantined, UpdateApplied
from common.provisioning.ledger import FleetLedger
from common.trail import Trail
from services.admin.answers import (
    CurvesAnswer,
    LagCurve,
    Progress,
    StreamAnswer,
    StreamsAnswer,
    UpdateAnswer,
    UpdatesPage,
    WorkersAnswer,
)
from services.admin.following.columns import KEPT, Columns
from services.admin.following.course import Course
from services.admin.following.evaluations import Evaluations
from services.admin.following.machines import lives_of, workers_of
from services.admin.following.recent import Recent
from services.admin.following.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.core.messages import AuditRecord, Standing
    from common.core.spans import Partition
    from common.jobs.store import JobRecord
    from common.provisioning.records import PlanRecord
    from services.admin.following.columns import Row

SHOWN_UPDATES = 20  # what "now" means for loss and metrics


class Look(NamedTuple):
    """What the board and the streams said at one time; None is what nobody could say."""

    at_s: float
    statuses: Mapping[str, str] | None = None  # by worker that gives signs of life
    standing: Standing | None = None
    led: bool | None = None  # whether anybody holds the lease of leaders
    board_away: str = ""  # why the board did not answer
    ends: Mapping[Partition, int] | None = None  # of the streams' partitions


class JobView:
    """One job. For one thread at a time.

    Args:
        record: The job, as it is now.
        start: Offset of the first record of its updates topic that is still there.
        minimum_billing_s: What a machine costs at least, by pool.
        kept: Updates that are kept singly; of older ones curves and sums remain.
    """

    def __init__(
        self,
        record: JobRecord,
        start: int = 0,
        minimum_billing_s: Mapping[str, float] | None = None,
        kept: int = KEPT,
    ) -> None:
        self.record = record
        self.ledger = FleetLedger(minimum_billing_s)
        self._columns = Columns(kept)
        self._trail = Trail(start)
        self._course = Course()
        self._recent = Recent()
        self._streams = Streams(record.spec.streams, record.first)
        self._evaluations = Evaluations(record.spec.streams)
        self._look = Look(0.0)
        self._quarantined = 0
        self._dead = Counter[str]()  # records of quarantined batches, by stream

    @property
    def version(self) -> int:
        """J, updates made so far."""
        return self._trail.version

    @property
    def epoch(self) -> int:
        """Offset of the Lead in force, -1 for none."""
        return self._trail.epoch

    @property
    def statuses(self) -> Mapping[str, str] | None:
        """Of workers that give signs of life; None: the board is away."""
        return self._look.statuses

    def newest(self) -> Row | None:
        """The newest effective update that is known."""
        return next(self._columns.rows(self._columns.newest, self._columns.newest), None)

    # --- what happens ----------------------------------------------------------------------------

    def feed_update(
        self, offset: int, record: AuditRecord | None, written_s: float | None, seen_s: float
    ) -> bool:
        """Fold a record of the updates topic (None: does not parse); True where it counts.

        Args:
            offset: Its own.
            record: What it says.
            written_s: Its timestamp; None: nobody knows.
            seen_s: When it came, or for records from before we looked, when it was written.

        Raises:
            ValueError: If `offset` was fed before.
        """
        if not self._trail.feed(offset, record):
            if not isinstance(record, Evaluated | Drifted) or not self._trail.holds(record.model):
                return False
            self._evaluations.feed(record)
            return True
        match record:
            case Lead() if self._trail.version < self._columns.newest:
                self._take_back(self._trail.version)
            case UpdateApplied():
                if record.version != self._columns.newest + 1:
                    self._begin_anew(record.version - 1)
                self._columns.append(record, written_s)
                self._recent.add(record, seen_s)
                row = self.newest()
                if row is not None:
                    self._course.append(row)
            case Quarantined():
                self._quarantined += 1
                for span in record.batch.address:
                    self._dead[span.topic] += span.end - span.start
        return True

    def feed_plan(self, offset: int, record: PlanRecord | None) -> bool:
        """Fold a record of the plans topic (None: does not parse); True where it counts.

        Raises:
            ValueError: If `offset` was fed before.
        """
        return self.ledger.feed(offset, record)

    def look(self, look: Look) -> None:
        """Take in what the board and the streams said."""
        self._look = look
        batch_size = self.record.spec.batch_size
        self._streams.look(look.at_s, look.ends, look.standing, batch_size, self.version)

    # --- what is told ----------------------------------------------------------------------------

    def progress(self, now: float) -> Progress:
        """How far the job is."""
        look, record, columns = self._look, self.record, self._columns
        rates = self._recent.rates(now)
        loss, metrics = self._means()
        return Progress(
            version=self.version,
            samples=columns.samples,
            loss=loss,
            metrics=metrics,
            updates_per_s=rates.updates_per_s if rates else None,
            samples_per_s=rates.samples_per_s if rates else None,
            lag=self._streams.lag,
            workers=None if look.statuses is None else len(look.statuses),
            waiting=look.standing.waiting if look.standing else None,
            quarantined=self._quarantined,
            led=look.led,
            last_update_s=columns.last_at_s,
            done=record.reason if record.wanted == "stopped" else "",
            evaluation=self._evaluations.latest(),
        )

    def page(self, after: int, limit: int) -> UpdatesPage:
        """Effective updates above a version, at most so many."""
        first = max(after + 1, self._columns.oldest or 1)
        rows = list(self._columns.rows(first, first + limit - 1))
        more = bool(rows) and rows[-1].version < self._columns.newest
        return UpdatesPage(
            updates=tuple(UpdateAnswer(**row._asdict()) for row in rows),
            next=rows[-1].version if more else None,
            newest=self.version,
            oldest=self._columns.oldest,
        )

    def workers(self, now: float) -> WorkersAnswer:
        """Who works, and which machines give no sign of life."""
        samples = self._recent.samples_of(now)
        workers = workers_of(self.ledger, self._look.statuses, samples)
        return WorkersAnswer(workers=workers, board_away=self._look.board_away)

    def streams(self) -> StreamsAnswer:
        """The datastreams as of the last look."""
        return StreamsAnswer(
            streams=tuple(
                StreamAnswer(
                    stream=state.stream,
                    partitions=state.partitions,
                    rate_per_s=state.rate_per_s,
                    lag=state.lag,
                    settled=state.settled,
                    dead_lettered=self._dead[state.stream] + self._columns.skipped[state.stream],
                )
                for state in self._streams.states()
            )
        )

    def curves(self, now: float) -> CurvesAnswer:
        """Everything over time, thinned."""
        points = self._course.points()
        lags = self._streams.samples()
        reviews = list(self.ledger.reviews)
        if self.ledger.review is not None and self.ledger.review not in reviews[-1:]:
            reviews.append(self.ledger.review)
        return CurvesAnswer(
            now_s=now,
            update_at_s=tuple(points.at_s),
            version=tuple(points.version),
            loss=tuple(points.loss),
            metrics={name: tuple(values) for name, values in points.metrics.items()},
            updates_per_s=tuple(points.updates_per_s),
            lag_at_s=tuple(sample.at_s for sample in lags),
            lag=tuple(
                LagCurve(stream=name, lag=tuple(sample.lag[index] for sample in lags))
                for index, name in enumerate(self._streams.names)
            ),
            lives=lives_of(self.ledger),
            cost_at_s=tuple(review.at_s for review in reviews),
            spent_usd=tuple(review.spent_usd for review in reviews),
            on_demand_only_usd=tuple(review.on_demand_only_usd for review in reviews),
            stability=tuple(review.stability for review in reviews),
            running=tuple(review.running for review in reviews),
            evaluation=self._evaluations.curves(),
        )

    # ---------------------------------------------------------------------------------------------

    def _take_back(self, version: int) -> None:
        self._columns.take_back(version)
        self._evaluations.take_back(version)
        self._recent.take_back(version)
        left = self._columns.rows(self._course.first_of(version), version)
        self._course.take_back(version, left)

    def _begin_anew(self, version: int) -> None:
        """Whom the first records showed to lead did not: see `Trail`."""
        self._columns.clear(version)
        self._recent = Recent()
        self._course = Course()

    def _means(self) -> tuple[float | None, dict[str, float]]:
        newest = self._columns.newest
        rows = list(self._columns.rows(newest - SHOWN_UPDATES + 1, newest))
        if not rows:
            return None, {}
        weights = [max(row.samples, 1) for row in rows]
        pairs = list(zip(rows, weights, strict=True))
        metrics = dict[str, float]()
        for name in sorted({name for row in rows for name in row.metrics}):
            having = [(row.metrics[name], weight) for row, weight in pairs if name in row.metrics]
            total = sum(weight for _, weight in having)
            metrics[name] = sum(value * weight for value, weight in having) / total
        return sum(row.loss * weight for row, weight in pairs) / sum(weights), metrics
