"""docker-compose.yml has what each service needs, and nothing that it must not have."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections import Counter
from graphlib import TopologicalSorter

import pytest
import yaml

from common.config.settings import Settings
from tests import compose
from tests.compose import OURS, ROOT, SECRETS, Part
from tests.unit.deploy.promtool import promtool

SERVICES = compose.services()
NAMES = sorted(SERVICES)
# Containers that end when their work is done, so that they need no health check.
ONCE = {"s3-bucket"}
WRITES_BESIDE_ITS_PROGRAMS = {"kafka"}
# Keys that only one of the two programs that read the file knows.
FORBIDDEN = {
    *("attach", "annotations", "cgroup", "develop", "dockerfile_inline", "env_file", "extends"),
    *("gpus", "include", "models", "post_start", "pre_stop", "provider", "start_interval"),
    *("additional_contexts", "pull_policy", "required", "uts", "version"),
}
PROMETHEUS = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())


def seconds(text: str) -> int:
    """Return the seconds of a duration in Compose's notation."""
    assert text.endswith("s"), text
    return int(text[:-1])


# --- every service -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_image_has_a_complete_version(name: str) -> None:
    image, _, tag = SERVICES[name]["image"].rpartition(":")
    assert image
    assert re.search(r"\d+\.\d+\.\d+", tag), f"{image}:{tag}"


@pytest.mark.parametrize("name", NAMES)
def test_service_is_hardened_limited_and_restarted(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("read_only", False) == (name not in WRITES_BESIDE_ITS_PROGRAMS)
    assert service["restart"] == ("no" if name in ONCE else "unless-stopped")
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])
    assert "privileged" not in service
    # A name would allow one container only.
    assert "container_name" not in service


@pytest.mark.parametrize("name", sorted(set(NAMES) - ONCE))
def test_service_reports_its_health_and_has_time_to_end(name: str) -> None:
    service = SERVICES[name]
    assert {"test", "interval", "timeout", "retries", "start_period"} == set(service["healthcheck"])
    assert seconds(service["stop_grace_period"]) >= 30


@pytest.mark.parametrize("name", NAMES)
def test_ports_are_published_to_this_machine_only(name: str) -> None:
    for port in SERVICES[name].get("ports", ()):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


@pytest.mark.parametrize("name", NAMES)
def test_mounts_are_tracked_in_git_and_read_only(name: str) -> None:
    for bind in compose.binds(SERVICES[name]):
        assert bind.read_only
        relative = bind.source.relative_to(ROOT).as_posix()
        assert tracked(relative), f"{relative} is not in the repository"
    assert set(compose.volumes(SERVICES[name])) <= set(compose.composed()["volumes"])


def tracked(path: str) -> list[str]:
    """Return the files of a path that git knows."""
    done = subprocess.run(  # noqa: S603 -- our own path
        ["git", "ls-files", "--", path],  # noqa: S607 -- whichever git there is
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_secrets_are_declared_files_that_are_mounted_and_used(name: str) -> None:
    environment = compose.environment_of(SERVICES[name])
    given = set(SERVICES[name].get("secrets", ()))
    used = {each.removeprefix(SECRETS) for each in environment.values() if SECRETS in each}
    assert given == used
    assert given <= set(compose.composed()["secrets"])
    for variable in environment:
        if re.search("PASSWORD|SECRET|TOKEN|CREDENTIALS|_KEY", variable):
            assert variable.endswith("_FILE"), variable


@pytest.mark.parametrize("name", NAMES)
def test_service_dependencies_can_be_met(name: str) -> None:
    for other, condition in compose.dependencies(SERVICES[name]).items():
        assert condition == (
            "service_completed_successfully" if other in ONCE else "service_healthy"
        )
        assert "profiles" not in SERVICES[other]


def test_service_dependencies_have_no_cycle() -> None:
    graph = {name: compose.dependencies(service) for name, service in SERVICES.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("s3-bucket") < order.index("s3") < order.index("coordinator")


def test_networks_are_declared_and_the_back_network_is_internal() -> None:
    declared = compose.composed()["networks"]
    assert declared["back"] == {"internal": True}
    published = {name for name in NAMES if SERVICES[name].get("ports")}
    for name, service in SERVICES.items():
        assert set(service.get("networks", ())) <= set(declared)
        if name in published:
            assert "front" in service["networks"]
    assert "front" not in {*SERVICES["redis"]["networks"], *SERVICES["s3"]["networks"]}


def test_published_ports_are_unique() -> None:
    ports = Counter(p.split(":")[1] for s in SERVICES.values() for p in s.get("ports", ()))
    assert set(ports.values()) == {1}


# --- ours ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_doll_variables_are_settings(name: str) -> None:
    for variable in compose.environment_of(SERVICES[name]):
        if variable.startswith("DOLL_"):
            setting = variable.removeprefix("DOLL_").removesuffix("_FILE").lower()
            assert setting in Settings.model_fields, variable


@pytest.mark.parametrize("name", OURS)
def test_doll_service_runs_one_command_without_root(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    job = ["digits"] if name == "serve" else []
    assert service["command"] == [name.removesuffix("-gpu"), *job]
    assert service["build"]["dockerfile"] == "deploy/Dockerfile"
    assert service["image"].startswith(f"doll-{service['build']['target']}:")
    assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "common.runtime.healthcheck"]
    assert compose.environment_of(service)["DOLL_METRICS_PORT"] == "9102"
    assert compose.environment_of(service)["DOLL_METRICS_HOST"] == "0.0.0.0"  # noqa: S104 -- of a container
    leave_s = Settings().leave_s
    assert seconds(service["stop_grace_period"]) >= leave_s + 10


@pytest.mark.parametrize("name", OURS)
def test_image_of_a_service_contains_its_extra(name: str) -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    target = SERVICES[name]["build"]["target"]
    stage = dockerfile.split(f"AS {target}-packages\n")[1].split("\nFROM ")[0]
    extras = re.findall(r"\[([\w,]+)\]", stage)
    assert extras
    assert name.removesuffix("-gpu") in extras[-1].split(",")
    assert set(SERVICES[name]["build"].get("args", ())) <= set(re.findall(r"ARG (\w+)", dockerfile))


def test_provisioner_image_can_run_workers_for_a_process_fleet() -> None:
    [market] = {bind.source for bind in compose.binds(SERVICES["provisioner"])}
    fleet = yaml.safe_load(market.read_text())["fleet"]
    assert fleet == "process"
    assert SERVICES["provisioner"]["build"] == SERVICES["worker"]["build"]
    # The admin service reports the prices of the market.
    assert {bind.source for bind in compose.binds(SERVICES["admin"])} == {market}


@pytest.mark.parametrize("name", ["coordinator", "worker", "worker-gpu"])
def test_scaled_services_publish_no_ports_and_have_no_volumes(name: str) -> None:
    assert "ports" not in SERVICES[name]
    assert "volumes" not in SERVICES[name]
    assert int(SERVICES[name]["deploy"]["replicas"]) >= 1


def test_one_gpu_worker_needs_a_profile_and_has_all_devices() -> None:
    assert {name for name in NAMES if "profiles" in SERVICES[name]} == {"serve", "worker-gpu"}
    worker = SERVICES["worker-gpu"]
    assert worker["profiles"] == ["gpu"]
    [device] = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert compose.environment_of(worker)["DOLL_GPUS"] == "all"
    assert worker["deploy"]["replicas"] == 1
    assert compose.environment_of(SERVICES["worker"])["DOLL_GPUS"] == "none"


def test_only_services_that_read_checkpoints_get_the_storage_key() -> None:
    holders = {name for name in NAMES if "s3_credentials" in SERVICES[name].get("secrets", ())}
    assert holders == {"s3", "admin", "coordinator", "evaluator", "serve"}


def test_image_tags_match_the_product_version_and_the_tested_kafka() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ours = {SERVICES[name]["image"].rpartition(":")[2] for name in OURS}
    assert ours == {version, f"{version}-cuda"}
    pom = (ROOT / "deploy/kafka/pom.xml").read_text()
    kafka = re.search(r"kafka_2\.13</artifactId>\s*<version>([\d.]+)<", pom)
    assert kafka
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{kafka[1]}"


# --- the file ------------------------------------------------------------------------------------


def test_compose_file_uses_only_keys_known_to_all_its_readers() -> None:
    whole = compose.composed()
    assert "name" not in whole
    assert not FORBIDDEN & {name for _, name in compose.keys(whole)}
    assert ("depends_on", "restart") not in set(compose.keys(whole))
    assert {name for name in whole if not name.startswith("x-")} == {
        *("services", "networks", "volumes", "secrets"),
    }


def test_env_example_has_every_variable_with_its_default() -> None:
    assert compose.example() == compose.defaults()


def test_environment_variables_override_defaults() -> None:
    changed = compose.services({"STACK_WORKERS": "5", "STACK_API_PORT": "18080"})
    assert changed["worker"]["deploy"]["replicas"] == "5"
    assert changed["admin"]["ports"] == ["127.0.0.1:18080:8080"]
    assert changed["redis"] == SERVICES["redis"]
    assert "$(cat $REDIS_PASSWORD_FILE)" in changed["redis"]["healthcheck"]["test"][1]


# --- monitoring ----------------------------------------------------------------------------------


def test_prometheus_scrapes_every_doll_service() -> None:
    scraped = dict[str, str]()
    for each in PROMETHEUS["scrape_configs"]:
        for discovered in each.get("dns_sd_configs", ()):
            assert discovered["type"] == "A"
            assert discovered["port"] == 9102
            assert discovered["names"] == [each["job_name"]]
            scraped |= dict.fromkeys(discovered["names"], each["job_name"])
    assert scraped.keys() == set(OURS) - {"worker-gpu"}
    assert SERVICES["worker-gpu"]["networks"]["back"]["aliases"] == ["worker"]
    shared = set(SERVICES["prometheus"]["networks"])
    assert all(shared & set(SERVICES[name]["networks"]) for name in OURS)


def test_prometheus_accepts_its_configuration_and_finds_its_rules() -> None:
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    folder = ROOT / "deploy/prometheus"
    assert (folder / "alerts.yml").is_file()
    complaint = promtool("check", "config", "prometheus.yml", folder=folder)
    assert not complaint, complaint


def provisioned(path: str) -> Part:
    found: Part = yaml.safe_load((ROOT / "deploy/grafana/provisioning" / path).read_text())
    return found


def test_grafana_queries_this_prometheus() -> None:
    [source] = provisioned("datasources/prometheus.yml")["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert SERVICES[host]["ports"][0].endswith(f":{port}")
    assert set(SERVICES[host]["networks"]) & set(SERVICES["grafana"]["networks"])


def test_grafana_downloads_nothing_and_requires_a_password() -> None:
    environment = compose.environment_of(SERVICES["grafana"])
    assert environment["GF_PLUGINS_PREINSTALL_DISABLED"] == "true"
    assert environment["GF_PLUGINS_PREINSTALL_AUTO_UPDATE"] == "false"
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"].startswith(SECRETS)
    # Anonymous access stays off, which is the default.
    assert not [name for name in environment if name.startswith("GF_AUTH_")]


def test_grafana_finds_the_dashboards() -> None:
    [provider] = provisioned("dashboards/doll.yml")["providers"]
    places = {bind.target: bind.source for bind in compose.binds(SERVICES["grafana"])}
    folder = places[provider["options"]["path"]]
    names = {path.stem for path in folder.glob("*.json")}
    assert {"pipeline", "learning", "cost"} <= names
    home = compose.environment_of(SERVICES["grafana"])["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/pipeline.json"
    kinds = {
        variable.get("query")
        for path in folder.glob("*.json")
        for variable in json.loads(path.read_text())["templating"]["list"]
        if variable["type"] == "datasource"
    }
    assert kinds <= {"prometheus"}
