"""Run a scenario: workers, coordinators and faults in virtual time, until all has drained."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from common.core import events
from common.core.messages import (
    GENESIS,
    CheckpointStored,
    Gradient,
    Replayed,
    Requeued,
    WorkerId,
)
from common.simulation.faults.checks import (
    Violation,
    check_audit,
    check_drained,
    effective_updates,
    refused_claims,
)
from common.simulation.faults.coordinators import SimulatedCoordinator
from common.simulation.faults.members import SimulatedMember
from common.simulation.faults.operators import Operators
from common.simulation.faults.scenario import (
    FORGED_EPOCHS,
    LIES,
    MOST_WORKERS,
    OPERATORS,
    SOON_S,
    WORLDS,
    sizes_of,
)
from common.simulation.faults.workers import SimulatedWorker
from common.simulation.faults.world import DIGEST, Outages, World

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, ControlRecord, Wanted
    from common.simulation.faults.processes import SimulatedProcess
    from common.simulation.faults.scenario import Fault, Scenario
    from common.simulation.faults.topic import SimulatedTopic

CHECK_S = 1.0
REPLICAS = 2
# Time until the group notices a lost worker. Meanwhile two workers may own a partition.
SESSION_S = 0.3
# Virtual time without progress after which a job counts as stuck.
STALL_S = 120.0
# Virtual time after the last fault within which members that hold the weights must drain. Without
# it, an endless sequence of fallbacks would count as progress.
ENDLESS_S = 300.0
# Number of times that an operator requeues all poison at the end.
MENDED = 10
# Time until an operator resumes a held job.
SEEN_S = 1.0
# Numbers of records that a topic may lose at once.
LOST = (1, 1, 2, 4, 9)
# Share of losses after which the log grows again at once.
GROWS = 0.4
# Share of coordinators that fail or freeze together with the lost records.
FALLS = 0.3
# Share of cut links that are restored.
MENDS = 0.5
# More samples than any batches have.
GHOST_SAMPLES = 10**6


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one run."""

    seed: int
    # Empty if every invariant held.
    failure: str
    kind: str
    updates: int
    takeovers: int
    quarantined: int
    # Number of batches that operators requeued.
    requeued: int
    # Claims that changed nothing: wasted work.
    refused: int
    # Updates with a gradient at weights older than the preceding version.
    stale: int
    # Updates whose batches were assigned to a single worker.
    single_worker: int
    # Updates with gradients taken after local steps.
    local_steps: int
    # Updates whose synchrony a rule changed.
    switched: int
    # Updates whose synchrony a change of the job changed.
    changed: int
    # Updates with a K that the tuner chose.
    tuned: int
    seconds: float  # virtual
    # Positions of the batches' claims, in the order of the updates.
    applied: tuple[int, ...]
    # Events among members that hold the weights.
    among: Counter[str] = field(default_factory=Counter)
    # Checkpoints named in the updates topic.
    named: int = 0
    # Number of times that a coordinator waited for a named checkpoint.
    awaited: int = 0

    def values(self) -> tuple[object, ...]:
        """Return the values that refactoring must not change."""
        counts = (self.updates, self.takeovers, self.quarantined, self.requeued, self.refused)
        kinds = (
            self.stale,
            self.single_worker,
            self.local_steps,
            self.switched,
            self.changed,
            self.tuned,
        )
        microseconds = round(self.seconds * 1e6)
        return (self.seed, bool(self.failure), *counts, *kinds, microseconds, self.applied)


class Cluster:
    """A running scenario."""

    def __init__(
        self, scenario: Scenario, narrate: Callable[[float, str], None] | None = None
    ) -> None:
        self.scenario = scenario
        self.world = World(scenario, narrate)
        self._narrated = narrate is not None
        self._names = 0
        self._workers = list[SimulatedWorker]()
        self._coordinators = list[SimulatedCoordinator]()
        self._operators = Operators(self.world)
        self._takeovers = 0
        self._most_workers = 0
        self._request = events.WantedChanged("running")
        self._held = False
        for _ in range(scenario.workers):
            self._join()
        for _ in range(REPLICAS):
            self._coordinate()
        for fault in scenario.faults:
            self.world.later(fault.at, lambda fault=fault: self._apply(fault))  # type: ignore[misc]

    def run(self) -> Outcome:
        """Run to the end. A violation is part of the outcome, not an exception."""
        kind = failure = ""
        try:
            self._run()
        except Violation as violation:
            kind, failure = violation.kind, str(violation)
        except Exception as error:
            if self._narrated:
                raise
            kind, failure = "raised", repr(error)
        updates, quarantined = effective_updates(self.world)
        revisions = self.world.revisions
        own = [[mode.synchrony() for mode in sizes.modes] for sizes in revisions]
        tuned = [u.synchrony is not UNSET and u.synchrony not in own[u.revision] for u in updates]
        made = [
            (u.revision, own[u.revision][0] if is_tuned else u.synchrony or own[u.revision][0])
            for u, is_tuned in zip(updates, tuned, strict=True)
        ]
        switches = [(one, two) for one, two in pairwise(made) if one[1] != two[1]]
        return Outcome(
            seed=self.scenario.seed,
            failure=failure,
            kind=kind,
            updates=len(updates),
            takeovers=self._takeovers + sum(c.figures.takeovers for c in self._coordinators),
            quarantined=len(quarantined),
            requeued=self.world.figures.requeued,
            refused=refused_claims(self.world),
            stale=sum(update.staleness > 0 for update in updates),
            single_worker=sum(
                update.synchrony is not UNSET and update.synchrony.single_worker
                for update in updates
            ),
            local_steps=sum(max(update.parts or (1,)) > 1 for update in updates),
            switched=sum(one[0] == two[0] for one, two in switches),
            changed=sum(one[0] != two[0] for one, two in switches),
            tuned=sum(tuned),
            seconds=self.world.now,
            applied=tuple(batch.offset for update in updates for batch in update.batches),
            among=self.world.group.met,
            named=sum(isinstance(record, CheckpointStored) for record in self.world.updates),
            awaited=self.world.figures.awaited,
        )

    def _run(self) -> None:
        world = self.world
        next_check = 0.0
        progress: object = None
        progress_at = 0.0
        while True:
            world.step()
            if world.figures.held_for:
                self._resume_soon()
            if not world.faults_over and world.now >= self.scenario.faults_end_at:
                self._end_faults()
            if world.now < next_check:
                continue
            next_check = world.now + CHECK_S
            check_audit(world)
            self._check_bounds()
            if not world.faults_over:
                continue
            if self._drained():
                check_drained(world)
                return
            if not any(worker.digest == DIGEST for worker in self._live()):
                # Poison may have killed the last worker.
                self._join()
            leader_status = world.redis.leader_status
            claimed = leader_status.claimed if leader_status is not None else {}
            mark = (claimed, len(effective_updates(world)[0]))
            if mark != progress:
                progress, progress_at = mark, world.now
            endless = self.scenario.group and world.now > self.scenario.faults_end_at + ENDLESS_S
            if endless or world.now - progress_at > STALL_S:
                raise Violation("stuck", f"no progress since {progress_at:g} s: {leader_status}")

    def _drained(self) -> bool:
        world = self.world
        leader_status = world.redis.leader_status
        if (
            leader_status is None
            or not any(coordinator.idle for coordinator in self._coordinators)
            or not all(worker.idle for worker in self._workers)
        ):
            return False
        unclaimed = sum(
            offset >= leader_status.claimed.get(partition, 0)
            for partition, records in world.streams.records.items()
            for offset, _ in records
            if self.scenario.linger or (partition.index, offset) not in self.scenario.bad
        )
        known = leader_status.known
        if any(
            p in known and world.streams.divergence(p, known[p]) for p in world.streams.partitions
        ):
            return False
        # Without linger, every worker may keep a batch that it cannot fill.
        part = 0 if self.scenario.linger else world.revisions[-1].batch_size - 1
        return unclaimed <= part * len(self._live())

    def _check_bounds(self) -> None:
        """Check that the number of waiting batches is bounded.

        With an old status, a worker may exceed its bound once, by as many batches as it may hold.
        """
        bound = self.world.most_bound
        live = max((c.figures.live_most for c in self._coordinators), default=0)
        limit = (live + 1) * bound + self._most_workers * (bound + 1) + self.world.figures.requeued
        for coordinator in self._coordinators:
            if coordinator.figures.waiting_most > limit:
                raise Violation(
                    "queue unbounded", f"{coordinator.figures.waiting_most} batches wait"
                )

    # --- faults -------------------------------------------------------------------------------

    def _live(self) -> list[SimulatedWorker]:
        return [w for w in self._workers if not w.dead and not w.leaving]

    def _join(self) -> None:
        self._names += 1
        self._add(self._names)

    def _add(self, number: int) -> None:
        kind = SimulatedMember if self.scenario.group else SimulatedWorker
        worker = kind(self.world, number, self._rebalance)
        self._workers.append(worker)
        self._most_workers = max(self._most_workers, len(self._live()))
        self.world.say(f"{worker.id} joins")
        self._rebalance()

    def _coordinate(self) -> None:
        self._names += 1
        self._coordinators.append(SimulatedCoordinator(self.world, self._names))
        self._want(self._request.wanted)

    def _want(self, wanted: Wanted) -> None:
        self._request = msgspec.structs.replace(self._request, wanted=wanted)
        for coordinator in self._coordinators:
            coordinator.request = self._request
            coordinator.unheard = True

    def _resume_soon(self) -> None:
        """Hold the job in the jobs topic. An operator later does what the reason says."""
        reason, self.world.figures.held_for = self.world.figures.held_for, ""
        self._want("paused")
        # A job that is already held keeps its first reason.
        if not self._held:
            self._held = True
            self.world.later(self.world.jitter(SEEN_S), lambda: self._resume(reason))

    def _resume(self, reason: str) -> None:
        self._held = False
        if "--after-loss" in reason or "--from " in reason:
            self._request = msgspec.structs.replace(
                self._request,
                after_loss=self._request.after_loss + 1,
                from_start="--from-start" in reason,
                read_from="earliest" if "--from earliest" in reason else "",
            )
        self.world.say("operator: resumes the job", self._request)
        self._want("running")

    def _rebalance(self) -> None:
        """Assign every partition to a live worker after a delay."""
        world = self.world

        def assign() -> None:
            able = [w for w in self._live() if world.now >= w.frozen_until]
            world.owners = (
                {p: world.draw.choice(able).id for p in world.streams.partitions} if able else {}
            )
            world.say("rebalance", {str(p): owner for p, owner in world.owners.items()})

        world.later(world.jitter(SESSION_S), assign)

    def _apply(self, fault: Fault) -> None:  # noqa: C901, PLR0912, PLR0915 -- one case per kind
        world = self.world
        if world.faults_over:
            return
        workers = self._live()
        worker = workers[fault.target % len(workers)] if workers else None
        coordinator = self._coordinators[fault.target % REPLICAS]
        world.say(f"*** {fault.kind}", worker.id if worker and "worker" in fault.kind else "")
        match fault.kind:
            case "kill worker" if worker is not None:
                worker.kill()
            case "leave worker" if worker is not None:
                worker.leave()
                self._rebalance()
            case "freeze worker" if worker is not None:
                worker.freeze(fault.seconds)
                self._rebalance()
                world.later(fault.seconds, self._rebalance)
            case "freeze all workers":
                self._freeze(workers, fault.seconds)
            case "freeze worker and leader" if worker is not None:
                self._freeze([worker], fault.seconds)
                leading = [c for c in self._coordinators if c.machine.leader is not None]
                for leader in leading or [coordinator]:
                    leader.freeze(fault.seconds)
            case "kill all workers":
                for each in workers:
                    each.kill()
                world.later(fault.seconds, self._join)
            case "cut worker off redis" if worker is not None:
                worker.cut_off_redis(fault.seconds)
            case "cut worker off kafka" if worker is not None:
                worker.cut_off_kafka(fault.seconds)
                self._rebalance()
            case "join worker" if len(workers) < MOST_WORKERS:
                self._join()
            case "evict rows" if worker is not None:
                worker.evict()
            case "rebalance":
                self._rebalance()
            case "kill coordinator":
                self._replace(coordinator)
            case "freeze coordinator":
                coordinator.freeze(fault.seconds)
            case "cut coordinator off redis":
                coordinator.redis_back_at = world.now + fault.seconds
            case "lose lease":
                world.redis.lease = None
            case "wipe redis":
                world.wipe_redis()
            case "copy redis":
                world.copy_redis()
            case "fail over redis":
                world.fail_over_redis()
            case "redis away":
                world.outages.redis_back_at = world.now + fault.seconds
            case "kafka away":
                world.outages.kafka_back_at = world.now + fault.seconds
            case "storage away":
                world.outages.storage_back_at = world.now + fault.seconds
            case "add partition":
                world.streams.add_partition()
                self._rebalance()
            case "retention":
                self._retain(fault.target)
            case "garbage":
                self._litter()
            case "forge trigger":
                world.forge_trigger(FORGED_EPOCHS[fault.target % len(FORGED_EPOCHS)])
            case "forge report":
                world.forge_report(fault.target)
            case "pause job":
                self._want("paused")
                world.later(fault.seconds, lambda: self._want("running"))
            case "change job":
                modes = self.scenario.way is not None
                group = self.scenario.group
                sizes = sizes_of(fault.target, modes=modes, group=group)
                world.revisions.append(replace(sizes, slices=world.revisions[-1].slices))
                world.say("the job is", world.revisions[-1])
            case "store lies":
                lie = LIES[fault.target % len(LIES)]
                world.say("object storage answers wrongly:", lie)
                world.lie(lie, fault.seconds)
            case "switch aggregation":
                last = world.revisions[-1]
                others = [each for each in self.scenario.layouts if each != last.slices]
                slices = others[fault.target % len(others)]
                world.revisions.append(replace(last, slices=slices))
                world.say("the job is", world.revisions[-1])
            case "restart worker" if worker is not None:
                number = int(worker.id.removeprefix("w"))
                worker.kill()
                world.later(SOON_S * world.group.draw.random(), lambda: self._add(number))
            case "kill some workers" if workers:
                for each in world.group.draw.sample(
                    workers, world.group.draw.randint(1, len(workers))
                ):
                    each.kill()
                world.later(fault.seconds, self._join)
            case "cut members" if len(workers) > 1:
                self._cut(world.group.draw.sample(workers, 2), fault.seconds)
            case "requeue batches":
                self._operators.act(Requeued, world.now + fault.seconds)
            case "replay batches":
                self._operators.act(Replayed, world.now + fault.seconds)
            case "lose appends":
                coordinator.lose_appends()
            case "elect leaders":
                world.control.elect()
                world.updates.elect()
            case "cut control":
                self._lose(world.control, fault)
            case "cut updates":
                self._lose(world.updates, fault)
            case "cut both":
                self._lose(world.control, fault)
                self._lose(world.updates, fault)
            case "create control anew":
                self._lose(world.control, fault, anew=True)
            case "create updates anew":
                self._lose(world.updates, fault, anew=True)
            case "cut stream":
                partition = world.streams.partitions[fault.target % len(world.streams.partitions)]
                lost = LOST[fault.target % len(LOST)]
                cuts = world.draws.cuts
                new = cuts.randint(0, lost + 2) if cuts.random() < GROWS else 0
                world.streams.cut_stream(partition, lost, new)
            case "create stream anew":
                topics = sorted({partition.topic for partition in world.streams.partitions})
                topic = topics[fault.target % len(topics)]
                world.streams.recreate_stream(topic, world.draws.cuts.choice([0, 3, 30]))
            case _:
                # The fault has no target now.
                pass

    def _freeze(self, workers: list[SimulatedWorker], seconds: float) -> None:
        """Freeze workers. They lose their partitions if that takes longer than a session."""
        for each in workers:
            each.freeze(seconds)
        if seconds > SESSION_S:
            self._rebalance()
            self.world.later(seconds, self._rebalance)

    def _cut(self, workers: list[SimulatedWorker], seconds: float) -> None:
        """Cut the link between two members, forever in half of the cases."""
        links = self.world.group.links
        pair = frozenset(each.member for each in workers if isinstance(each, SimulatedMember))
        links.add(pair)
        if self.world.group.draw.random() < MENDS:
            self.world.later(seconds, lambda: links.discard(pair))

    def _lose(
        self,
        topic: SimulatedTopic[AuditRecord] | SimulatedTopic[ControlRecord],
        fault: Fault,
        *,
        anew: bool = False,
    ) -> None:
        """Let a topic of the job lose its last records. Some coordinators may fail with them."""
        draw = self.world.draws.losses
        lost = LOST[fault.target % len(LOST)]
        self.world.lose(topic, None if anew else max(len(topic) - lost, 0))
        for _ in range(draw.randint(0, lost + 2) if draw.random() < GROWS else 0):
            # A record of another writer, so that the log grows past its old end.
            topic.append(None)
        for coordinator in tuple(self._coordinators):
            if draw.random() < FALLS:
                if draw.random() < FALLS:
                    self._replace(coordinator)
                else:
                    coordinator.freeze(fault.seconds)

    def _replace(self, coordinator: SimulatedCoordinator) -> None:
        coordinator.kill()
        self._takeovers += coordinator.figures.takeovers
        self._coordinators.remove(coordinator)
        self._coordinate()

    def _litter(self) -> None:
        """Write garbage to both topics, and an invalid gradient of a waiting batch."""
        self.world.append_control(None)
        self.world.append_audit(None)
        leaders = [c.machine.leader for c in self._coordinators if c.machine.leader is not None]
        model = leaders[-1].model if leaders else GENESIS
        leader_status = self.world.redis.leader_status
        oldest = leader_status.oldest_unsettled if leader_status is not None else 0
        ghost = Gradient(WorkerId("ghost"), model, (oldest,), GHOST_SAMPLES, 0.0, {}, 0.0)
        self.world.push(ghost, None)

    def _retain(self, target: int) -> None:
        streams = self.world.streams
        partition = streams.partitions[target % len(streams.partitions)]
        there = [o for o, arrival in streams.records[partition] if arrival <= self.world.now]
        if there:
            start = max(streams.log_start[partition], there[target % len(there)])
            streams.log_start[partition] = start

    def _end_faults(self) -> None:
        """End all faults: all processes thaw, and from now on everything must drain."""
        world = self.world
        world.faults_over = True
        world.say("--- no fault begins any more")
        world.outages = Outages(world.now, world.now, world.now, world.outages.lie)
        for worker in self._workers:
            worker.kafka_back_at = world.now
        processes: list[SimulatedProcess] = [*self._workers, *self._coordinators]
        for process in processes:
            process.redis_back_at = world.now
            process.frozen_until = min(process.frozen_until, world.now)
        self._want("running")
        if any(fault.kind in OPERATORS for fault in self.scenario.faults):
            self._operators.take_all_back(MENDED)
        if not self._live():
            self._join()
        self._rebalance()


# Number of seeds per task of a process: about 50 ms of work.
CHUNK = 4


def run_seed(seed: int, world: str = "") -> Outcome:
    """Run one seed in a kind of world. See `WORLDS`."""
    return Cluster(WORLDS[world](seed)).run()


def run_seeds(seeds: range, world: str = "") -> Iterator[Outcome]:
    """Run many seeds, and start no more once the caller stops iterating."""
    # A fork server, because this process may have threads, which do not survive a fork. Not
    # `multiprocessing.Pool`, which kills its processes at the end: a killed process may leave a
    # lock held.
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(mp_context=context) as pool:
        yield from pool.map(partial(run_seed, world=world), seeds, chunksize=CHUNK)


# --- shrinking: remove everything that the failure does not need ---------------------------------


def shrink(scenario: Scenario, report: Callable[[str], None]) -> Scenario:
    """Remove faults, records and disturbances one by one while the same invariant still fails.

    Raises:
        ValueError: If the scenario does not fail.
    """
    kind = Cluster(scenario).run().kind
    if not kind:
        raise ValueError(f"seed {scenario.seed} does not fail: there is nothing to shrink")
    progress = True
    while progress:
        progress = False
        for candidate in smaller(scenario):
            if Cluster(candidate).run().kind == kind:
                scenario, progress = candidate, True
                records = sum(map(len, scenario.arrivals))
                report(f"{len(scenario.faults)} faults, {records} records: still {kind}")
                break
    return scenario


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with something removed, largest cuts first."""
    yield from _fewer_faults(scenario)
    yield from _fewer_records(scenario)
    if scenario.workers > 1:
        yield replace(scenario, workers=scenario.workers - 1)
    for less in (
        replace(scenario, bad=frozenset()),
        replace(scenario, poisons=scenario.poisons[:-1]),
        replace(scenario, lossy=0.0),
        replace(scenario, copies=0.0),
    ):
        if less != scenario:
            yield less


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    size = len(faults)
    while size >= 1:
        for start in range(0, len(faults), size):
            yield replace(scenario, faults=faults[:start] + faults[start + size :])
        size //= 2


def _fewer_records(scenario: Scenario) -> Iterator[Scenario]:
    """Empty or halve one partition."""
    for i, records in enumerate(scenario.arrivals):
        for rest in ((), records[: len(records) // 2]):
            arrivals = (*scenario.arrivals[:i], rest, *scenario.arrivals[i + 1 :])
            if len(rest) < len(records) and any(arrivals):
                yield replace(scenario, arrivals=arrivals)
