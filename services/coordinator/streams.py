"""Watches the ends of all jobs' logs: arrivals, lag, and whether workers keep up.

Sets metrics and publishes each job's demand, which decides the workers' choice of jobs
(`common.core.job_placement`). While Kafka is unavailable, nothing is set or published.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from math import inf
from secrets import randbits
from time import monotonic, thread_time, time
from typing import TYPE_CHECKING

from common.core import events
from common.core.job_placement import Sightings, elsewhere
from common.core.liveness import TURN
from common.core.losses import Divergence
from common.core.messages import LeaderStatus, LogPositions, Positions, unused_number
from common.core.spans import LogPosition, Partition
from common.errors import DollError, UnknownTopicError
from common.kafka.names import control_topic
from common.telemetry.metrics.coordinator import StreamFigures
from common.telemetry.outages import Outage
from services.coordinator.needs import ArrivalMeter, DemandMeter, necessary_load, sufficient_load
from services.coordinator.tails import missing

if TYPE_CHECKING:
    from common.core.job_placement import JobDemand
    from common.kafka.port import FoundTopic, Log
    from common.redis.port import Boards
    from common.telemetry.logging import EventLogger
    from services.coordinator.metrics_observer import MetricsObserver

# Interval of publications. Workers take a demand that was not published for five intervals for
# stale, and do not change to its job.
PUBLISH_S = 1.0
# Polling interval of the ends of all jobs, idle ones included, and of their topics: two requests
# of 60 ms for 200 partitions. The ends of busy jobs are polled at each turn.
LOOK_S = 2.0
# Interval of the notices that tell waiting jobs where the workers are. A notice lives for three
# intervals, so that two may be missed.
TURNS_S = 3.0
TURNS_TTL_S = 3 * TURNS_S
# Share of a core that polling may take. With a thousand partitions, polls become rare.
SHARE = 0.005
# Time that a log must stay too short to count as cut: after an election, brokers disagree briefly.
SURE_S = 3.0


def by_stream(first: Positions, positions: Mapping[Partition, int]) -> dict[str, int]:
    """Return the number of records between the first positions and these, by stream."""
    records = dict[str, int]()
    for partition, begin in first.items():
        count = max(positions.get(partition, begin) - begin, 0)
        records[partition.topic] = records.get(partition.topic, 0) + count
    return records


def ratios(
    arrivals_per_s: float | None,
    live: int,
    sizes: tuple[int, int],
    gradient_s: float | None,
) -> tuple[float | None, float | None]:
    """Return both loads of Proposition 1, sufficient and necessary; None while unknown.

    Args:
        arrivals_per_s: Records per second of all streams.
        live: N, the number of workers.
        sizes: b and K.
        gradient_s: mu_C; 0 if it was not measured.
    """
    if not arrivals_per_s or not live or not gradient_s:
        return None, None
    batch_size, group_size = sizes
    return (
        sufficient_load(arrivals_per_s, batch_size, gradient_s),
        necessary_load(arrivals_per_s, live, group_size, batch_size, gradient_s),
    )


class WatchedJob:
    """A job that this replica leads.

    Args:
        job: Identifier of the job.
        epoch: Epoch of its leader.
        first: First position of each partition of the job.
        measuring: Has the job's status and metrics, and receives the figures.
        lost: Called with the reason why the job cannot continue, such as a deleted stream.
        seen: Called with the observed state of the job's streams.
    """

    def __init__(
        self,
        job: str,
        epoch: int,
        first: Positions,
        measuring: MetricsObserver,
        lost: Callable[[str], None],
        seen: Callable[[events.StreamsSeen], None],
    ) -> None:
        self.job = job
        # Partitions that are added later are included.
        self.first = dict(first)
        self.control = Partition(control_topic(job), 0)
        self.lost = lost
        # True if a stream seemed to be missing at the last poll.
        self.suspected = False
        # True if the job has neither work nor workers.
        self.idle = False
        self._epoch = epoch
        self.measuring = measuring
        self._seen = seen
        self._arrivals = ArrivalMeter()
        self._meter = DemandMeter(self.first)
        # Ends at the last poll.
        self._ends: Positions | None = None
        # True if it was reported that no log differs.
        self._reported_clean = False
        # When each suspected divergence was first seen, by partition and generation.
        self._diverged_since = dict[tuple[Partition, int], float]()
        # Ids of the job's topics, as first seen.
        self._ids = dict[str, str]()

    def saw(self, ends: Positions, now: float) -> None:
        """Update the figures from the ends of the job's partitions."""
        # A partition without a known end has perhaps been deleted.
        known = self.first.keys() <= ends.keys()
        figures = self._figures(ends, now) if known else None
        leads = self.measuring.saw_streams(self._epoch, figures)
        if known:
            self._ends = ends
        leader_status = self.measuring.leader_status
        idle = figures is not None and not any(figures.lag.values())
        self.idle = leads and idle and leader_status is not None and not leader_status.live

    @property
    def lacks_workers(self) -> bool:
        """True if records wait and no worker is alive."""
        leader_status = self.measuring.leader_status
        return not self.idle and leader_status is not None and not leader_status.live

    def exist(self, found: Mapping[str, FoundTopic]) -> None:
        """Follow the job's topics: they may have been created again, or have other partitions."""
        leader_status = self.measuring.leader_status
        known = _places(leader_status)
        own = found.keys() & {place.topic for place in self.first}
        for topic in sorted(own - {place.topic for place, at in known.items() if at.topic_id}):
            # If Kafka named no id at submission, only this process knows which topics these were.
            topic_id = found[topic].topic_id
            if topic_id and self._ids.setdefault(topic, topic_id) != topic_id:
                self.lost(
                    f"the topic {topic} was deleted and recreated, so its offsets now belong to"
                    f" other records; {self._way_out}"
                )
        there = {Partition(topic, i) for topic in own for i in range(found[topic].partitions)}
        for place in [p for p in self.first if p.topic in own and p not in there]:
            # The topic was created again, with fewer partitions.
            del self.first[place]
        for place in there:
            self.first.setdefault(place, 0)
        for place, openings in leader_status.opened.items() if leader_status is not None else ():
            if place in self.first:
                self.first[place] = min(self.first[place], openings[-1].start)

    def compare(
        self,
        leader_status: LeaderStatus,
        found: Mapping[str, FoundTopic],
        ends: Positions,
        diverged: Mapping[Partition, int],
        now: float,
    ) -> bool:
        """Report partitions that were added, and logs that are not what they were.

        Args:
            leader_status: The leader's status, read before the other arguments.
            found: The job's topics.
            ends: Ends of their partitions, and of the control topic.
            diverged: Offsets from which logs differ from the leader's status.
            now: Monotonic time in seconds.

        Returns:
            True if a suspected loss is not certain yet, so that the logs must be compared again
            soon.
        """
        if self.control not in ends:
            return False
        suspected = dict[tuple[Partition, int], Divergence]()
        for place, known in _places(leader_status).items():
            loss = _loss(place, known, leader_status, found.get(place.topic), ends, diverged)
            if loss is not None:
                suspected[place, loss.generation] = loss
        self._diverged_since = {each: self._diverged_since.get(each, now) for each in suspected}
        sure = {
            each[0]: loss
            for each, loss in suspected.items()
            if loss.recreated or now >= self._diverged_since[each] + SURE_S
        }
        there = {place: found[place.topic].topic_id for place in self.first if place.topic in found}
        clean = not suspected and leader_status.claimed.keys() >= there.keys()
        if not (clean and self.idle and self._reported_clean):
            self._reported_clean = clean and self.idle
            number, settled = unused_number(time(), randbits(12)), len(sure) == len(suspected)
            self._seen(events.StreamsSeen(there, number, sure, settled, ends[self.control]))
        return len(sure) < len(suspected)

    def demand(self, now: float) -> JobDemand | None:
        """Return the job's demand; None while it is unknown."""
        leader_status, metrics = self.measuring.leader_status, self.measuring.metrics
        if leader_status is None or self._ends is None:
            return None
        runs, spec = not (metrics.paused or metrics.held), self.measuring.spec
        in_force = None if metrics.leading is None else metrics.leading.group_size
        # A rule or the tuner may use another K than the job's own, and a changed K is not in force
        # at once.
        group_size = min(spec.group_size, in_force or spec.group_size)
        return self._meter.demand(spec, leader_status, self._ends, now, group_size, runs=runs)

    @property
    def _way_out(self) -> str:
        name = self.measuring.spec.name
        return (
            "restore the records and resume the job, or continue with the model in a new job:"
            f" `doll job submit FILE --from {name}`, under another name"
        )

    def _figures(self, ends: Positions, now: float) -> StreamFigures:
        spec, leader_status = self.measuring.spec, self.measuring.leader_status
        records = by_stream(self.first, ends)
        arrivals_per_s = self._arrivals.add(sum(records.values()), now)
        if leader_status is None:
            return StreamFigures(records, {}, arrivals_per_s)
        claimed = by_stream(self.first, leader_status.claimed)
        sufficient, necessary = ratios(
            arrivals_per_s,
            leader_status.live,
            (spec.batch_size, spec.group_size),
            self.measuring.gradient_s,
        )
        lag = {stream: max(count - claimed[stream], 0) for stream, count in records.items()}
        return StreamFigures(records, lag, arrivals_per_s, sufficient, necessary)


def _places(leader_status: LeaderStatus | None) -> LogPositions:
    """Return the known positions of the logs that a job reads."""
    if leader_status is None:
        return {}
    return {
        place: leader_status.known.get(place, LogPosition(claimed))
        for place, claimed in leader_status.claimed.items()
    }


def _loss(
    place: Partition,
    known: LogPosition,
    leader_status: LeaderStatus,
    topic: FoundTopic | None,
    ends: Positions,
    diverged: Mapping[Partition, int],
) -> Divergence | None:
    """Return how a partition's log differs from the known one; None if it does not."""
    if topic is None:
        # A topic that stays missing is reported elsewhere.
        return None
    generation = leader_status.generation(place)
    if known.topic_id and topic.topic_id not in {"", known.topic_id}:
        start = LogPosition(0, topic.topic_id)
        return Divergence(generation, start, ends.get(place, 0), recreated=True)
    if place not in ends:
        return None
    end, claimed = ends[place], leader_status.claimed.get(place, 0)
    if place not in diverged and end >= claimed:
        return None
    start = known._replace(offset=min(diverged.get(place, end), end, known.offset))
    return Divergence(generation, start, end, recreated=False)


class StreamWatch:
    """Polls the logs of all jobs that are led, in shared requests; an actor of its own.

    Args:
        boards: Provides the roster, on which all demands are published in one packet.
        clock: Monotonic time in seconds.
        used: Processor seconds of the calling thread.
    """

    def __init__(
        self,
        log: Log,
        boards: Boards,
        logger: EventLogger,
        clock: Callable[[], float] = monotonic,
        used: Callable[[], float] = thread_time,
    ) -> None:
        self._source = log
        self._boards = boards
        self._roster = boards.roster()
        self._sightings = Sightings()
        # When to tell waiting jobs again where the workers are.
        self._turns_at = -inf
        self._outage = Outage(logger, "kafka")
        self._roster_outage = Outage(logger, "redis")
        self._clock = clock
        self._used = used
        self._lock = threading.Lock()
        self._watched = dict[str, WatchedJob]()
        # Next poll of busy jobs.
        self._look_at = -inf
        self._look_at_all = -inf

    def follow(self, watched: WatchedJob) -> None:
        """Watch a job from the next turn on, until `forget`."""
        with self._lock:
            self._watched[watched.job] = watched

    def forget(self, job: str) -> None:
        """Stop watching a job."""
        with self._lock:
            self._watched.pop(job, None)

    def turn(self) -> float:
        """Poll, update each job and publish; return the time of the next turn."""
        with self._lock:
            watched = list(self._watched.values())
        now = self._clock()
        if now >= self._look_at:
            self._look(watched, now)
        demands = [each.demand(now) for each in watched]
        try:
            self._roster.put([demand for demand in demands if demand is not None])
            self._publish_turns(watched, demands, now)
            self._roster_outage.over()
        # Workers stay at their jobs.
        except DollError as error:
            self._roster_outage.met(error)
        return self._clock() + PUBLISH_S

    def _publish_turns(
        self, watched: list[WatchedJob], demands: list[JobDemand | None], now: float
    ) -> None:
        """Tell jobs that wait for a worker where the workers are."""
        waiting = [
            (each.job, demand)
            for each, demand in zip(watched, demands, strict=True)
            if demand is not None and demand.runs and each.lacks_workers
        ]
        if not waiting or now < self._turns_at:
            return
        self._turns_at = now + TURNS_S
        seen = self._sightings.see(self._roster.read(), now)
        for job, demand in waiting:
            if where := elsewhere(seen, demand):
                with closing(self._boards.board(job)) as board:
                    board.put_unable(TURN, where, TURNS_TTL_S)

    def close(self) -> None:
        """Do nothing: the watch owns no resources."""

    def _look(self, watched: list[WatchedJob], now: float) -> None:
        """Poll all jobs, or those that are not idle, and schedule the next poll."""
        used = self._used()
        self._look_at = now
        if now >= self._look_at_all:
            self._look_at_all = now + LOOK_S
            self._look_at_logs(watched, now)
        elif due := [each for each in watched if not each.idle]:
            self._look_at_ends(due, now)
        self._look_at += (self._used() - used) / SHARE

    def _look_at_ends(self, due: list[WatchedJob], now: float) -> None:
        """Update jobs from the ends of their streams."""
        try:
            ends = self._source.ends({partition for each in due for partition in each.first})
        except DollError as error:
            self._away(due, error, now)
            return
        self._saw(due, ends, now)

    def _look_at_logs(self, watched: list[WatchedJob], now: float) -> None:
        """Update jobs from ends and partitions, and compare their logs with what was known.

        Takes two requests for all jobs, and one more if a log has records of a new leader epoch.
        """
        # Statuses are read first, because logs only grow.
        leader_statuses = [each.measuring.leader_status for each in watched]
        places = [_places(leader_status) for leader_status in leader_statuses]
        partitions = {partition for each in watched for partition in each.first}
        topics = {partition.topic for partition in partitions}
        partitions |= {partition for known in places for partition in known}
        partitions |= {each.control for each in watched}
        try:
            found = self._source.describe(topics)
            positions = self._source.end_positions(partitions, found)
        except DollError as error:
            self._away(watched, error, now)
            return
        ends = {place: position.offset for place, position in positions.items()}
        self._saw(watched, ends, now)
        self._compare(watched, leader_statuses, found, positions, now)

    def _away(self, watched: list[WatchedJob], error: DollError, now: float) -> None:
        self._outage.met(error)
        for each in watched:
            each.saw({}, now)

    def _saw(self, watched: list[WatchedJob], ends: Positions, now: float) -> None:
        self._outage.over()
        for each in watched:
            each.saw(ends, now)
            self._look_for_topics(each, ends)

    def _compare(
        self,
        watched: list[WatchedJob],
        leader_statuses: list[LeaderStatus | None],
        found: Mapping[str, FoundTopic],
        positions: LogPositions,
        now: float,
    ) -> None:
        """Report to each job whether its logs are still what its leader knows of them."""
        ends = {place: position.offset for place, position in positions.items()}
        places = [_places(leader_status) for leader_status in leader_statuses]
        places = [{p: at for p, at in known.items() if p in ends} for known in places]
        together: LogPositions = {}
        # One request compares the logs of all jobs that know the same positions. Jobs that read the
        # same partition usually do, because they are at its end.
        for known in places:
            if all(together.get(place, at) == at for place, at in known.items()):
                together |= known
        try:
            diverged = self._source.agrees(together, positions)
        except DollError:
            # Perhaps only one log is unavailable, so each job's logs are compared separately.
            diverged, together = {}, {}
        for each, leader_status, known in zip(watched, leader_statuses, places, strict=True):
            try:
                if known.items() <= together.items():
                    own = diverged
                else:
                    own = self._source.agrees(known, positions)
            except DollError as error:
                self._outage.met(error)
                continue
            each.exist(found)
            if leader_status is not None and each.compare(leader_status, found, ends, own, now):
                self._look_at_all = -inf

    def _look_for_topics(self, watched: WatchedJob, ends: Positions) -> None:
        """Report a deleted stream to a job after two polls have missed it."""
        lacking = sorted({place.topic for place in watched.first.keys() - ends.keys()})
        suspected, watched.suspected = watched.suspected, False
        for topic in lacking:
            try:
                self._source.partitions(topic)
            except UnknownTopicError:
                watched.suspected = True
                if suspected:
                    watched.lost(missing(topic))
                    return
            except DollError as error:
                self._outage.met(error)
                return
