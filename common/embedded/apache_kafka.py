"""Apache Kafka of one node as a child process, for CI, tests and `make kafka`.

`python -m common.embedded.apache_kafka --data DIR [--port N]` runs a node until Ctrl-C.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from common.embedded.process import Child, free_port
from common.errors import UnavailableError, UserError
from common.kafka.log import KafkaLog
from common.kafka.port import NewTopic
from common.kafka.settings import KafkaSettings

_POM_FOLDER = Path(__file__).parents[2] / "deploy" / "kafka"
_BROKER = "kafka.Kafka"
# Java ignores an archive of other jars. These options suppress its message about that.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")
# Start of a record batch of format 2: base offset, length, then (after leader epoch, format,
# checksum and attributes) the last offset's distance from the base.
_BATCH = struct.Struct(">qi11xi")
# The length counts the bytes after this position.
_BATCH_LENGTH_FROM = 12

# Durable, but quick to notice dead members: Kafka's default limits of session and heartbeat times
# are for large clusters.
_PROPERTIES = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners={listeners}
advertised.listeners={advertised}
listener.security.protocol.map={protocols},CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}/log
auto.create.topics.enable=false
default.replication.factor=1
min.insync.replicas=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
group.consumer.min.session.timeout.ms=500
group.consumer.session.timeout.ms=2000
group.consumer.min.heartbeat.interval.ms=100
group.consumer.heartbeat.interval.ms=250
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
num.network.threads=2
num.io.threads=2
background.threads=2
log.cleaner.dedupe.buffer.size=4194304
"""

_LOGGING = """\
status = error
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d %p %c: %m%n
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
"""


def resolve(fetching: Callable[[], object] = lambda: None, folder: Path = _POM_FOLDER) -> Path:
    """Find Kafka's jars in this checkout, or fetch them with Maven.

    Args:
        fetching: Called before Maven starts, which may run for minutes.
        folder: Folder whose `pom.xml` lists the jars.

    Returns:
        The folder of the jars.

    Raises:
        UserError: If the jars cannot be fetched here. The message says what is missing.
    """
    if shutil.which("java") is None:
        raise UserError("no Java here: install a JRE of version 17 or later")
    jars, done = folder / "target" / "lib", folder / "target" / "resolved"
    pom = folder / "pom.xml"
    if not pom.is_file():
        raise UserError(f"no {pom}: Apache Kafka can only be started from a checkout")
    try:
        done.parent.mkdir(exist_ok=True)
        lock = (done.parent / "lock").open("w")
    except OSError as error:
        raise UserError(f"jars cannot be stored in {done.parent}: {error}") from error
    with lock:
        # Two test runs may call this at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == pom.read_text():
            _see_to_archive(jars)
            return jars
        maven = shutil.which("mvn")
        if maven is None:
            raise UserError(
                f"Maven was not found, which must fetch the packages of {pom}; install Maven 3"
            )
        fetching()
        shutil.rmtree(jars, ignore_errors=True)
        ended = subprocess.run(  # noqa: S603 -- our own command line, no shell
            [maven, "-q", "-B", "-f", str(pom), "package"],
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            said = (ended.stdout + ended.stderr).strip()[-800:]
            raise UserError(f"Maven could not fetch the packages of {pom}: {said}")
        done.write_text(pom.read_text())
        _see_to_archive(jars)
    return jars


def _archive_of(jars: Path) -> Path:
    """Return the path of this Java's archive of the broker's loaded classes."""
    java = Path(shutil.which("java") or "java")
    # Each version of Java needs its own archive.
    made = int(java.stat().st_mtime) if java.exists() else 0
    return jars.parent / f"classes-{made}.jsa"


class ApacheKafka(Child):
    """A KRaft node on 127.0.0.1, broker and controller in one, which ends with its parent.

    Args:
        jars: Folder of Kafka's jars, see `resolve`.
        data: Folder of the node. Existing logs in it are served again.
        port: Port for clients; a free one if 0.
        proxies: Ports of proxies in front of the node. Clients connect to the address that a broker
            advertises, so each proxy has a listener in `proxied` that advertises the proxy.
        properties: Further lines of the configuration.

    Raises:
        UnavailableError: If the node does not start. The message quotes its output.
    """

    node = 1
    start_s = 60.0
    stop_s = 20.0

    def __init__(
        self,
        jars: Path,
        data: Path,
        port: int = 0,
        proxies: Sequence[int] = (),
        properties: str = "",
    ) -> None:
        self._classpath = f"{jars}/*"
        archive = _archive_of(jars)
        self._classes = archive if archive.exists() and archive.stat().st_size else None
        self.data = data
        self._port = port or free_port()
        self._proxies = tuple(proxies)
        # Target port of each proxy.
        self.proxied = tuple(free_port() for _ in proxies)
        self._properties = properties
        self.controller_port = free_port()
        self._write_configuration()
        self._format()
        self.settings = KafkaSettings(bootstrap=f"127.0.0.1:{self._port}")
        super().__init__(
            self._java(_BROKER, str(data / "server.properties")), data / "console.log", name="Kafka"
        )

    def cut(self, topic: str, partition: int, end: int) -> int:
        """Delete the records of a partition from an offset on, like a power cut or a bad disk.

        The broker must not run; call `kill` before. After `restart`, the partition has a new leader
        epoch. Records of one batch are lost together.

        Returns:
            The new end of the log: `end`, or below if `end` was inside a batch.

        Raises:
            ValueError: If the broker runs, or there are no such records.
        """
        if self.running():
            raise ValueError("stop the broker first: it would not notice that its files change")
        (self.data / "log" / ".kafka_cleanshutdown").unlink(missing_ok=True)
        segments = sorted((self.data / "log" / f"{topic}-{partition}").glob("*.log"))
        for index, segment in enumerate(segments):
            for at, first, last in _batches(segment):
                if last < end:
                    continue
                os.truncate(segment, at)
                for lost in segments[index + 1 :]:
                    lost.unlink()
                # Kafka rebuilds missing indexes.
                for kind in (".index", ".timeindex"):
                    segment.with_suffix(kind).unlink(missing_ok=True)
                return first
        raise ValueError(f"{topic}[{partition}] has no records from {end} on")

    def _write_configuration(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        (self.data / "server.properties").write_text(self._configuration())
        (self.data / "log4j2.properties").write_text(_LOGGING.format(log=self.data / "server.log"))

    def _configuration(self) -> str:
        """Return the broker's configuration. If a name occurs twice, the last line counts."""
        names = ["PLAINTEXT", *(f"PROXY{number}" for number in range(len(self._proxies)))]
        listeners = _listeners(names, (self._port, *self.proxied))
        text = _PROPERTIES.format(
            node=self.node,
            listeners=f"{listeners},CONTROLLER://127.0.0.1:{self.controller_port}",
            advertised=_listeners(names, (self._port, *self._proxies)),
            protocols=",".join(f"{name}:PLAINTEXT" for name in names),
            controller_port=self.controller_port,
            data=self.data,
        )
        return text + self._properties

    def _cluster(self) -> str:
        """Return the id of a new cluster."""
        return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")

    def _format(self, *options: str) -> None:
        # The folder was formatted before.
        if (self.data / "log" / "meta.properties").exists():
            return
        command = self._java("kafka.tools.StorageTool", "format")
        # Option and id are one argument because an id may begin with a dash.
        command += [f"--cluster-id={self._cluster()}", "-c", str(self.data / "server.properties")]
        ended = subprocess.run(  # noqa: S603 -- our own command line, no shell
            [*command, *options], capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            raise UnavailableError(
                f"Kafka's storage at {self.data} cannot be used: {ended.stdout}{ended.stderr}"
            )

    def _java(self, *main: str) -> list[str]:
        return [
            "java",
            "-Xmx512m",
            "-Xms128m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            *([f"-XX:SharedArchiveFile={self._classes}", *_QUIET] if self._classes else []),
            f"-Dlog4j2.configurationFile={self.data / 'log4j2.properties'}",
            "-cp",
            self._classpath,
            *main,
        ]

    def _is_ready(self) -> bool:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self._port)) != 0:
                return False
        # After a crash, the broker answers some seconds before its controller registers it again.
        admin = AdminClient({"bootstrap.servers": self.settings.bootstrap, "log_level": 2})
        try:
            return self.node in admin.list_topics(timeout=1.0).brokers
        except KafkaException:
            return False


class _Archiving(ApacheKafka):
    """A node that writes an archive of its loaded classes when it stops."""

    # Writing the archive takes a few seconds of processor time, longer on a busy machine.
    stop_s = 120.0

    def __init__(self, jars: Path, data: Path, archive: Path) -> None:
        self._archive = archive
        super().__init__(jars, data)

    def _java(self, *main: str) -> list[str]:
        java, *others = super()._java(*main)
        leaves = [f"-XX:ArchiveClassesAtExit={self._archive}"] * (main[0] == _BROKER)
        return [java, *leaves, *others]


def _see_to_archive(jars: Path) -> None:
    """Make the archive of loaded classes if it is missing. With it, a broker starts twice as fast.

    Java ignores an archive that does not fit.
    """
    archive = _archive_of(jars)
    if archive.exists() or not list(jars.glob("kafka-server-*.jar")):
        return
    for old in jars.parent.glob("classes-*.jsa"):
        old.unlink()
    part = archive.with_suffix(".part")
    part.unlink(missing_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        suppress(UnavailableError),
        _Archiving(jars, Path(folder), part) as kafka,
        closing(KafkaLog(kafka.settings)) as log,
        closing(log.writer()) as writer,
    ):
        log.create_topics([NewTopic("loaded")])
        writer.append("loaded", b"")
        writer.flush(kafka.stop_s)
    # An empty archive marks a Java that cannot make one.
    if not part.exists():
        part.touch()
    part.rename(archive)


def main() -> None:
    """Run a broker in the foreground, for `make kafka`."""
    arguments = argparse.ArgumentParser(description="Run Apache Kafka on this machine.")
    arguments.add_argument("--data", type=Path, required=True, help="folder for the broker's logs")
    arguments.add_argument("--port", type=int, default=9092)
    given = arguments.parse_args()
    with (
        suppress(KeyboardInterrupt),
        ApacheKafka(resolve(), given.data.absolute(), given.port) as kafka,
    ):
        sys.stdout.write(f"Kafka is at {kafka.settings.bootstrap}; Ctrl-C ends it\n")
        sys.stdout.flush()
        kafka.await_end()


def _batches(segment: Path) -> Iterator[tuple[int, int, int]]:
    """Yield the position of each record batch in a segment, and its first and last offset."""
    with segment.open("rb") as file:
        while len(header := file.read(_BATCH.size)) == _BATCH.size:
            at = file.tell() - _BATCH.size
            first, length, last = _BATCH.unpack(header)
            yield at, first, first + last
            file.seek(at + _BATCH_LENGTH_FROM + length)


def _listeners(names: Iterable[str], ports: Iterable[int]) -> str:
    pairs = zip(names, ports, strict=True)
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in pairs)


if __name__ == "__main__":
    main()
