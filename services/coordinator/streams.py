"""Watches the ends of all jobs' logs: how much arrives and waits, and whether workers keep up.

It tells metrics, and publishes what workers spread by (`common.core.spread`). Nothing here decides
anything: where Kafka is away, there is nothing to tell until it is back.
"""

from __future__ import annotations

import threading
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from common.core.spans import Partition
from common.errors import DollError, UnknownTopicError
from common.metrics.leading import StreamFigures
from common.telemetry import Outage
from common.theory.updates import spread_stability, stability
from services.coordinator.needs import Arrivals, DemandMeter
from services.coordinator.tails import missing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from common.core.messages import Positions
    from common.core.spread import JobDemand
    from common.ports import FoundTopic, Log, Roster
    from common.telemetry import EventLogger
    from services.coordinator.measuring import Measuring

PUBLISH_S = 1.0  # a fifth of the time after which a job is not heard of
# At the ends of a job without work or workers; of all others at each turn. 200 partitions take a
# request of 60 ms.
IDLE_LOOK_S = 2.0
PARTITIONS_S = 2.0  # between looks for partitions that were added: one request for all topics
SURE_S = 3.0  # that a log ends so low: after an election brokers disagree for a moment


def by_stream(first: Positions, positions: Mapping[Partition, int]) -> dict[str, int]:
    """How many records lie between the first position and these, by stream."""
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
    """Give both bounds of Proposition 1, sufficient and necessary; None where they are not known.

    Args:
        arrivals_per_s: Of all streams, shared evenly by the workers.
        live: Workers, N.
        sizes: b and K.
        gradient_s: mu_C; what is not measured is 0 in an update.
    """
    if not arrivals_per_s or not live or not gradient_s:
        return None, None
    batch_size, group_size = sizes
    rates = np.full(live, arrivals_per_s / live)
    return (
        stability(rates, batch_size, gradient_s).ratio,
        spread_stability(rates, group_size, batch_size, gradient_s).ratio,
    )


class _Watched:
    """A job that is led.

    Args:
        epoch: The leader's.
        first: Where every partition of the job begins.
        measuring: Knows the rest, and hears of it.
        lost: Told why it cannot go on: a stream was deleted, created anew, or lost records.
        added: Told which partitions there are, where the job does not have all of them yet.
    """

    def __init__(
        self,
        epoch: int,
        first: Positions,
        measuring: Measuring,
        lost: Callable[[str], None],
        added: Callable[[Collection[Partition]], None],
    ) -> None:
        self.first = dict(first)  # those included that were added while it ran
        self.lost = lost
        self.suspected = False  # of lacking a stream, at the last look
        self.look_at = -inf
        self._epoch = epoch
        self._measuring = measuring
        self._added = added
        self._arrivals = Arrivals()
        self._meter = DemandMeter(self.first)
        self._ends: Positions | None = None  # as last seen
        self._short_since = inf  # a log ends below what is claimed of it
        self._ids = dict[str, str]()  # of its topics, as first seen

    def saw(self, ends: Positions, now: float) -> None:
        """Tell what is to be seen."""
        known = self.first.keys() <= ends.keys()  # else one of its streams is gone
        figures = self._figures(ends, now) if known else None
        leads = self._measuring.saw_streams(self._epoch, figures)
        if known:
            self._ends = ends
        standing = self._measuring.standing
        if known and standing is not None:
            self._compare(ends, standing.claimed, now)
        idle = figures is not None and not any(figures.lag.values())
        calm = leads and idle and standing is not None and not standing.live
        self.look_at = now + (IDLE_LOOK_S if calm else 0.0)

    def exist(self, found: Mapping[str, FoundTopic]) -> None:
        """Take in what topics are: its streams may be others, or have more partitions."""
        own = sorted(found.keys() & {place.topic for place in self.first})
        for topic in own:
            topic_id = found[topic].topic_id
            if topic_id and self._ids.setdefault(topic, topic_id) != topic_id:
                self.lost(
                    f"the topic {topic} was deleted and created anew: its records have offsets that"
                    f" others had before; {self._way_out}"
                )
        partitions = [Partition(topic, i) for topic in own for i in range(found[topic].partitions)]
        for partition in partitions:
            self.first.setdefault(partition, 0)
        standing = self._measuring.standing
        if standing is not None and not standing.claimed.keys() >= set(partitions):
            self._added(partitions)

    def demand(self, now: float) -> JobDemand | None:
        """What the job needs; None as long as that is not known."""
        standing, metrics = self._measuring.standing, self._measuring.metrics
        if standing is None or self._ends is None:
            return None
        runs = not (metrics.paused or metrics.held)
        return self._meter.demand(self._measuring.spec, standing, self._ends, now, runs=runs)

    def _compare(self, ends: Positions, claimed: Positions, now: float) -> None:
        """See that no log ends below what was claimed of it, for longer than an election takes."""
        short = [place for place in sorted(claimed) if ends.get(place, inf) < claimed[place]]
        self._short_since = min(self._short_since, now) if short else inf
        if now >= self._short_since + SURE_S:
            place = short[0]
            self.lost(
                f"{place} ends at {ends[place]}, but was read up to {claimed[place]}: records that"
                f" Kafka had acknowledged are lost; {self._way_out}"
            )

    @property
    def _way_out(self) -> str:
        name = self._measuring.spec.name
        return (
            "restore them and resume the job, or go on with what was learned in a new one:"
            f" `doll job submit FILE --from {name}`, under another name"
        )

    def _figures(self, ends: Positions, now: float) -> StreamFigures:
        spec, standing = self._measuring.spec, self._measuring.standing
        records = by_stream(self.first, ends)
        arrivals_per_s = self._arrivals.add(sum(records.values()), now)
        if standing is None:
            return StreamFigures(records, {}, arrivals_per_s)
        claimed = by_stream(self.first, standing.claimed)
        sufficient, necessary = ratios(
            arrivals_per_s,
            standing.live,
            (spec.batch_size, spec.group_size),
            self._measuring.gradient_s,
        )
        lag = {stream: max(count - claimed[stream], 0) for stream, count in records.items()}
        return StreamFigures(records, lag, arrivals_per_s, sufficient, necessary)


class StreamWatch:
    """Looks at the ends of the logs of all jobs that are led, in one request: an actor of its own.

    Args:
        log: Kafka.
        roster: Where it is published what each job needs, in one packet.
        logger: Of the process.
        clock: Seconds that never go back.
    """

    def __init__(
        self, log: Log, roster: Roster, logger: EventLogger, clock: Callable[[], float] = monotonic
    ) -> None:
        self._source = log
        self._roster = roster
        self._outage = Outage(logger, "streams")
        self._roster_outage = Outage(logger, "roster")
        self._clock = clock
        self._lock = threading.Lock()
        self._watched = dict[str, _Watched]()
        self._partitions_at = -inf

    def follow(
        self,
        job: str,
        epoch: int,
        first: Positions,
        measuring: Measuring,
        lost: Callable[[str], None],
        added: Callable[[Collection[Partition]], None],
    ) -> None:
        """Look after a job from its next turn on, until `forget`; see `_Watched`."""
        with self._lock:
            self._watched[job] = _Watched(epoch, first, measuring, lost, added)

    def forget(self, job: str) -> None:
        """It is led no longer."""
        with self._lock:
            self._watched.pop(job, None)

    def turn(self) -> float:
        """Look, tell each job, and publish; returns when to come again."""
        with self._lock:
            watched = list(self._watched.values())
        now = self._clock()
        if now >= self._partitions_at + PARTITIONS_S:
            self._partitions_at = now
            self._look_for_partitions(watched)
        due = [each for each in watched if now >= each.look_at]
        if due:
            self._look(due, now)
        demands = [each.demand(now) for each in watched]
        try:
            self._roster.put([demand for demand in demands if demand is not None])
            self._roster_outage.over()
        except DollError as error:  # workers stay where they are
            self._roster_outage.met(error)
        return self._clock() + PUBLISH_S

    def close(self) -> None:
        """There is nothing of its own."""

    def _look(self, due: list[_Watched], now: float) -> None:
        ends: Positions = {}
        known = True
        try:
            ends = self._source.ends({partition for each in due for partition in each.first})
            self._outage.over()
        except DollError as error:
            self._outage.met(error)
            known = False
        for each in due:
            each.saw(ends, now)
            if known:
                self._look_for_topics(each, ends)

    def _look_for_partitions(self, watched: list[_Watched]) -> None:
        """Tell each job which partitions its streams have, and whether they are still the same."""
        topics = {partition.topic for each in watched for partition in each.first}
        try:
            found = self._source.describe(topics)  # one that is missing has no end either
        except DollError as error:
            self._outage.met(error)
            return
        for each in watched:
            each.exist(found)

    def _look_for_topics(self, watched: _Watched, ends: Positions) -> None:
        """Tell a job that one of its streams was deleted, once two looks have found it so."""
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
