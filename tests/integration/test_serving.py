"""Processes that serve a model answer each request exactly once, whichever of them is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn

from common.core.messages import ModelId
from common.core.snapshots import Snapshot
from common.embedded.process import free_port
from common.embedded.services import EmbeddedService, stop_all
from common.jobs.build import trainer_of
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from common.kafka.read import records_of
from common.redis.exchange import open_leader_boards
from common.storage.snapshot_file import SnapshotFile, to_bytes
from tests.integration.cluster import await_condition
from tests.integration.test_clients import environment, ran
from tests.unit.serve.test_serve import World

if TYPE_CHECKING:
    from common.config.settings import Settings

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 280.0
# Records per partition before and after a kill.
EACH = 500
PARTITIONS = 2
KSERVE = "kserve==0.21.0"
ASKED = """
import asyncio, sys
import numpy as np
from kserve import InferInput, InferRequest, InferenceRESTClient, RESTConfig

async def main(url):
    client = InferenceRESTClient(config=RESTConfig(protocol="v2", timeout=60))
    live, ready = await client.is_server_live(url), await client.is_server_ready(url)
    model_ready = await client.is_model_ready(url, "digits")
    image = InferInput("image", [2, 1, 8, 8], "UINT8")
    image.set_data_from_numpy(np.zeros((2, 1, 8, 8), np.uint8), binary_data=False)
    request = InferRequest("digits", [image], request_id="mine")
    answer = await client.infer(url, request, model_name="digits")
    rows, classes = answer.outputs[0].as_numpy().shape
    print(live, ready, model_ready, answer.id, answer.parameters["version"], f"{rows}x{classes}")

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.nightly
def test_serving_fails_no_request_while_leaders_are_killed(
    tmp_path: Path,
) -> None:
    found = tmp_path / "serving.json"
    command = [sys.executable, str(ROOT / "load" / "serving.py"), "--kafka", "embedded"]
    ended = subprocess.run(  # noqa: S603 -- our own command line, no shell
        [*command, "--seconds", "9", "--rate", "20", "--pairs", "1", "--json", str(found)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    # The speed depends on the machine.
    assert ended.returncode in (0, 1), ended.stderr
    report = json.loads(found.read_text())
    assert report["failed_requests"] == 0
    assert report["answers_taken_back"] == 0
    assert report["answers"] == {"leader killed": 180, "board wiped": 180}
    assert min(report["versions_served"].values()) > 1


@pytest.mark.nightly
def test_kserve_client_reads_and_infers(tmp_path: Path) -> None:
    world, port = World(), free_port()
    world.publish(0, 1, seed=1)
    world.look()
    server = uvicorn.Server(uvicorn.Config(world.app, port=port, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        programs = environment(tmp_path, KSERVE)
        url = f"http://127.0.0.1:{port}"
        said = ran(programs / "python", "-c", ASKED, url, folder=tmp_path)
        live, ready, model_ready, name, version, shape = said.splitlines()[-1].split()
        assert (live, ready, model_ready) == ("True", "True", "True")
        assert (name, version, shape) == ("mine", "1", "2x10")
    finally:
        server.should_exit = True
        thread.join()
        world.close()


@pytest.mark.nightly
def test_each_record_is_answered_once_although_a_server_is_killed(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = f"answered-{len(request.node.name)}"
    asked, answered = f"{name}-asked", f"{name}-answered"
    spec = parse_job(
        f"""
        name: {name}
        streams: [{asked}]
        records:
          codec: json
          fields: {{features: {{dtype: float32, shape: [2]}}, label: {{dtype: int64}}}}
        task: {{name: logistic-regression, classes: 2}}
        batch_size: 2
        group_size: 1
        optimizer: {{name: sgd, learning_rate: 0.1}}
        """.replace("\n        ", "\n")
    )
    log = open_log(settings)
    log.create_topics([NewTopic(asked, PARTITIONS), NewTopic(answered)])
    with closing(JobOperations(log)) as job_store:
        job_store.submit(spec)
    trainer = trainer_of(spec, ())()
    kept = SnapshotFile(Snapshot(0, ModelId(0, 1), 2, 0, {}), trainer.snapshot())
    with closing(open_leader_boards(settings)) as boards:
        boards.board(name).put_snapshot(0, to_bytes(kept), "c1")
    writer = log.writer()

    def write() -> None:
        for number in range(EACH * PARTITIONS):
            writer.append(asked, b'{"features": [1, 2]}', partition=number % PARTITIONS)
        assert writer.flush(60.0)

    def answers() -> list[str]:
        [place] = log.partitions(answered)
        return [dict(each.headers)["from"].decode() for each in records_of(log, place)]

    own = settings.model_copy(update={"api_port": 0, "threads": 1})
    options = (name, "--from", asked, "--to", answered)
    servers = [EmbeddedService("serve", f"s{n}", own, tmp_path, options) for n in range(2)]
    try:
        write()
        await_condition(lambda: len(answers()) > EACH // 2, "some requests are answered")
        servers[0].kill()
        write()
        wanted = {f"{asked}[{p}]@{at}" for p in range(PARTITIONS) for at in range(2 * EACH)}
        await_condition(lambda: len(answers()) >= len(wanted), "all requests are answered")
        assert sorted(answers()) == sorted(wanted)
    finally:
        with closing(JobOperations(log)) as job_store:
            job_store.patch(name, "the test is over", wanted="stopped")
        stop_all([each for each in servers if each.exit_code is None])
        writer.close()
