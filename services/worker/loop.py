"""One worker at one job: its stream thread, its gradient thread, and its start and end."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from secrets import token_hex
from time import monotonic, time
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from msgspec import UNSET

from common.core.liveness import ALIVE, WORKER, Heartbeat
from common.core.settings import WorkerSettings, slices_of
from common.core.worker_reading import Worker
from common.data.codecs import codec_of
from common.data.registered import RegisteredCodec
from common.errors import CorruptError, UnavailableError, UserError
from common.jobs.build import parts_of, share_base
from common.kafka.names import group_name
from common.kafka.schemas import JobSchemas, open_registry
from common.learning.arithmetic import Arithmetic
from common.learning.checkpoint import digest_of
from common.learning.devices import device_of, resolve_device, used_bytes
from common.learning.errors import GpuLostError, enough_memory
from common.learning.feed import pinned
from common.learning.gradients import GradientComputer
from common.learning.optimizers import STATE_NAMES
from common.learning.parameters import tensor_options
from common.learning.sliced_trainer import SlicedTrainer
from common.learning.tasks import build_model, task_of
from common.learning.trainer import Trainer
from common.storage.port import open_blobs
from common.storage.store import CheckpointStore
from common.telemetry.metrics.serving import Watchdog
from common.telemetry.metrics.worker import WorkerMetrics
from common.telemetry.outages import Outage
from services.worker.compute import OrderComputer, Shell
from services.worker.effects.board import WorkerBoard
from services.worker.effects.claims import ClaimSender
from services.worker.effects.schemas import SchemaFinder, SchemaGate
from services.worker.gradients import GradientLoop
from services.worker.group import GroupLoop
from services.worker.held_weights import HeldSlices, HeldWhole
from services.worker.memory import check_group_memory, group_bytes, room_for_slices
from services.worker.rows import BatchCache
from services.worker.stream import Stream
from services.worker.time_lag import TimeLag
from services.worker.traces import BatchTraces

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import UnsetType

    from common.collectives.port import Groups
    from common.config.settings import Settings
    from common.core.messages import Tier, WorkerId
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.kafka.port import StreamLog
    from common.learning.tasks import Task
    from common.redis.port import Board
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import ProcessMetrics
    from common.telemetry.metrics.serving import Watchdogs
    from common.telemetry.tracing import Tracer
    from services.worker.group import GroupAccess
    from services.worker.held_weights import HeldWeights

# Watchdog's limit for the gradient thread. Computing the batches of a whole group, or a GPU's first
# gradient, takes a minute or two. A long limit delays nothing, because other workers get a late
# worker's batches much earlier.
GRADIENT_STILL_S = 300.0
# Time between beats of the watchdog, and between reports, while torch compiles the module.
COMPILE_LOOK_S = 2.0
# Limit of decoded batches in memory; further batches are read back from Kafka. About 4K batches of
# images fit.
CACHE_MIB = 256

# Devices for values of DOLL_GPUS; a list requires a GPU.
_DEVICES: dict[str, Literal["auto", "cpu", "cuda"]] = {"all": "auto", "none": "cpu"}


class Observers(NamedTuple):
    """The process's metrics, traces and watchdogs, which outlive a job."""

    metrics: ProcessMetrics
    tracer: Tracer
    watchdogs: Watchdogs
    # Watchdog of the thread that reads streams or waits for a job.
    watchdog: Watchdog


class JobWorker:
    """One worker at one job.

    Args:
        worker: Name of this worker.
        job: The job.
        settings: Settings of the process.
        log: Kafka.
        board: The job's board in Redis. Its creator closes it.
        observers: The observers of the process.
        logger: Bound to the worker.
        access: Returns the access to other members, if members hold the job's weights.

    Raises:
        TaskMissingError: If this process does not have the task.
        UserError: If the task refuses its options, returns no model or does not fit the records, or
            if the device does not exist. Everything is closed in any case.
        UnavailableError: If the job's `init` has no effect yet, or storage cannot say.
        NoMemoryError: If memory does not suffice for the model.
    """

    @enough_memory("the job's model")
    def __init__(  # noqa: PLR0913, PLR0915 -- what a worker at a job is made of
        self,
        worker: WorkerId,
        job: JobRecord,
        settings: Settings,
        log: StreamLog,
        board: Board,
        observers: Observers,
        logger: EventLogger,
        *,
        access: Callable[[JobSpec], GroupAccess],
    ) -> None:
        spec = job.spec
        self._log = logger.bind(job=spec.name)
        self._leave_s = settings.leave_s
        # Set once no further gradient may start.
        self._ended = threading.Event()
        # Set once others can know of this worker, or no gradient may start any more. Orders for a
        # previous process with the same name may still stand. If a batch of theirs kills this
        # process as well, the leader has to see a worker that was alive.
        self._present = threading.Event()
        # Monotonic time until which a leaving worker waits for the gradient under way.
        self._deadline = 0.0
        self._fault: BaseException | None = None
        task = task_of(spec, settings.tasks)
        store = CheckpointStore(open_blobs(settings), job.id) if settings.blobs else None
        if spec.init is not None and store is not None and not store.init():
            raise UnavailableError("no coordinator has stored the weights of the job's `init` yet")
        # The process sees at most one GPU, because a worker with several starts one for each.
        device = resolve_device(_DEVICES.get(settings.gpus, "cuda"), self._log.warning)
        self._device = device_of(device)
        if device.type == "cuda" and spec.deterministic:
            # cuBLAS reads this variable when torch first uses it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        computer = _computer(spec, task, device, store)
        if spec.compile:
            report = partial(_report, board, WORKER + worker, Outage(self._log, "redis"))
            _compile(computer, spec, observers.watchdog, report)
        codec, schemas = codec_of(spec.records), None
        if isinstance(codec, RegisteredCodec):
            found = JobSchemas(log, job.id, open_registry(settings))
            schemas = SchemaFinder(codec, found, self._log)
        cache = BatchCache(CACHE_MIB << 20, pinned if device.type == "cuda" else np.empty)
        layout, base = computer.model.layout, computer.model.base.digest
        self._digest = digest_of(layout, base)
        self._spec, self._settings = spec, settings
        life = token_hex(8)
        self._observers = observers
        self._watchdog = Watchdog(what="the gradient thread", limit_s=GRADIENT_STILL_S)
        machine = Worker(
            worker,
            WorkerSettings(
                spec.batch_size,
                spec.waiting_bound,
                spec.batch_linger_s,
                spec.largest_group,
                2 if computer.has_batch_norm else 1,
            ),
        )
        with ExitStack() as undo:
            self._measures = measures = WorkerMetrics(spec.streams)
            measures.measure_device(self._device, partial(used_bytes, device))
            observers.metrics.count_faults(spec.name)
            observers.metrics.follow(spec.name, measures)
            undo.callback(observers.metrics.forget, measures)
            traces = BatchTraces(observers.tracer, spec.name, worker)
            claims = ClaimSender(log, job.id, self._log, measures, traces)
            undo.callback(claims.close)
            hold = spec.on_preemption == "hold"
            reader = log.stream(group_name(job.id), spec.streams, worker, hold=hold)
            undo.callback(reader.close)
            self._stream = Stream(
                machine,
                reader,
                claims,
                WorkerBoard(
                    *(worker, board, layout, base, self._log),
                    own=Heartbeat(ALIVE, device=self._device, life=life),
                ),
                gate=SchemaGate(schemas),
                codec=codec,
                cache=cache,
                time_lag=TimeLag(spec.streams, self._log, measures),
                logger=self._log,
                measures=measures,
            )
            self._computer = computer
            self._computer_of = partial(
                OrderComputer,
                worker,
                computer,
                codec=codec,
                schemas=schemas,
                cache=cache,
                log=log,
                logger=self._log,
                measures=measures,
                watchdog=self._watchdog,
                topic_id=machine.topic_id,
            )
            self._shell = Shell(
                board=board,
                logger=self._log,
                measures=measures,
                traces=traces,
                watchdog=self._watchdog,
                wait=self._ended.wait,
                round_began=self._stream.inbox.round_began,
                stream=lambda: machine.triggers,
                outage=Outage(self._log, "redis"),
                life=life,
            )
            self._id, self._numbers, self._access = worker, len(computer.model.state), access
            self._groups: Groups | None = None
            self._loop = self._make_loop(slices_of(spec.among))
            undo.pop_all()
        self._thread = threading.Thread(target=self._compute, name="gradients", daemon=True)

    def _make_loop(self, slices: int | UnsetType) -> GradientLoop | GroupLoop:
        """Return the loop that carries out a leader's orders.

        Args:
            slices: Layout of the weights, as the leader's `Lead` has it.

        Raises:
            UserError: If the weights do not fit into this machine, or others cannot reach it.
        """
        worker, shell, spec, settings = self._id, self._shell, self._spec, self._settings
        self._slices = slices
        self._computer.on_device = slices is not UNSET
        if slices is UNSET:
            compute = self._computer_of()
            return GradientLoop(worker, compute, shell, digest=self._digest)
        states = len(set(STATE_NAMES[spec.optimizer.name]) - {"step"})
        allowed = group_bytes(self._device.memory_bytes)
        if _wire(spec) != torch.float32:
            # Rounded gradients, sent and received.
            allowed -= 4 * self._numbers
        runs_on: tuple[Tier, float, int] | None = None
        if slices:
            room = room_for_slices(self._numbers, states, slices, spec.largest_group, allowed)
            runs_on = settings.tier, time(), room
        else:
            check_group_memory(self._numbers, states, allowed)
        access = self._access(spec)
        self._groups = access.groups
        device = self._computer.model.state.device
        make = partial(_held, spec, settings, slices, access.checkpoints, device)
        compute = self._computer_of()
        return GroupLoop(worker, compute, shell, access, make, runs_on, slices=slices)

    def _close_groups(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.close()

    @enough_memory("the job's records and weights")
    def run(self, look: Callable[[], JobSpec | None]) -> None:
        """Work on the job until this worker must leave it, then leave in order.

        In any case, the worker leaves the consumer group and ends its gradient thread,
        because the process may continue with another job.

        Args:
            look: Returns the newest specification; None if this worker must leave.

        Raises:
            BaseException: The fault that ended the gradient thread.
            NoMemoryError: If memory does not suffice.
            UnknownTopicError: If the job's control topic does not exist any more.
            OutsideError: If an announcement was refused, or the group rejects this member.
        """
        kind, name, memory_bytes, driver, capability = self._device
        self._log.info(
            "worker_joins",
            device=name,
            kind=kind,
            memory_mib=memory_bytes >> 20,
            **({"driver": driver, "capability": capability} if driver else {}),
        )
        with ExitStack() as closing:
            closing.callback(self._observers.metrics.forget, self._measures)
            closing.callback(self._close_groups)
            closing.callback(self._stream.close)
            closing.callback(self._end_gradients)
            self._thread.start()
            while (spec := look()) is not None and self._fault is None:
                if spec is not self._spec:
                    self._follow(spec)
                self._turn()
                self._present.set()
            if isinstance(self._fault, GpuLostError):
                raise self._fault
            self._leave()
        self._log.info("worker_left")
        if self._fault is not None:
            raise self._fault

    @property
    def pinned(self) -> bool:
        """True if the held state keeps this worker at its job. Safe to call from any thread."""
        return isinstance(self._loop, GroupLoop) and self._loop.pinned

    def _turn(self) -> None:
        self._observers.watchdog.beat()
        self._stream.turn()

    def _follow(self, spec: JobSpec) -> None:
        """Follow a changed job. A new b counts from the next batch on, `oom` from the next pass."""
        before, self._spec = self._spec, spec
        self._computer.oom = spec.oom
        sizes = spec.batch_size, spec.waiting_bound, spec.largest_group
        if sizes != (before.batch_size, before.waiting_bound, before.largest_group):
            self._stream.resize(*sizes)

    def _leave(self) -> None:
        """Report that this worker leaves, and finish the gradient under way if there is time."""
        self._stream.leave()
        self._begin_no_gradient()
        while self._thread.is_alive() and monotonic() < self._deadline:
            # The stream's turns keep sending heartbeats.
            self._turn()

    def _begin_no_gradient(self) -> None:
        self._deadline = monotonic() + self._leave_s
        self._ended.set()
        self._present.set()
        # To the leader, a lost GPU has to look like a death: one of the batches may be the cause,
        # so each is computed alone. A worker that says that it leaves clears its batches.
        if not isinstance(self._fault, GpuLostError):
            self._loop.leave()

    def _end_gradients(self) -> None:
        """End the gradient thread, even if the stream has failed and sends no heartbeats."""
        if not self._ended.is_set():
            self._begin_no_gradient()
        self._thread.join(max(self._deadline - monotonic(), 0.0))
        if self._thread.is_alive():
            self._log.warning("gradient_given_up", after_s=self._leave_s)
            self._loop.leave(finish=False)

    def _compute(self) -> None:
        self._observers.watchdogs.watch(self._watchdog)
        try:
            self._present.wait()
            while not self._ended.is_set():
                self._loop.turn()
                if self._loop.slices != self._slices:
                    self._replace_loop(self._loop.slices)
        except BaseException as fault:  # noqa: BLE001 -- raised again by `run`, in the main thread
            self._fault = fault
        finally:
            self._observers.watchdogs.end(self._watchdog)
            self._loop.close()

    def _replace_loop(self, slices: int | UnsetType) -> None:
        """Switch to a new layout of the weights. The state of the old one is in storage."""
        self._log.info("aggregation_changed", slices=None if slices is UNSET else slices)
        self._loop.close()
        self._close_groups()
        self._loop = self._make_loop(slices)


def _computer(
    spec: JobSpec, task: Task, device: torch.device, store: CheckpointStore | None
) -> GradientComputer:
    """Build the job's model, with the frozen tensors that all workers share.

    Raises:
        UserError: If these tensors differ from those of the task, or `optimizer.groups` names
            parameters that the model lacks.
    """
    module = build_model(task, spec.seed)
    # The names of the groups must exist, also if this worker takes no steps.
    tensor_options(module, spec.optimizer.groups, spec.optimizer.no_decay)
    computer = GradientComputer(
        task,
        module,
        device,
        arithmetic=Arithmetic(spec.precision, spec.deterministic),
        reduction=spec.reduction,
        oom=spec.oom,
        pass_records=spec.records_per_pass,
    )
    # Without storage, the worker uses its own frozen tensors: the leader compares digests.
    with suppress(UnavailableError):
        try:
            share_base(computer.model, task, spec.seed, store, write=False)
        except CorruptError as error:
            raise UserError(str(error)) from error
    return computer


def _compile(
    computer: GradientComputer, spec: JobSpec, watchdog: Watchdog, report: Callable[[str], None]
) -> None:
    """Compile the job's module before the worker joins, which may take minutes.

    Args:
        computer: Computes the job's gradients.
        spec: The job.
        watchdog: Watchdog of this thread.
        report: Reports why the worker has not joined yet.

    Raises:
        UserError: If this machine cannot compile the module.
        NoMemoryError: If memory does not suffice for a batch.
    """
    fields = spec.records.described()
    with ThreadPoolExecutor(1, "compiler") as threads:
        compiled = threads.submit(computer.compile, fields, spec.batch_size, spec.largest_group)
        while not wait([compiled], COMPILE_LOOK_S).done:
            watchdog.beat()
            report("it compiles the job's module before it joins (`compile: true`)")
        compiled.result()


def _report(board: Board, worker: str, outage: Outage, reason: str) -> None:
    """Report for a few seconds why a worker does not work for the job."""
    try:
        board.put_unable(worker, reason, 2 * COMPILE_LOOK_S)
    except UnavailableError as error:
        outage.met(error)


def _held(
    spec: JobSpec,
    settings: Settings,
    slices: int,
    store: CheckpointStore,
    device: torch.device,
) -> HeldWeights:
    parts = parts_of(spec, settings.tasks, store)
    wire = _wire(spec)
    if slices:
        return HeldSlices(SlicedTrainer(*parts, count=slices, device=device), wire)
    return HeldWhole(Trainer(*parts, device=device), wire)


def _wire(spec: JobSpec) -> torch.dtype:
    """Return the type of gradients between members."""
    halved = spec.aggregation is not None and spec.aggregation.wire == "bfloat16"
    return torch.bfloat16 if halved else torch.float32
