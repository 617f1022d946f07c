"""Conclusions of the adapter from the client's answers, without a broker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.core.spans import LogPosition, Partition
from common.errors import UnavailableError
from common.kafka import log as adapter
from common.kafka.log import KafkaLog
from common.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

P = Partition("s", 0)
_ROOT = Path(__file__).parents[3]
# A program that ends during a request without an answer. The request times out after 0.2 s. By then
# the interpreter has ended, but an exit handler delays the end of the process by a second. A thread
# keeps a reference to the log.
_ENDS = """\
import ctypes
import threading
from common.kafka.log import KafkaLog
from common.kafka.settings import KafkaSettings
from common.kafka.epochs import TopicsQuestion
system = ctypes.CDLL(None)
system.__cxa_atexit(system.usleep, ctypes.c_void_p(1_000_000), None)
log = KafkaLog(KafkaSettings("127.0.0.1:1"))
held = threading.Event()
def hold(log):
    held.set()
    threading.Event().wait()
threading.Thread(target=hold, args=(log,), daemon=True).start()
held.wait()
TopicsQuestion(log._admin, ["clicks"], 0.2)
log.close()
"""


def test_answer_from_before_a_loss_is_not_believed_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # log           epoch 5, ends at 120     cut at 60: epoch 7
    # one thread    asks where epoch 3 ends ........................ 100
    # another                                 where 4 ends: 60            where 3 ends: 60
    log, asked = KafkaLog(KafkaSettings("127.0.0.1:1")), list[int]()

    def diverged(epoch: int, known: int, end: int) -> dict[Partition, int]:
        ends = {P: LogPosition(end, "id", epoch)}
        return log.agrees({P: LogPosition(90, "id", known)}, ends)

    def epoch_ends(
        _settings: KafkaSettings, epochs: Mapping[Partition, int], _timeout_s: float
    ) -> dict[Partition, int]:
        asked.append(epochs[P])
        if len(asked) == 1:
            assert diverged(7, 4, 60) == {P: 60}
            return {P: 100}
        return {P: 60}

    monkeypatch.setattr(adapter, "epoch_ends", epoch_ends)
    assert diverged(5, 3, 120) == {}
    assert diverged(7, 3, 60) == {P: 60}
    assert diverged(7, 4, 60) == {P: 60}
    # Each earlier epoch is requested once while an epoch is in force.
    assert asked == [3, 4, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="the end of a process is drawn out by glibc")
def test_late_answer_at_interpreter_exit_does_not_crash_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDS], cwd=_ROOT, check=False, timeout=60)  # noqa: S603 -- our own
    assert ended.returncode == 0


def test_default_address_without_kafka_is_reported_with_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "_FIRST_WAITS_S", (0.01,))
    with pytest.raises(UnavailableError) as raised:
        KafkaLog(KafkaSettings("127.0.0.1:1", named=False)).partitions("s")
    assert str(raised.value) == (
        "no Kafka at 127.0.0.1:1 (DOLL_KAFKA is not set);"
        ' start one with "doll up", or set DOLL_KAFKA'
    )
