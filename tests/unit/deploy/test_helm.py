"""Values of the chart: wrong ones are refused, and the others reach their places."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.unit.deploy.rendering import CHART, ROOT, chart, helm, made, name_of, of_kind, pods

if TYPE_CHECKING:
    from pathlib import Path


def test_chart_has_the_product_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(
        r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert chart["version"] == chart["appVersion"] == version


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("coordinator.replicas=1", "coordinator"),
        ("worker.replica=3", "replica"),
        ("image.tag=latest", "tag"),
        ("image.registry=registry.example.com", "registry"),
        ("settings.DOLL_REDIS_PASSWORD=secret", "DOLL_REDIS_PASSWORD"),
        ("provisioner.enabled=true", "provisioner.market"),
    ],
)
def test_invalid_values_are_rejected_and_named(wrong: str, expected: str) -> None:
    options = ("--kube-version", "1.37", "--set", wrong)
    assert expected in helm("template", str(CHART), *options, refused=True).stderr


def test_registry_tag_and_role_annotations_are_applied() -> None:
    role = "eks\\.amazonaws\\.com/role-arn=arn:aws:iam::111122223333:role/doll"
    objects = chart(
        *("--set", "image.registry=registry.example.com/", "--set", "image.tag=0.2.0"),
        *("--set", f"coordinator.accountAnnotations.{role}"),
    )
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(objects).values()}
    registry = "registry.example.com"
    assert images == {f"{registry}/doll-worker:0.2.0", f"{registry}/doll-service:0.2.0"}
    (account,) = [
        each
        for each in of_kind(objects, "ServiceAccount")
        if each["metadata"]["name"] == "doll-coordinator"
    ]
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].endswith(":role/doll")


def test_operator_objects_can_be_disabled() -> None:
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


def test_changed_settings_or_market_restart_the_affected_pods() -> None:
    usual, changed = pods(made()), pods(chart("--set", "settings.DOLL_LOG_FORMAT=console"))
    assert [name for name in usual if usual[name] == changed[name]] == []
    rented = (
        ("--set", "provisioner.enabled=true", "--set", f"provisioner.market={m}") for m in "ab"
    )
    one, other = (pods(chart(*options)) for options in rented)
    restarted = {name for name in one if one[name] != other[name]}
    assert restarted == {"doll-admin", "doll-provisioner"}


def test_packaged_chart_contains_the_alerts(tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.iterdir()
    assert chart(path=package) == made()


def test_api_with_tls_is_probed_over_https() -> None:
    certificate = "settings.DOLL_API_TLS_CERT=/run/secrets/doll/api.pem"
    for objects, scheme in ((made(), None), (chart("--set", certificate), "HTTPS")):
        (container,) = pods(objects)["doll-admin"]["spec"]["containers"]
        assert container["readinessProbe"]["httpGet"].get("scheme") == scheme


def test_monitoring_labels_are_applied_to_monitors_and_rules() -> None:
    objects = chart("--set", "monitoring.labels.release=prometheus")
    found = of_kind(objects, "PodMonitor", "PrometheusRule")
    assert [each["metadata"]["labels"]["release"] for each in found] == ["prometheus"] * 2


def test_worker_grace_period_is_over_twice_its_leave_time() -> None:
    objects = chart("--set-string", "settings.DOLL_LEAVE_S=40.5")
    assert pods(objects)["doll-worker"]["spec"]["terminationGracePeriodSeconds"] == 92


def test_egress_can_be_limited_to_server_addresses() -> None:
    objects = chart("--set", "networkPolicy.servers[0].ipBlock.cidr=10.0.0.0/8")
    (policy,) = (each for each in objects if name_of(each) == "NetworkPolicy/doll-servers")
    _, servers = policy["spec"]["egress"]
    assert servers["to"] == [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    assert {"protocol": "TCP", "port": 9093} in servers["ports"]
