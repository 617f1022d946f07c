"""Start a model server: `doll serve --help`."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, TypeVar

import torch
import uvicorn

from common.checkpoints.find import wish_of
from common.config.program import command_line
from common.errors import UnavailableError
from common.jobs.build import codec_of
from common.jobs.store import JobStore
from common.runtime.connect import connect
from common.runtime.listen import listen, url_of
from common.runtime.service import freeze_imports, run
from common.telemetry.logging import Outage
from common.telemetry.metrics.serve import ServeMetrics
from services.serve.app import ModelServer
from services.serve.batching import Batches
from services.serve.follower import LOOK_S, Follower
from services.serve.predictions import PredictionWriter
from services.serve.protocol import Inputs
from services.serve.served_model import ServedModel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from starlette.applications import Starlette

    from common.config.servers import Outside
    from common.config.settings import Settings
    from common.jobs.spec import JobSpec
    from common.runtime.service import ServiceProcess

T = TypeVar("T")

AGAIN_S = 0.5  # between attempts while Kafka is unavailable
IDLE_S = 75  # that a connection without requests stays: longer than a load balancer's minute
END_S = 5  # for requests under way


def main() -> int:
    """Run until told to end; returns the exit status."""
    arguments = command_line("serve")
    return run("serve", arguments.name, partial(_serve, arguments))


def _serve(arguments: argparse.Namespace, process: ServiceProcess) -> None:
    getLogger("uvicorn").setLevel("ERROR")  # its beginning and end are told by us
    job, settings, outside = arguments.job, process.settings, connect(process.settings)
    torch.set_num_threads(settings.threads or 1)
    wishes = [wish_of(each) for each in (arguments.alias, arguments.shadow) if each]
    record = _awaited(process, lambda: JobStore(outside.open_log()).get(job))
    if record is None:
        return
    models = [ServedModel(record.spec, settings, wish) for wish in wishes]
    metrics = ServeMetrics(job, models[0])
    with ExitStack() as stack:
        writer: PredictionWriter | None = None
        if arguments.predictions:
            write_to = partial(PredictionWriter, job=job, metrics=metrics)
            writer = _awaited(process, lambda: write_to(outside.open_log(), arguments.predictions))
            if writer is None:
                return
            stack.callback(writer.close)
        batches = Batches(
            *models,
            metrics=metrics,
            watchdog=process.watchdogs.begin("the thread of predictions"),
            note=None if writer is None else writer.write,
            ended=process.stopping.set,
        )
        stack.callback(batches.close)
        served = ModelServer(
            job, models[0], inputs_of(record.spec, models[0]), batches, metrics, settings
        )
        process.serve_metrics(metrics.meters)
        freeze_imports()
        _listen(served.app(), process, stack)
        _follow(process, job, models, outside)
        if batches.fault is not None:
            raise batches.fault
    process.logger.info("serve_ended")


def inputs_of(spec: JobSpec, model: ServedModel) -> Inputs:
    """How requests become what a model reads."""
    wanted = [field.name for field in model.forward.fields]
    return Inputs(
        model.forward.fields, codec_of(spec, wanted), is_text=spec.records.codec == "json"
    )


def _listen(app: Starlette, process: ServiceProcess, stack: ExitStack) -> None:
    """Answer requests in a thread of its own, until the stack is closed."""
    settings = process.settings
    listening = listen(settings)
    server = uvicorn.Server(_config(app, settings))
    thread = threading.Thread(target=server.run, args=([listening],), name="http", daemon=True)

    def end() -> None:
        server.should_exit = True
        thread.join()

    thread.start()
    stack.callback(end)
    process.logger.info("serve_listening", url=url_of(listening, settings))


def _config(app: Starlette, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=settings.api_tls_cert or None,
        ssl_keyfile=settings.api_tls_key or None,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=END_S,
    )


def _follow(
    process: ServiceProcess, job: str, models: Sequence[ServedModel], outside: Outside
) -> None:
    """Keep what is served up to date until the process is to end."""
    watchdog = process.watchdogs.begin("the thread that follows the job")
    log = process.logger.bind(job=job)
    followers = [
        Follower(job, model, outside, log.bind(alias=str(model.alias))) for model in models
    ]
    while not process.stopping.is_set():
        watchdog.beat()
        for follower in followers:
            follower.look()
        process.stopping.wait(LOOK_S)
    for follower in followers:
        follower.close()


def _awaited(process: ServiceProcess, ask: Callable[[], T]) -> T | None:
    """What Kafka answers, once it is there; None: this process is to end."""
    outage = Outage(process.logger, "kafka")
    while not process.stopping.is_set():
        try:
            return ask()
        except UnavailableError as error:
            outage.met(error)
            process.stopping.wait(AGAIN_S)
    return None


if __name__ == "__main__":
    sys.exit(main())
