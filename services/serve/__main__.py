"""Start a model server: `doll serve --help`."""

from __future__ import annotations

import gc

# This comes before the other imports: see `keep_imports`.
if __name__ == "__main__":
    gc.disable()

import sys
import threading
from contextlib import ExitStack, closing, suppress
from functools import cache, partial
from logging import getLogger
from typing import TYPE_CHECKING, TypeVar

import torch

from common.api.keys import KeyStore
from common.config.program import command_line
from common.data.codecs import codec_of
from common.errors import UnavailableError, UnknownTopicError, UserError
from common.jobs.models import parse_version
from common.jobs.servers import Outside
from common.jobs.store import JobStore
from common.kafka.opening import kafka_settings
from common.kafka.schemas import JobSchemas, open_registry
from common.kafka.stream import KafkaStreamLog
from common.kafka.transactions import KafkaTransactionalLog
from common.redis.board import open_board
from common.runtime.http_server import HttpServer, listen, url_of
from common.runtime.service import keep_imports, run
from common.storage.port import open_blobs
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serve import ServeMetrics
from common.telemetry.outages import Outage
from services.serve.app import ModelServer, refusal
from services.serve.batching import Batches
from services.serve.gate import KeyGate
from services.serve.model_choice import LOOK_S, Follower
from services.serve.predictions import PredictionWriter
from services.serve.protocol import Inputs
from services.serve.served_model import ServedModel
from services.serve.topic_answerer import Route, TopicAnswerer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp

    from common.jobs.models import VersionSelector
    from common.jobs.spec import JobSpec
    from common.runtime.service import ServiceProcess

T = TypeVar("T")

# Seconds between attempts while Kafka is unavailable.
AGAIN_S = 0.5
# Most connections of all clients together, equal to the limit of waiting requests.
MOST_CONNECTIONS = 1000


class _KafkaAnswererLog(KafkaStreamLog, KafkaTransactionalLog):
    """The `AnswererLog` port."""


class _EndedError(Exception):
    """The process should end before it has started."""


def main() -> int:
    """Run until a signal ends the process; return its exit status."""
    arguments = command_line("serve")
    return run("serve", arguments.name, partial(_serve, arguments))


def _serve(arguments: argparse.Namespace, process: ServiceProcess) -> None:
    # This module logs the start and the end.
    getLogger("uvicorn").setLevel("ERROR")
    torch.set_num_threads(process.settings.threads or 1)
    if bool(arguments.source) != bool(arguments.to):
        raise UserError("--from, --to: must be set together")
    selectors = [parse_version(each) for each in (arguments.alias, arguments.shadow) if each]
    with ExitStack() as stack, suppress(_EndedError):
        _open(arguments, selectors, process, stack)
    process.logger.info("serve_ended")


def _open(
    arguments: argparse.Namespace,
    selectors: list[VersionSelector],
    process: ServiceProcess,
    stack: ExitStack,
) -> None:
    """Open everything, and serve until a signal ends the process."""
    job, settings = arguments.job, process.settings
    open_log = cache(lambda: _KafkaAnswererLog(kafka_settings(settings, "doll")))
    outside = Outside(
        settings, open_log, partial(open_board, settings), partial(open_blobs, settings)
    )
    logger = process.logger.bind(job=job)
    record = _awaited(process, lambda: JobStore(open_log()).get(job))
    models = [ServedModel(record.spec, settings, selector) for selector in selectors]
    model = models[0]
    metrics = ServeMetrics(lambda: model.number, model.behind_s)
    schemas = JobSchemas(open_log(), record.id, open_registry(settings))
    inputs = inputs_of(record.spec, model, schemas)
    writer: PredictionWriter | None = None
    if topic := arguments.predictions:
        make = partial(PredictionWriter, topic=topic, job=job, metrics=metrics)
        writer = _awaited(process, lambda: make(open_log()))
        stack.callback(writer.close)
    faults = list[BaseException]()
    if arguments.source:
        route = Route(record.id, arguments.source, arguments.to)
        answerer = _awaited(
            process,
            lambda: TopicAnswerer(open_log(), route, model, inputs, arguments.name, logger),
        )
        stack.callback(answerer.close)
        thread = threading.Thread(
            target=_answer_topic, args=(answerer, process, faults), name="answerer"
        )
        thread.start()
        stack.callback(thread.join)
    batches = Batches(
        *models,
        metrics=metrics,
        watchdog=process.watchdogs.begin("the thread of predictions"),
        note=None if writer is None else writer.write,
        ended=process.stopping.set,
    )
    stack.callback(batches.close)
    exposed = ProcessMetrics("serve")
    exposed.follow(job, metrics)
    process.serve_metrics(exposed)
    keep_imports()
    app: ASGIApp = ModelServer(job, model, inputs, batches, metrics, settings).app()
    followers = [
        Follower(record.id, each, outside, logger.bind(alias=str(each.alias))) for each in models
    ]
    looks = [each.look for each in followers]
    if arguments.keys:
        keys = stack.enter_context(closing(KeyStore(open_log())))
        gate = KeyGate(keys, _awaited(process, keys.read), job, logger)
        app, looks = gate.before(app), [gate.look, *looks]
    _listen(app, process, stack)
    _look(process, looks)
    for follower in followers:
        follower.close()
    for fault in (*faults, batches.fault):
        if fault is not None:
            raise fault


def inputs_of(spec: JobSpec, model: ServedModel, schemas: JobSchemas) -> Inputs:
    """Return the converter from requests and records to the model's inputs."""
    fields, is_text = model.forward.fields, spec.records.codec == "json"
    codec = codec_of(spec.records, [field.name for field in fields])
    return Inputs(fields, codec, schemas, is_text=is_text)


def _listen(app: ASGIApp, process: ServiceProcess, stack: ExitStack) -> None:
    """Answer requests in a separate thread until the stack is closed."""
    settings = process.settings
    listening = listen(settings)
    server = HttpServer(app, settings, MOST_CONNECTIONS, refusal, lifespan=False)
    thread = threading.Thread(target=server.run, args=([listening],), name="http", daemon=True)

    def end() -> None:
        server.should_exit = True
        thread.join()

    thread.start()
    stack.callback(end)
    process.logger.info("serve_listening", url=url_of(listening, settings))


def _look(process: ServiceProcess, looks: Sequence[Callable[[], None]]) -> None:
    """Keep the served models up to date until the process should end."""
    watchdog = process.watchdogs.begin("the thread that follows the job")
    while not process.stopping.is_set():
        watchdog.beat()
        for look in looks:
            look()
        process.stopping.wait(LOOK_S)


def _answer_topic(
    answerer: TopicAnswerer, process: ServiceProcess, faults: list[BaseException]
) -> None:
    """Answer the records of a topic until the process should end."""
    watchdog = process.watchdogs.begin("the thread that answers a topic")
    try:
        while not process.stopping.is_set():
            watchdog.beat()
            answerer.turn(LOOK_S)
    except BaseException as fault:  # noqa: BLE001 -- the main thread raises it
        faults.append(fault)
        process.stopping.set()


def _awaited(process: ServiceProcess, ask: Callable[[], T]) -> T:
    """Return the result of a call, repeated until Kafka answers.

    Raises:
        _EndedError: If the process should end before that.
        UserError: If the job or topic does not exist.
    """
    outage = Outage(process.logger, "kafka")
    while not process.stopping.is_set():
        try:
            return ask()
        except UnavailableError as error:
            outage.met(error)
            process.stopping.wait(AGAIN_S)
        except UnknownTopicError as error:
            raise UserError(str(error)) from error
    raise _EndedError


if __name__ == "__main__":
    sys.exit(main())
