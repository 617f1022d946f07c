"""A real Prometheus that scrapes processes of this machine."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlencode

from common.embedded.process import Child, free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from common.embedded.services import Kind

_HERE = "127.0.0.1"
_PATIENCE_S = 20.0
_ANSWER_S = 10.0


class Line(NamedTuple):
    """One series of an answer."""

    labels: dict[str, str]
    points: list[tuple[float, float]]  # seconds since 1970, value


class Rule(NamedTuple):
    """An alerting rule with its health and state."""

    name: str
    # `ok`, `err`, or `unknown` before its evaluation.
    health: str
    # `inactive`, `pending` or `firing`.
    state: str


class Prometheus:
    """A server on this machine, which ends with this object.

    Args:
        folder: Folder for its data and its log, created if it does not exist.
        ports: Ports to scrape, by service.
        rules: File of alerts.
        scrape_s: Interval of scrapes and of rule evaluations, in whole seconds.

    Raises:
        UnavailableError: If it does not start.
    """

    def __init__(
        self,
        program: str,
        folder: Path,
        ports: Mapping[Kind, Sequence[int]],
        rules: Path,
        scrape_s: int = 1,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        times = ("scrape_interval", "scrape_timeout", "evaluation_interval")
        settings = {
            "global": dict.fromkeys(times, f"{scrape_s}s"),
            "rule_files": [str(rules.absolute())],
            "scrape_configs": [
                {
                    "job_name": service,
                    "static_configs": [{"targets": [f"{_HERE}:{port}" for port in own]}],
                }
                for service, own in ports.items()
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        self._port = free_port()
        self.rate_interval_s = 4 * scrape_s  # Grafana's $__rate_interval
        command = (
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={_HERE}:{self._port}",
            "--log.level=warn",
        )
        self._child = Child(command, folder / "prometheus.log")
        try:
            self._child.await_ready(self._ready, _PATIENCE_S)
        except BaseException:
            self._child.kill()
            raise

    def now(self, expression: str) -> list[Line]:
        """Return the current result of a query.

        Raises:
            OSError: If Prometheus rejects the query or does not answer.
        """
        return _lines(self._ask("query", query=expression))

    def alerts(self) -> list[Rule]:
        """Return all rules."""
        rules = [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]
        return [Rule(rule["name"], rule["health"], rule["state"]) for rule in rules]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def _ready(self) -> bool:
        try:
            self._get("/-/ready")
        except OSError:
            return False
        return True

    def _ask(self, what: str, **parameters: str | float) -> Any:  # noqa: ANN401 -- JSON
        return json.loads(self._get(f"/api/v1/{what}?{urlencode(parameters)}"))["data"]

    def _get(self, path: str) -> bytes:
        connection = HTTPConnection(_HERE, self._port, timeout=_ANSWER_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != HTTPStatus.OK:
            raise OSError(f"Prometheus answers {path} with {answer.status}: {body!r}")
        return body


def filled(expression: str, job: str, rate_interval_s: int) -> str:
    """Return a dashboard's query as Grafana sends it to Prometheus.

    Args:
        expression: Expression in the dashboard.
        job: The selected job.
        rate_interval_s: Four times the interval of scrapes.
    """
    return expression.replace("$job_name", job).replace("$__rate_interval", f"{rate_interval_s}s")


def finite(lines: Sequence[Line]) -> bool:
    """Return True if a line has a finite number."""
    return any(math.isfinite(value) for line in lines for _, value in line.points)


def _lines(answer: Mapping[str, Any]) -> list[Line]:
    return [
        Line(series["metric"], [(at_s, float(value)) for at_s, value in (series["value"],)])
        for series in answer["result"]
    ]
