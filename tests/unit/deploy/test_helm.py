"""The chart makes the same objects as the overlays: neither drifts from what tests hold one to."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.unit.deploy.rendering import (
    CHART,
    KUBERNETES,
    ROOT,
    Manifest,
    chart,
    name_of,
    of_kind,
    overlay,
    run_helm,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

MARKET = KUBERNETES / "overlays/ec2/market.yaml"
SUM = re.compile(r"-[a-z0-9]{10}$")  # which kustomize puts behind the name of a ConfigMap
OPTIONS = {
    "production": (),
    "ec2": ("--set-file", f"provisioner.market={MARKET}"),
    "spot": (),
    "gpu": (),
    "hold": (),
}


def values_for(name: str) -> tuple[str, ...]:
    file = CHART / f"values-{name}.yaml"
    return (*(("-f", str(file)) if file.exists() else ()), *OPTIONS[name])


def compared(objects: Iterable[Manifest]) -> dict[str, Manifest]:
    """By name, without what only one of the two tools writes."""
    copied: list[Manifest] = json.loads(json.dumps(list(objects)))
    maps = [each["metadata"]["name"] for each in copied if each["kind"] == "ConfigMap"]
    text = json.dumps(copied)
    for name in maps:
        text = text.replace(name, SUM.sub("", name))
    found = dict[str, Manifest]()
    for each in json.loads(text):
        labels = each["metadata"]["labels"]
        labels.pop("helm.sh/chart", None)
        labels.pop("app.kubernetes.io/managed-by", None)
        template = each.get("spec", {}).get("template", {"metadata": {}})
        for key in template["metadata"].pop("annotations", {}):
            assert key.startswith("checksum/")  # in place of the sum in the ConfigMap's name
        if "template" in each.get("spec", {}):
            _sort(template)
        assert name_of(each) not in found
        found[name_of(each)] = each
    # Helm makes namespaces by an option, without labels.
    return {name: each for name, each in found.items() if each["kind"] != "Namespace"}


def _sort(template: Manifest) -> None:
    """Put into one order what has none."""
    (container,) = template["spec"]["containers"]
    for items in (container["env"], container["volumeMounts"], template["spec"]["volumes"]):
        items.sort(key=lambda item: str(item["name"]))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_chart_makes_the_objects_of_the_overlay(name: str) -> None:
    made, wanted = compared(chart(*values_for(name))), compared(overlay(name))
    assert made.keys() == wanted.keys()
    for each in wanted:
        assert made[each] == wanted[each], each


def test_every_overlay_but_the_local_one_has_values_of_its_own() -> None:
    files = {path.stem.removeprefix("values-") for path in CHART.glob("values-*.yaml")}
    assert files | {"production"} == OPTIONS.keys()


def test_the_chart_is_of_our_version() -> None:
    told = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(
        r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert told["version"] == told["appVersion"] == version


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("coordinator.replicas=1", "coordinator"),
        ("worker.replica=3", "replica"),
        ("image.tag=latest", "tag"),
        ("image.registry=registry.example.com", "registry"),
        ("settings.DOLL_REDIS_PASSWORD=secret", "DOLL_REDIS_PASSWORD"),
        ("provisioner.enabled=true", "provisioner.market"),
    ],
)
def test_values_that_make_no_sense_are_refused_and_named(wrong: str, told: str) -> None:
    assert told in run_helm("--set", wrong, refused=True).stderr


def test_a_registry_a_tag_and_roles_are_where_they_belong() -> None:
    role = "eks\\.amazonaws\\.com/role-arn=arn:aws:iam::111122223333:role/doll"
    objects = chart(
        *("--set", "image.registry=registry.example.com/", "--set", "image.tag=0.2.0"),
        *("--set", f"coordinator.accountAnnotations.{role}"),
    )
    images = {
        each["spec"]["template"]["spec"]["containers"][0]["image"]
        for each in of_kind(objects, "Deployment")
    }
    registry = "registry.example.com"
    assert images == {f"{registry}/doll-worker:0.2.0", f"{registry}/doll-service:0.2.0"}
    (account,) = [
        each
        for each in of_kind(objects, "ServiceAccount")
        if each["metadata"]["name"] == "doll-coordinator"
    ]
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].endswith(":role/doll")


def test_a_cluster_without_operators_gets_no_objects_of_theirs() -> None:
    objects = chart(
        *("--set", "monitoring.enabled=false", "--set", "networkPolicy.enabled=false"),
        *("--set", "worker.autoscaling.enabled=false", "--set", "secrets.name="),
    )
    kinds = {each["kind"] for each in objects}
    assert not kinds & {"PodMonitor", "PrometheusRule", "ScaledObject", "NetworkPolicy"}
    (worker,) = [
        each for each in of_kind(objects, "Deployment") if each["metadata"]["name"] == "doll-worker"
    ]
    assert worker["spec"]["replicas"] == 2
    assert "secret" not in json.dumps(worker)
