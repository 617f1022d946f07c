"""Kafka starts with the properties that its image derives from docker-compose.yml."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from tests import compose
from tests.integration.composed import KAFKA, kafka_properties, kafka_variables
from tests.servers import kafka_jars

if TYPE_CHECKING:
    from pathlib import Path

# The image's own program, which its entry point calls. Kafka's jar contains it.
SET_UP = "kafka.docker.KafkaDockerWrapper"


def set_up(folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Write the properties and format the disk, as the container does at each start."""
    for name in ("default", "final"):
        (folder / name).mkdir(exist_ok=True)
    places = {"default": folder / "default", "mounted": KAFKA.parent, "final": folder / "final"}
    options = [part for name, at in places.items() for part in (f"--{name}-configs-dir", str(at))]
    return subprocess.run(  # noqa: S603 -- our own command line, no shell
        ["java", "-cp", f"{kafka_jars()}/*", SET_UP, "setup", *options],  # noqa: S607 -- whichever
        env={"PATH": os.environ["PATH"], **variables, "KAFKA_LOG_DIRS": str(folder / "data")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_kafka_image_accepts_properties_and_keeps_disk_on_restart(
    tmp_path: Path,
) -> None:
    kafka = compose.services()["kafka"]
    first = set_up(tmp_path, kafka_variables(kafka))
    assert first.returncode == 0, first.stderr
    made = (tmp_path / "final/server.properties").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in made if "=" in line and line[0] != "#")
    assert kafka_properties(kafka).items() <= pairs.items()
    identity = (tmp_path / "data/meta.properties").read_text()
    assert f"cluster.id={kafka_variables(kafka)['CLUSTER_ID']}" in identity

    again = set_up(tmp_path, kafka_variables(kafka))
    # The entry point continues then.
    assert "already formatted" in again.stdout + again.stderr
    assert (tmp_path / "data/meta.properties").read_text() == identity


def test_listeners_are_known_and_published_one_is_advertised() -> None:
    for port in ("29092", "19092"):
        kafka = compose.services({"STACK_KAFKA_PORT": port})["kafka"]
        properties = kafka_properties(kafka)
        listeners = dict(each.split("://") for each in properties["listeners"].split(","))
        assert set(listeners) == {"INSIDE", "HOST", "CONTROLLER"}
        [published] = kafka["ports"]
        assert published.endswith(listeners["HOST"])
        assert f"HOST://{published.rpartition(':')[0]}" in properties["advertised.listeners"]
