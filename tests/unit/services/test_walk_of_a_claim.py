"""The functions that a claim passes, from the receiving thread to the leader's decision."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from common.core.ledger import Ledger
from common.core.messages import BatchReady, WorkerId
from common.core.spans import Span
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.memory import MemoryLog
from common.kafka.names import control_topic
from common.kafka.port import NewTopic
from common.redis.memory import MemoryRedis
from common.wire.messages import encode_claim
from services.coordinator.loop import JobCoordinator
from tests.unit.cli.test_job import JOB
from tests.unit.services.replicas import MemoryReplica, until

if TYPE_CHECKING:
    from types import FrameType

NAME = "digits"
ROOT = Path(__file__).parents[3]
# Excluded: functions that prepare a turn, and code behind the ports of Kafka and wire formats.
BESIDE = ("common/kafka/", "common/wire/", "common/jobs/", "common/telemetry/", "tests/")
PREPARES = {"turn", "_begin", "_see_hold", "_follow"}
LISTED = re.compile(r"^\| `([\w.]+)` \|", re.MULTILINE)


class Walk:
    """Functions of this project up to the decision, by their first call."""

    def __init__(self) -> None:
        self.stops = list[str]()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call; for `sys.setprofile`."""
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(ROOT) or code.co_name.startswith("<"):
            return
        stop, place = code.co_qualname, file.relative_to(ROOT).as_posix()
        beside = place.startswith((*BESIDE, ".venv")) or code.co_name in PREPARES
        if not beside and stop not in self.stops and Ledger.decide.__qualname__ not in self.stops:
            self.stops.append(stop)


def test_claim_passes_the_functions_listed_in_contributing_md() -> None:
    log, redis, walk = MemoryLog(), MemoryRedis(), Walk()
    log.create_topics([NewTopic("clinic-a")])
    job_store = JobOperations(log)
    job_store.submit(parse_job(JOB))
    with (
        closing(MemoryReplica(log, redis)) as replica,
        closing(
            JobCoordinator(replica.replica, lambda: job_store.get(NAME), lambda: None)
        ) as actor,
    ):

        def leads() -> bool:
            actor.turn()
            return actor.leads

        until(leads, "the replica leads")
        while actor.take_in():
            pass
        claim = encode_claim(BatchReady(WorkerId("w"), (Span("clinic-a", 0, 0, 2),), 2))
        with closing(log.writer()) as writer:
            sys.setprofile(walk.note)
            try:
                writer.append(control_topic(NAME), claim)
                actor.turn()
            finally:
                sys.setprofile(None)
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text().partition("## The walk of a claim")
    assert walk.stops == LISTED.findall(section.partition("\n## ")[0])
