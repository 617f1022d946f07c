"""Manifests of the chart, rendered by the real helm, are valid, hardened and consistent."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from common.config.program import command_line
from common.config.settings import Settings, read_settings
from common.telemetry.metrics.__main__ import sections
from tests.unit.deploy.rendering import (
    CHART,
    FILES,
    ROOT,
    Manifest,
    chart,
    made,
    name_of,
    of_kind,
    pods,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# The oldest version with all fields that we use, and the newest one that we test.
VERSIONS = ("1.30", "1.37")
# A leaving worker sends its last announcements in this time.
ANNOUNCEMENTS_S = 5
SECURITY = re.compile(r"DOLL_KAFKA_(SECURITY|SASL|SSL)_\w+")
# Fields of custom resources that we use, at any depth. The validator lacks their schemas.
CUSTOM = {
    "PodMonitor": {
        *("jobLabel", "selector", "matchLabels", "podMetricsEndpoints"),
        *("port", "interval", "scrapeTimeout", "honorLabels"),
    },
    "PrometheusRule": {
        *("groups", "name", "interval", "rules"),
        *("alert", "record", "expr", "for", "keep_firing_for", "labels", "annotations"),
    },
    "ScaledObject": {
        *("scaleTargetRef", "name", "minReplicaCount", "maxReplicaCount", "pollingInterval"),
        *("cooldownPeriod", "advanced", "horizontalPodAutoscalerConfig", "behavior", "scaleUp"),
        *("scaleDown", "stabilizationWindowSeconds", "policies", "type", "value"),
        *("periodSeconds", "triggers", "metricType", "metadata"),
        *("serverAddress", "query", "threshold", "ignoreNullValues"),
    },
}
FREE = {"labels", "annotations", "matchLabels"}  # mappings with arbitrary keys


@pytest.fixture(
    params=[(), *((file,) for file in FILES), ("spot", "gpu")],
    ids=lambda files: "-".join(files) or "default",
)
def objects(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    """Return all objects of the chart: by default, and with each of its values files."""
    return made(*request.param)


def selects(selector: Mapping[str, Any], template: Manifest) -> bool:
    assert {"matchLabels"} <= set(selector) <= {"matchLabels", "matchExpressions"}
    labels = template["metadata"]["labels"]
    among = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in among)
    return selector["matchLabels"].items() <= labels.items() and all(
        labels[each["key"]] in each["values"] for each in among
    )


def container_of(template: Manifest) -> Manifest:
    (container,) = template["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def environment_of(objects: tuple[Manifest, ...], container: Manifest) -> dict[str, str]:
    """Return the variables of the process. A 2 stands for values that only a node knows."""
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    found = dict[str, str]()
    for source in container["envFrom"]:
        found |= maps[source["configMapRef"]["name"]]
    return found | {each["name"]: each.get("value", "2") for each in container["env"]}


def fields_of(value: object, below: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from fields_of(each)
    elif isinstance(value, dict) and below not in FREE:
        for key, each in value.items():
            yield key
            yield from fields_of(each, key)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for_kubernetes(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a cache, the schema would be read again for each object.
    read = cache(kubernetes_validate.utils.schema_contents)
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", read)
    files = [(), *((file,) for file in FILES)]
    unique = {json.dumps(each): each for names in files for each in made(*names)}
    built_in = [each for each in unique.values() if each["kind"] not in CUSTOM]
    assert built_in
    for each in built_in:
        kubernetes_validate.validate(each, version, strict=True)


def test_custom_objects_have_only_known_fields(objects: tuple[Manifest, ...]) -> None:
    for each in of_kind(objects, *CUSTOM):
        assert set(fields_of(each["spec"])) <= CUSTOM[each["kind"]], name_of(each)


def test_objects_are_unique_and_in_the_namespace(
    objects: tuple[Manifest, ...],
) -> None:
    names = [name_of(each) for each in objects]
    assert len(set(names)) == len(names)
    for each in objects:
        if each["kind"] != "PriorityClass":
            assert each["metadata"]["namespace"] == "doll", name_of(each)
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "doll"


def test_chart_contains_no_secrets(objects: tuple[Manifest, ...]) -> None:
    assert of_kind(objects, "Secret") == []


def test_every_pod_is_hardened_and_runs_the_product_version(
    objects: tuple[Manifest, ...],
) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for template in pods(objects).values():
        spec, container = template["spec"], container_of(template)
        assert re.fullmatch(rf"doll-(worker|service):{version}(-cuda)?", container["image"])
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        places = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            assert mount.get("readOnly") or "emptyDir" in places[mount["name"]]
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}  # noqa: S108 -- the pod's


def test_every_pod_has_probes_limits_and_its_own_account(
    objects: tuple[Manifest, ...],
) -> None:
    accounts = {each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount")}
    for workload, template in pods(objects).items():
        container = container_of(template)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["metrics"] == 9102
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
        if "api" in ports:
            assert ports["api"] == 8080
            path = "/v2/health/ready" if workload == "doll-serve" else "/healthz"
            assert container["readinessProbe"]["httpGet"] == {"path": path, "port": "api"}
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][kind].keys()
        assert template["spec"]["serviceAccountName"] == workload
        assert workload in accounts


def test_every_pod_runs_a_service_under_its_pod_name(
    objects: tuple[Manifest, ...],
) -> None:
    for template in pods(objects).values():
        container = container_of(template)
        service, *rest = container["args"]
        assert service == container["name"]
        assert (ROOT / "services" / service).is_dir()
        assert command_line(service, rest).name == "$(POD_NAME)"
        assert "POD_NAME" in {each["name"] for each in container["env"]}


def test_every_variable_is_a_valid_setting(objects: tuple[Manifest, ...], tmp_path: Path) -> None:
    for template in pods(objects).values():
        given = environment_of(objects, container_of(template))
        ours = {key: value for key, value in given.items() if key.startswith("DOLL_")}
        for key in ours:
            field = key.removeprefix("DOLL_").removesuffix("_FILE").lower()
            assert field in Settings.model_fields or SECURITY.fullmatch(key), key
        secret = tmp_path / "secret"
        secret.write_text("a password")
        files = {key: str(secret) for key in ours if key.endswith("_FILE")}
        assert read_settings(given | files).metrics_port == 9102


def test_grace_period_is_longer_than_the_leave_time(objects: tuple[Manifest, ...]) -> None:
    for template in pods(objects).values():
        settings = environment_of(objects, container_of(template))
        enough = float(settings["DOLL_LEAVE_S"]) + ANNOUNCEMENTS_S
        assert template["spec"]["terminationGracePeriodSeconds"] > enough


def test_referenced_objects_exist_or_the_guide_creates_them(
    objects: tuple[Manifest, ...],
) -> None:
    maps = {each["metadata"]["name"] for each in of_kind(objects, "ConfigMap")}
    guide = (ROOT / "docs/howto/kubernetes.md").read_text()
    mounted = set[str]()
    for template in pods(objects).values():
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
            if "secret" in volume:
                assert f"secret generic {volume['secret']['secretName']}" in guide
                for item in volume["secret"]["items"]:
                    assert f"--from-file={item['key']}" in guide
                    mounted.add(f"/run/secrets/doll/{item['path']}")
        given = environment_of(objects, container_of(template))
        named = {each for each in given.values() if each.startswith("/run/secrets/")}
        assert named <= mounted


def test_every_workload_selects_only_its_own_pods(objects: tuple[Manifest, ...]) -> None:
    templates = pods(objects)
    for each in of_kind(objects, "Deployment", "StatefulSet"):
        selector = each["spec"]["selector"]
        found = [other for other, pod in templates.items() if selects(selector, pod)]
        assert found == [each["metadata"]["name"]]
    for each in of_kind(objects, "Service"):
        selector = {"matchLabels": each["spec"]["selector"]}
        (pod,) = [pod for pod in templates.values() if selects(selector, pod)]
        ports = {port["name"] for port in container_of(pod)["ports"]}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports


def test_every_disruption_budget_protects_one_workload_and_allows_drains(
    objects: tuple[Manifest, ...],
) -> None:
    replicas = {
        each["metadata"]["name"]: each["spec"].get("replicas", 2)  # an autoscaler's least
        for each in of_kind(objects, "Deployment", "StatefulSet")
    }
    for each in of_kind(objects, "PodDisruptionBudget"):
        selector = each["spec"]["selector"]
        (found,) = [other for other, pod in pods(objects).items() if selects(selector, pod)]
        allowed = each["spec"]["maxUnavailable"]
        if isinstance(allowed, str):  # a share, rounded up
            allowed = -(-replicas[found] * int(allowed.removesuffix("%")) // 100)
        assert 1 <= allowed < replicas[found], found


def test_coordinator_has_at_least_two_replicas(objects: tuple[Manifest, ...]) -> None:
    (found,) = [
        each
        for each in of_kind(objects, "Deployment")
        if each["metadata"]["name"] == "doll-coordinator"
    ]
    assert found["spec"]["replicas"] >= 2
    assert found["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_network_policies_deny_all_other_traffic(objects: tuple[Manifest, ...]) -> None:
    policies = {each["metadata"]["name"]: each for each in of_kind(objects, "NetworkPolicy")}
    for each in policies.values():
        assert [pod for pod in pods(objects).values() if selects(each["spec"]["podSelector"], pod)]
    nothing = policies["doll-nothing"]["spec"]
    assert all(selects(nothing["podSelector"], pod) for pod in pods(objects).values())
    assert set(nothing["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in nothing
    assert "egress" not in nothing
    rules = policies["doll-servers"]["spec"]["egress"]
    ports = {port["port"] for rule in rules for port in rule["ports"]}
    assert 80 not in ports  # EC2's instance metadata
    for pod in pods(objects).values():
        settings = environment_of(objects, container_of(pod))
        kafka, redis = settings["DOLL_KAFKA"], settings["DOLL_REDIS"]
        assert {int(each.rpartition(":")[2]) for each in kafka.split(",")} <= ports
        assert int(re.sub(r".*:(\d+)/\d+", r"\1", redis)) in ports


def test_every_pod_is_scraped_by_the_pod_monitor(objects: tuple[Manifest, ...]) -> None:
    for each in of_kind(objects, "PodMonitor"):
        (endpoint,) = each["spec"]["podMetricsEndpoints"]
        for pod in pods(objects).values():
            assert selects(each["spec"]["selector"], pod)
            assert endpoint["port"] in {port["name"] for port in container_of(pod)["ports"]}
            assert each["spec"]["jobLabel"] in pod["metadata"]["labels"]


def test_workers_are_scaled_by_existing_metrics_only() -> None:
    objects = made()
    (scaler,) = of_kind(objects, "ScaledObject")
    spec = scaler["spec"]
    target = spec["scaleTargetRef"]["name"]
    (workload,) = [e for e in of_kind(objects, "Deployment") if e["metadata"]["name"] == target]
    assert "replicas" not in workload["spec"]
    assert 1 < spec["minReplicaCount"] < spec["maxReplicaCount"]
    names = {metric.name for metrics in sections().values() for metric in metrics}
    queries = " ".join(trigger["metadata"]["query"] for trigger in spec["triggers"])
    used = set(re.findall(r"doll_\w+", queries))
    assert {"doll_stability_ratio", "doll_stream_lag_records", "doll_batches_waiting"} <= used
    assert used <= names
    assert 'bound="necessary"' in queries
    assert all(float(trigger["metadata"]["threshold"]) > 0 for trigger in spec["triggers"])


def test_chart_alerts_match_the_compose_alerts() -> None:
    (rules,) = of_kind(made(), "PrometheusRule")
    alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    assert rules["spec"] == alerts


def test_only_workers_run_on_spot_nodes_and_have_no_disruption_budget() -> None:
    objects = made("spot")
    tolerant = [name for name, pod in pods(objects).items() if "tolerations" in pod["spec"]]
    assert tolerant == ["doll-worker"]
    spec = pods(objects)["doll-worker"]["spec"]
    (priority,) = of_kind(objects, "PriorityClass")
    assert spec["priorityClassName"] == priority["metadata"]["name"]
    # The default priority is 0.
    assert priority["value"] < 0
    budgets = {each["metadata"]["name"] for each in of_kind(objects, "PodDisruptionBudget")}
    assert budgets == {"doll-coordinator", "doll-admin"}


def test_workers_have_a_tier_and_reliable_ones_run_beside_spot_ones() -> None:
    def tiers(objects: tuple[Manifest, ...]) -> dict[str, str]:
        workers = {n: pod for n, pod in pods(objects).items() if n.startswith("doll-worker")}
        of = {name: environment_of(objects, container_of(pod)) for name, pod in workers.items()}
        return {name: found["DOLL_TIER"] for name, found in of.items()}

    assert tiers(made()) == {"doll-worker": "reliable"}
    spot = str(CHART / "values-spot.yaml")
    both = chart("-f", spot, "--set", "worker.reliable.replicas=3")
    assert tiers(both) == {"doll-worker": "spot", "doll-worker-reliable": "reliable"}
    (reliable,) = (e for e in of_kind(both, "Deployment") if "reliable" in e["metadata"]["name"])
    assert reliable["spec"]["replicas"] == 3
    pod = reliable["spec"]["template"]
    assert container_of(pod)["args"][0] == "worker"
    assert not {"affinity", "tolerations", "priorityClassName"} & pod["spec"].keys()
    (meet,) = (e for e in of_kind(both, "NetworkPolicy") if e["metadata"]["name"] == "doll-workers")
    rules = meet["spec"]
    peers = [
        each["podSelector"] for each in (*rules["ingress"][0]["from"], *rules["egress"][0]["to"])
    ]
    for template in pods(both).values():
        worker = "worker" in template["metadata"]["labels"]["app.kubernetes.io/component"]
        assert [selects(each, template) for each in (rules["podSelector"], *peers)] == [worker] * 3


def test_gpu_worker_has_one_gpu_and_uses_it() -> None:
    objects = made("gpu")
    container = container_of(pods(objects)["doll-worker"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert environment_of(objects, container)["DOLL_GPUS"] == "0"
    assert container["image"].endswith("-cuda")


def test_workers_that_hold_streams_are_a_stateful_set_of_the_same_pods() -> None:
    (held,) = of_kind(made("hold"), "StatefulSet")
    template, usual = held["spec"]["template"], pods(made())["doll-worker"]
    for constraint in usual["spec"]["topologySpreadConstraints"]:
        assert "matchLabelKeys" in constraint
    stripped = json.loads(json.dumps(usual))
    for constraint in stripped["spec"]["topologySpreadConstraints"]:
        # Only rollouts of a Deployment need it.
        del constraint["matchLabelKeys"]
    assert template == stripped
    assert of_kind(made("hold"), "ScaledObject") == []
    assert "doll-worker" in {e["metadata"]["name"] for e in of_kind(made("hold"), "Service")}


def test_ec2_values_run_no_worker_pods_and_show_prices() -> None:
    objects = made("ec2")
    assert "doll-worker" not in pods(objects)
    assert len(of_kind(objects, "Deployment")) == 4
    for name in ("doll-provisioner", "doll-admin"):
        container = container_of(pods(objects)[name])
        market = environment_of(objects, container)["DOLL_MARKET"]
        folders = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert market.rpartition("/")[0] in folders


def test_model_server_is_deployed_only_if_requested() -> None:
    assert "doll-serve" not in pods(made())
    objects = made("serve")
    (service,) = [e for e in of_kind(objects, "Service") if e["metadata"]["name"] == "doll-serve"]
    assert service["spec"]["ports"] == [{"name": "api", "port": 8080, "targetPort": "api"}]
    pod = pods(objects)["doll-serve"]
    assert container_of(pod)["args"] == ["serve", "digits", "--name", "$(POD_NAME)"]
    policies = {e["metadata"]["name"]: e["spec"] for e in of_kind(objects, "NetworkPolicy")}
    assert selects(policies["doll-api"]["podSelector"], pod)
    objects = chart("--set", "serve.job=clicks", "--set", "serve.options={--keys,--alias,best}")
    args = container_of(pods(objects)["doll-serve"])["args"]
    assert args[:5] == ["serve", "clicks", "--keys", "--alias", "best"]


def test_local_values_need_one_node_and_no_operators() -> None:
    objects = made("local")
    assert not {each["kind"] for each in objects} & CUSTOM.keys()
    for name, template in pods(objects).items():
        assert "/run/secrets" not in json.dumps(template), name
        for constraint in template["spec"].get("topologySpreadConstraints", ()):
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway", name
    budgets = {each["metadata"]["name"] for each in of_kind(objects, "PodDisruptionBudget")}
    # There is only one admin pod.
    assert budgets == {"doll-coordinator", "doll-worker"}


def test_values_of_the_guide_have_their_documented_effect(tmp_path: Path) -> None:
    guide = (ROOT / "docs/howto/kubernetes.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block)
    objects = chart("--values", str(tmp_path / "mine.yaml"))
    for template in pods(objects).values():
        container = container_of(template)
        assert container["image"].startswith("registry.example.com/doll-")
        settings = environment_of(objects, container)
        assert settings["DOLL_BLOBS"] == "s3://my-bucket/checkpoints"
        # This value is from the chart.
        assert settings["DOLL_METRICS_PORT"] == "9102"
    (scaler,) = of_kind(objects, "ScaledObject")
    assert scaler["spec"]["maxReplicaCount"] == 16
