"""The part of MLflow's REST API that the adapter uses, in memory, modelled on real answers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx2

if TYPE_CHECKING:
    from collections.abc import Callable

Body = dict[str, Any]
_FILTER = re.compile(r"""(name|tags\.`([^`]+)`) = (?:'([^']*)'|"([^"]*)")""")


class FakeMlflow:
    """A server in memory, which a client of httpx2 reaches through `transport`."""

    def __init__(self, token: str = "") -> None:
        self.experiments = {"Default": "0"}
        self.runs = dict[str, Body]()
        self.models = dict[str, list[Body]]()
        self.aliases = dict[tuple[str, str], str]()
        self.asked = list[str]()  # paths
        # Answers by path that replace the right ones.
        self.answers = dict[str, httpx2.Response]()
        self._token = token
        self.transport = httpx2.MockTransport(self._answer)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.removeprefix("/api/2.0/mlflow/")
        self.asked.append(path)
        if self._token and request.headers.get("Authorization") != f"Bearer {self._token}":
            return httpx2.Response(401, text="You are not authenticated.")
        if path in self.answers:
            return self.answers.pop(path)
        known: dict[str, Callable[[Body], httpx2.Response]] = {
            "experiments/get-by-name": self._experiment,
            "runs/create": self._create_run,
            "runs/search": self._search_runs,
            "runs/log-batch": self._log,
            "runs/update": self._update_run,
            "runs/delete": self._delete_run,
            "metrics/get-history": self._history,
            "registered-models/create": self._create_model,
            "registered-models/alias": self._alias,
            "model-versions/create": self._create_version,
            "model-versions/search": self._search_versions,
            "model-versions/set-tag": self._set_version_tag,
        }
        if path not in known:
            return httpx2.Response(404, text="<!doctype html>")
        body = json.loads(request.content) if request.content else dict(request.url.params)
        return known[path](body)

    def _experiment(self, body: Body) -> httpx2.Response:
        found = self.experiments.get(body["experiment_name"])
        if found is None:
            return refused(404, "RESOURCE_DOES_NOT_EXIST", "Could not find experiment")
        return said(experiment={"experiment_id": found, "lifecycle_stage": "active"})

    def _create_run(self, body: Body) -> httpx2.Response:
        info = {"run_id": f"r{len(self.runs)}", "status": "RUNNING", **body}
        data = {"tags": info.pop("tags"), "params": [], "metrics": []}
        self.runs[info["run_id"]] = run = {"info": info, "data": data}
        return said(run=run)

    def _search_runs(self, body: Body) -> httpx2.Response:
        found = [
            run
            for run in self.runs.values()
            if run["info"]["experiment_id"] in body["experiment_ids"]
            and matches(body["filter"], "", run["data"]["tags"])
        ]
        return said(runs=found) if found else said()

    def _log(self, body: Body) -> httpx2.Response:
        if body["run_id"] not in self.runs:
            return refused(
                404, "RESOURCE_DOES_NOT_EXIST", f"Run with id={body['run_id']} not found"
            )
        if len(body.get("metrics", ())) > 1000:
            return refused(400, "INVALID_PARAMETER_VALUE", "at most 1000 metrics")
        kept = self.runs[body["run_id"]]["data"]
        kept["metrics"] += [each for each in body.get("metrics", ()) if each not in kept["metrics"]]
        kept["params"] += body.get("params", ())
        given = {tag["key"] for tag in body.get("tags", ())}
        kept["tags"] = [tag for tag in kept["tags"] if tag["key"] not in given]
        kept["tags"] += body.get("tags", ())
        return said()

    def _update_run(self, body: Body) -> httpx2.Response:
        self.runs[body["run_id"]]["info"]["status"] = body["status"]
        return said()

    def _delete_run(self, body: Body) -> httpx2.Response:
        del self.runs[body["run_id"]]
        return said()

    def _history(self, body: Body) -> httpx2.Response:
        kept = self.runs[body["run_id"]]["data"]["metrics"]
        return said(metrics=[each for each in kept if each["key"] == body["metric_key"]])

    def _create_model(self, body: Body) -> httpx2.Response:
        if body["name"] in self.models:
            return refused(400, "RESOURCE_ALREADY_EXISTS", "Registered Model already exists.")
        self.models[body["name"]] = []
        return said(registered_model={"name": body["name"]})

    def _alias(self, body: Body) -> httpx2.Response:
        self.aliases[body["name"], body["alias"]] = body["version"]
        return said()

    def _create_version(self, body: Body) -> httpx2.Response:
        if body["source"].startswith("file:"):
            return refused(400, "INVALID_PARAMETER_VALUE", "Invalid model version source")
        versions = self.models[body["name"]]
        versions.append(version := {**body, "version": str(len(versions) + 1)})
        return said(model_version=version)

    def _search_versions(self, body: Body) -> httpx2.Response:
        found = [
            version
            for name, versions in self.models.items()
            for version in versions
            if matches(body["filter"], name, version["tags"])
        ]
        at = int(body["page_token"] or 0)  # a page has two
        more = {"next_page_token": str(at + 2)} if len(found) > at + 2 else {}
        return said(model_versions=found[at : at + 2], **more) if found else said()

    def _set_version_tag(self, body: Body) -> httpx2.Response:
        version = self.models[body["name"]][int(body["version"]) - 1]
        version["tags"] = [tag for tag in version["tags"] if tag["key"] != body["key"]]
        version["tags"].append({"key": body["key"], "value": body["value"]})
        return said()


def said(**answer: object) -> httpx2.Response:
    return httpx2.Response(200, json=answer)


def refused(status: int, code: str, message: str) -> httpx2.Response:
    return httpx2.Response(status, json={"error_code": code, "message": message})


def matches(wanted: str, name: str, tags: list[Body]) -> bool:
    found = {tag["key"]: tag["value"] for tag in tags}
    return all(
        (found.get(key) if key else name) == (single or double)
        for _, key, single, double in _FILTER.findall(wanted)
    )
