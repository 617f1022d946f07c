"""Breaks everything that can break, and proves that every record was used exactly once.

    python load/chaos.py --minutes 5 --seed 7 --json chaos.json

Starts Apache Kafka, Redis, an S3 server, two coordinators and four workers as processes, connected
by a network that can be cut. Producers write numbered records for one job of the counting model
while a schedule drawn from the seed kills, freezes, disconnects, slows and restarts processes. Then
all faults are undone, the job drains, and each weight must be exactly -1.

With `--tiers` some machines are reliable and the others spot, and each slice of the weights has one
owner. Faults take all machines of a tier, or all owners, at once. Meanwhile the job must switch
stages, and restore from a backup the slices that were lost with their owners.

With `--saturated` the producers stay ahead of the job, and the first minute has no faults. The
share of that minute's throughput that remains afterwards is the cost of the faults. With `--burn
N`, N other processes use the processor meanwhile.

Exit status: 0 if all is well; 1 if a weight is wrong, the audit finds a flaw, a service ends by
itself, the job does not drain or a bar is missed; 2 if the run could not be done.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import cycle
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from common.core.messages import ModelId, SynchronisationMode
from common.embedded.process import Child
from common.embedded.services import EmbeddedService
from common.errors import ConflictError, OutsideError, UnavailableError, UserError
from common.jobs.operations import AfterLoss, JobOperations
from common.kafka.opening import open_log
from common.testing.counting import ENTRYPOINT
from load.faults.actions import Targets, actions_on
from load.faults.fleet import Fleet, Slot
from load.faults.pauses import CarriedOut, limit, read_events
from load.faults.report import Outcome, Pace
from load.faults.schedule import KINDS, LOSSES, STORE_LIES, TIERS, Fault, draw
from load.faults.tiers import Tiers, tier_of
from load.harness import report
from load.harness.counting import (
    BATCH_SIZE,
    Aggregation,
    CountingJob,
    Unlearned,
    counting_job,
    synchronised,
)
from load.harness.outside import Outside
from load.harness.producers import Producers
from load.harness.stack import NotMeasuredError
from load.harness.transactions import Transactions
from load.harness.updates import UpdatesWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.core.audit import Audit
    from common.jobs.edit import Value
    from common.kafka.port import Log

_JOB = "chaos"
# Partitions of each of the two streams: six in all, so that some of the four workers have two.
_PARTITIONS = 3
_PRODUCERS = 3
# Duration of a batch's gradient: long enough for many faults to strike in the middle of a round.
_GRADIENT_S = 0.02
# Duration of a batch's gradient if a backlog waits. Four workers wait most of the time, so that
# competition for the processor does not hide the cost of a fault.
_SATURATED_GRADIENT_S = 0.1
# Time without faults of a saturated job.
_REFERENCE_S = 60.0
_BACKLOG = (
    # Records that always wait with `--saturated`: workers need three seconds for them, so they have
    # work while the producers cannot write.
    1000
)
# Records that may be produced, relative to those that the job can learn without a rollback.
_TAKEN_BACK = 1.2
_START_S = 90.0  # limit for the first update
# The model has weights for records produced up to this long after the run.
_SPARE_S = 120.0
_DRAIN_S = 120.0
_LOOK_S = 0.02
_STATUS_S = 5.0
# Time between checks whether the job is held.
_OWNER_S = 1.0
# Time between changes of the job's mode.
SWITCH_S = 20.0
MODES: tuple[SynchronisationMode, ...] = get_args(SynchronisationMode)


@dataclass(frozen=True)
class Plan:
    """Options of a run."""

    seconds: float
    seed: int
    workers: int
    coordinators: int
    rate_per_s: float
    # Words. If set, only faults whose kind contains one of them.
    only: Sequence[str] = ()
    # True if Kafka also loses records that it has acknowledged.
    losses: bool = False
    # True if object storage gives wrong answers while coordinators start.
    lies: bool = False
    # True if a backlog always waits.
    saturated: bool = False
    # Number of other processes that use the processor.
    burn: int = 0
    synchronisation: SynchronisationMode | Literal["switching"] = "synchronous"
    aggregation: Aggregation = "board"
    # True if machines are reliable or spot, and faults take all machines of a tier.
    tiers: bool = False

    @property
    def switching(self) -> bool:
        """True if the job changes from mode to mode."""
        return self.synchronisation == "switching"

    @property
    def mode(self) -> SynchronisationMode:
        """The job's first mode."""
        return "synchronous" if self.synchronisation == "switching" else self.synchronisation

    @property
    def gradient_s(self) -> float:
        """Duration of a batch's gradient."""
        return _SATURATED_GRADIENT_S if self.saturated else _GRADIENT_S

    @property
    def records(self) -> int:
        """Maximum number of records produced."""
        if not self.saturated:
            return int(self.rate_per_s * (self.seconds + _SPARE_S))
        most_per_s = self.workers * BATCH_SIZE / self.gradient_s
        seconds = _START_S / 2 + _REFERENCE_S + self.seconds
        return int(_TAKEN_BACK * most_per_s * seconds) + _BACKLOG

    def schedule(self) -> tuple[Fault, ...]:
        """Return the faults that the seed draws."""
        sizes = dict.fromkeys(("worker", "worker-redis", "worker-kafka"), self.workers)
        sizes["coordinator"] = self.coordinators
        kinds = [*KINDS, *(LOSSES if self.losses else ()), *(TIERS if self.tiers else ())]
        kinds += STORE_LIES if self.lies else ()
        some = [each for each in kinds if any(word in each.name for word in self.only)]
        return draw(self.seed, self.seconds, sizes, some or kinds)


class Run:
    """One run on servers that are already up."""

    def __init__(self, plan: Plan, folder: Path, outside: Outside, stack: ExitStack) -> None:
        self._plan = plan
        self._outside = outside
        log = open_log(outside.settings, "chaos")
        layout: dict[str, Value] = {"owners": 1} if plan.tiers else {}
        spec = counting_job(
            _JOB, plan.records, plan.gradient_s, plan.mode, plan.aggregation, **layout
        )
        self._job = CountingJob(spec, outside.settings, log, _PARTITIONS)
        self._watch = UpdatesWatch(log, _JOB)
        stack.callback(self._watch.stop)
        self._watch.start()

        def coordinator(number: int, _life: int) -> EmbeddedService:
            return EmbeddedService("coordinator", f"c{number + 1}", outside.settings, folder)

        def worker(number: int, life: int) -> EmbeddedService:
            name = f"w{number + 1}" if life == 1 else f"w{number + 1}.{life}"
            settings = outside.worker_settings(number)
            if plan.tiers:
                settings = settings.model_copy(update={"tier": tier_of(number, plan.workers)})
            return EmbeddedService("worker", name, settings, folder, ["--job", _JOB])

        self._coordinators = _fleet(coordinator, plan.coordinators)
        stack.callback(self._coordinators.stop)
        self._workers = _fleet(worker, plan.workers)
        stack.callback(self._workers.stop)
        self._producers = Producers(self._job.record, log, _PRODUCERS, self._due)
        self._transactions = stack.enter_context(
            Transactions(outside.settings.kafka, self._job.places, self._producers)
        )
        owned = plan.losses or plan.switching
        self._owner = _Owner(log, _JOB, switching=plan.switching) if owned else None
        if self._owner:
            stack.callback(self._owner.close)
        self._tiers = Tiers(self._workers, self._job)
        self._actions = actions_on(
            Targets(
                outside,
                self._workers,
                self._coordinators,
                self._job,
                self._producers,
                self._transactions,
                self._tiers,
                log,
            )
        )
        self._folder = folder
        self._began = time.monotonic()
        self._carried_out = list[CarriedOut]()
        self._status_at = 0.0

    def carry_out(self) -> Outcome:
        """Carry out all faults, undo them, drain the job, and check its weights.

        Raises:
            NotMeasuredError: If the job does not begin, or the harness fails.
            OutsideError: If a server does not come back.
        """
        if not self._turn_until(self._is_under_way, _START_S):
            raise NotMeasuredError(f"no update within {_START_S:g} s; see the logs")
        if self._plan.saturated:
            self._began = time.monotonic() + _REFERENCE_S
            self._turn_until(partial(self._is, 0.0), 2 * _REFERENCE_S)
        self._began, began_s = time.monotonic(), time.time()
        self._do_faults(self._plan.schedule())
        self._heal()
        healed = time.monotonic()
        drained = self._turn_until(self._is_over, _DRAIN_S)
        drained_s = time.monotonic() - healed
        proof, produced = self._job.audit(), self._producers.produced
        unlearned, unread = self._unlearned(proof, produced) if drained else ((), "")
        unexpected = (*self._workers.unexpected, *self._coordinators.unexpected)
        seen, events = self._watch.updates, read_events(self._folder, began_s)
        switches = sum(each.name == "stage_switched" for each in events)
        fallbacks, seconds = self._watch.fallbacks, self._plan.seconds
        return Outcome(
            carried_out=self._carried_out,
            seen_s=[each.seen_at - self._began for each in seen],
            applied_s=sorted(each.applied_s - began_s for each in seen),
            events=events,
            workers=self._plan.workers,
            coordinators=self._plan.coordinators,
            pace=self._pace(proof, began_s) if self._plan.saturated else None,
            leads=self._watch.leads,
            resumed=self._owner.resumed if self._owner else 0,
            produced=produced,
            drained_s=drained_s if drained else None,
            behind="" if drained else self._behind(),
            proof=proof,
            unlearned=unlearned,
            unread=unread,
            burn=self._plan.burn,
            switching=self._plan.switching,
            fallbacks=len(fallbacks),
            tiers=self._tiers.reached(seconds, switches, fallbacks) if self._plan.tiers else None,
            unexpected=[each._replace(at_s=each.at_s - self._began) for each in unexpected],
            overran=self._workers.overran + self._coordinators.overran,
        )

    def _unlearned(self, proof: Audit, produced: int) -> tuple[Sequence[Unlearned], str]:
        """Return the wrong weights, or the reason why the weights cannot be read.

        A leader that rolls updates back after everything was settled leaves no snapshot of the last
        update.
        """
        try:
            return self._job.unlearned(proof, produced), ""
        except NotMeasuredError as error:
            last = proof.updates[-1].version if proof.updates else 0
            after = [each for each in self._watch.fallbacks if each.head.version >= last]
            back = ", ".join(f"{each.head} to {each.base}" for each in after)
            return (), f"{error}; taken back since: {back or 'nothing'}"

    def _due(self, seconds: float) -> float:
        """Return the number of records to be written by now."""
        if self._plan.saturated:
            return self._watch.samples + _BACKLOG
        return self._plan.rate_per_s * seconds

    def _is_under_way(self) -> bool:
        """True once there are updates; with `--saturated`, updates by all workers."""
        return len(self._watch.workers) >= (self._plan.workers if self._plan.saturated else 1)

    def _pace(self, proof: Audit, began_s: float) -> Pace:
        """Return the throughput before and during faults, without updates rolled back later."""
        counts = {ModelId(each.epoch, each.version) for each in proof.updates}
        learned = [
            (each.applied_s - began_s, each.samples)
            for each in self._watch.updates
            if each.model in counts
        ]
        before, then = -_REFERENCE_S, self._plan.seconds
        return Pace(
            sum(samples for at_s, samples in learned if before <= at_s < 0) / _REFERENCE_S,
            sum(samples for at_s, samples in learned if 0 <= at_s < then) / then,
            limit(self._carried_out, self._plan.workers, self._plan.coordinators, then),
        )

    def _do_faults(self, faults: Sequence[Fault]) -> None:
        """Begin and end each fault at its time."""
        began_s = dict[Fault, float]()
        moments = [(at_s, fault) for fault in faults for at_s in (fault.at_s, fault.ends_s)]
        for at_s, fault in sorted(moments):
            self._turn_until(partial(self._is, at_s), self._plan.seconds)
            action = self._actions[fault.kind]
            if fault not in began_s:
                began_s[fault] = self._now_s()
                action.begin(fault.number)
            else:
                self._note(fault, began_s[fault], action.end(fault.number))
        self._turn_until(partial(self._is, self._plan.seconds), self._plan.seconds)

    def _note(self, fault: Fault, began_s: float, ended: object) -> None:
        """Record that a fault was undone.

        A fault whose end returns a `Future` lasts until that is done.
        """
        number = len(self._carried_out)
        self._carried_out.append(CarriedOut(fault, began_s, self._now_s()))

        def done(_: object) -> None:
            self._carried_out[number] = CarriedOut(fault, began_s, self._now_s())

        if isinstance(ended, Future):
            ended.add_done_callback(done)

    def _heal(self) -> None:
        """Undo all faults and stop the producers."""
        self._outside.heal()
        self._outside.await_broker()
        self._workers.bring_all_back()
        self._coordinators.bring_all_back()
        self._transactions.await_all()
        self._producers.stop()

    def _is_over(self) -> bool:
        """True once everything is settled. After a loss of records, only the log proves it."""
        return self._job.drained() and (self._owner is None or self._job.settled())

    def _behind(self) -> str:
        held = self._owner.why_held if self._owner else ""
        return f"held: {held}" if held else self._job.behind()

    def _turn_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Supervise all processes until a condition holds. Returns False after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._workers.look()
            self._coordinators.look()
            self._producers.check()
            self._watch.check()
            if self._owner:
                self._owner.look()
            self._tiers.look()
            self._print_status()
            time.sleep(_LOOK_S)
        return True

    def _now_s(self) -> float:
        return time.monotonic() - self._began

    def _is(self, at_s: float) -> bool:
        return self._now_s() >= at_s

    def _print_status(self) -> None:
        """Print a status line every `_STATUS_S`."""
        if time.monotonic() < self._status_at:
            return
        self._status_at = time.monotonic() + _STATUS_S
        print(
            f"{self._now_s():4.0f} s  {self._producers.produced:,} records"
            f"  {len(self._watch.updates):,} updates  {len(self._carried_out)} faults over",
            flush=True,
        )


class _Owner:
    """Resumes the job whenever a loss of records holds it, with the option named in the reason.

    Args:
        switching: True to change the job's mode every `SWITCH_S`, too.
    """

    def __init__(self, log: Log, job: str, *, switching: bool) -> None:
        self._modes = cycle(MODES[1:] + MODES[:1])
        self._switch_at = time.monotonic() + SWITCH_S if switching else inf
        self.resumed = 0
        self.why_held = ""
        self._job_store = JobOperations(log)
        self._job = job
        self._look_at = 0.0

    def look(self) -> None:
        """Check the job every `_OWNER_S`, and resume it if it is held."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _OWNER_S
        with suppress(UnavailableError, ConflictError):
            # If the store is unavailable, the next check retries.
            record = self._job_store.refresh(0.0)[self._job]
            self.why_held = record.reason if record.held else ""
            if "--after-loss" in self.why_held:
                self._job_store.patch(
                    self._job, "the run goes on", after_loss=AfterLoss(from_start=True)
                )
                self.resumed += 1
            if time.monotonic() >= self._switch_at:
                block = synchronised(next(self._modes))
                self._switch_at = time.monotonic() + SWITCH_S
                self._job_store.patch(
                    self._job, "the run switches", changed={"synchronisation": block}
                )

    def close(self) -> None:
        """Close the job store."""
        self._job_store.close()


def _fleet(start: Callable[[int, int], EmbeddedService], size: int) -> Fleet:
    return Fleet([Slot(partial(start, number)) for number in range(size)])


def main() -> int:
    """Run, report, and check the bars."""
    example = "python load/chaos.py --minutes 5 --seed 7 --json chaos.json"
    parser = report.parser(__doc__, example, kafka=False)
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="minutes with faults; default %(default)g"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the schedule of faults; default %(default)d"
    )
    parser.add_argument(
        "--workers", type=int, default=4, help="number of workers; default %(default)d"
    )
    parser.add_argument(
        "--coordinators", type=int, default=2, help="number of coordinators; default %(default)d"
    )
    parser.add_argument(
        "--rate",
        dest="rate_per_s",
        type=float,
        default=200.0,
        help="records per second that are produced; default %(default)g",
    )
    parser.add_argument(
        "--losses",
        action="store_true",
        help="Kafka also loses records, and the job is resumed with --after-loss",
    )
    parser.add_argument(
        "--lies",
        action="store_true",
        help="object storage also gives wrong answers while Redis is empty and coordinators start",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only faults whose kind contains a WORD; default: all",
    )
    parser.add_argument(
        "--saturated",
        action="store_true",
        help="keep a backlog, and measure the share of its throughput that is left; ignores --rate",
    )
    parser.add_argument(
        "--burn",
        type=int,
        default=0,
        metavar="N",
        help="start N other processes that use the processor; default: none",
    )
    parser.add_argument(
        "--synchronisation",
        choices=(*MODES, "switching"),
        default="synchronous",
        help="mode of the job; `switching` uses all modes in turn, for"
        f" {SWITCH_S:g} s each; default %(default)s",
    )
    parser.add_argument(
        "--aggregation",
        choices=get_args(Aggregation),
        default="board",
        help="where the weights are: `board` is the coordinator and Redis; with `replicas` or"
        " `slices`, workers hold them and sum gradients among themselves; default %(default)s",
    )
    parser.add_argument(
        "--tiers",
        action="store_true",
        help="with --aggregation slices: use reliable and spot machines, and lose whole tiers",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="folder for data and logs; default: a temporary one, kept if the run fails",
    )
    given = parser.parse_args()
    if given.tiers and given.aggregation != "slices":
        parser.error("--tiers: needs --aggregation slices")
    names = {each.name for each in fields(Plan)}
    own = {name: value for name, value in vars(given).items() if name in names}
    plan = Plan(seconds=60 * given.minutes, **own)
    folder = given.logs or Path(tempfile.mkdtemp(prefix="doll-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    machine = report.machine()
    try:
        with ExitStack() as stack:
            outside = stack.enter_context(Outside(folder, plan.workers, (ENTRYPOINT,)))
            for _ in range(plan.burn):
                burner = Child([sys.executable, "-c", "while True: pass"], folder / "burn.txt")
                stack.callback(burner.kill)
            outcome = Run(plan, folder, outside, stack).carry_out()
    except (NotMeasuredError, UserError, OutsideError) as error:
        print(f"not run: {error}\nlogs: {folder}", file=sys.stderr)
        return 2
    outcome.draw()
    print(report.in_words(machine))
    report.write(given.json, {**asdict(plan), "machine": machine, **outcome.as_data()})
    failures = outcome.failures()
    for failure in failures:
        print(f"FAILS: {failure}")
    if failures:
        print(f"seed {plan.seed}, logs: {folder}")
    elif given.logs is None:
        shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
