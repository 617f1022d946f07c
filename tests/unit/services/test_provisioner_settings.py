"""The provisioner's settings, from a job and the market file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.core.spans import Partition
from common.errors import UserError
from common.jobs.job_file import parse_job
from common.jobs.store import JobRecord, by_stream
from common.learning.task_options import options_of
from common.spot.market.market_file import Market
from common.spot.policies.bidding import BidSettings
from services.provisioner.settings import pools_of, provisioner_settings

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec

JOB = """
name: digits
streams: [a]
records: {codec: tensor, fields: {features: {dtype: float32, shape: [4]}, label: {dtype: int64}}}
task: {name: logistic-regression, classes: 2}
batch_size: 8
group_size: 4
optimizer: {name: sgd, learning_rate: 0.1}
stop: {updates: 100, loss: 0.2, deadline_s: 60}
"""
MARKET = Market.model_validate(
    {
        "on_demand": {"usd_per_hour": 0.3, "instance_types": ["m5.large"]},
        "spot": [
            {"name": "told", "usd_per_hour": 0.1, "start_up_s": 5},
            {"name": "replayed", "usd_per_hour": {"file": "prices.csv"}},
        ],
    }
)


def record(text: str) -> JobRecord:
    spec: JobSpec = parse_job(text)
    first = {Partition("a", 0): 10, Partition("a", 1): 20}
    return JobRecord(spec, "running", by_stream(first), "submitted", 1000.0)


def test_pool_without_a_known_price_costs_as_much_as_on_demand() -> None:
    assert [pool.usd_per_hour for pool in pools_of(MARKET)] == [0.3, 0.1, 0.3]


@pytest.mark.parametrize(("on_preemption", "policy"), [("hold", "adaptive"), ("reassign", "pools")])
def test_default_policy_fits_the_on_preemption_setting(on_preemption: str, policy: str) -> None:
    asked = f"{JOB}on_preemption: {on_preemption}\nprovisioning: {{workers: 3}}\n"
    settings = provisioner_settings(record(asked), MARKET)

    assert (settings.policy, settings.workers, settings.partitions) == (policy, 3, 2)
    assert (settings.updates, settings.loss, settings.deadline_at_s) == (100, 0.2, 1060.0)


def test_unmeasured_traffic_is_estimated_as_twice_the_model_size() -> None:
    asked = f"{JOB}provisioning: {{workers: 3}}\n"
    spec = record(asked).spec

    weights = options_of(spec.task.name or "", spec.task_options).parameters
    assert provisioner_settings(record(asked), MARKET).update_mb == 8 * weights / 1e6


def test_settings_contain_the_options_of_the_pools_policy() -> None:
    asked = "workers: 3, policy: pools, max_lag_s: 300, spot_up_to: 2, reliable: 1"
    settings = provisioner_settings(
        record(f"{JOB}on_preemption: hold\nprovisioning: {{{asked}}}\n"), MARKET
    )
    assert (settings.max_lag_s, settings.spot_up_to, settings.reliable) == (300.0, 2.0, 1)


@pytest.mark.parametrize("field", ["max_lag_s: 300", "spot_up_to: 2", "reliable: 1"])
def test_options_of_the_pools_policy_are_rejected_for_other_policies(field: str) -> None:
    asked = f"{JOB}on_preemption: hold\nprovisioning: {{workers: 3, policy: chance, {field}}}\n"
    with pytest.raises(UserError, match="requires policy: pools, got chance"):
        parse_job(asked)


def test_spot_up_to_is_rejected_if_streams_are_reassigned() -> None:
    asked = f"{JOB}provisioning: {{workers: 3, policy: pools, max_lag_s: 60, reliable: 1}}\n"
    settings = provisioner_settings(record(asked), MARKET)
    assert (settings.max_lag_s, settings.reliable, settings.on_preemption) == (60, 1, "reassign")
    with pytest.raises(UserError, match="spot_up_to: requires on_preemption: hold"):
        parse_job(asked.replace("reliable: 1", "spot_up_to: 2"))


def test_max_lag_below_the_start_up_time_of_machines_is_rejected() -> None:
    slow = MARKET.model_copy(
        update={"on_demand": MARKET.on_demand.model_copy(update={"start_up_s": 69.0})}
    )
    asked = f"{JOB}provisioning: {{workers: 3, policy: pools, max_lag_s: 68}}\n"
    assert provisioner_settings(record(asked), MARKET).max_lag_s == 68
    with pytest.raises(UserError, match=r"max_lag_s: must be at least 69, got 68"):
        provisioner_settings(record(asked), slow)
    assert provisioner_settings(record(asked.replace("68", "69")), slow).max_lag_s == 69


def test_more_reliable_machines_than_workers_are_rejected() -> None:
    asked = "workers: 3, policy: pools, reliable: 4"
    with pytest.raises(UserError, match=r"reliable: must be at most provisioning\.workers"):
        parse_job(f"{JOB}on_preemption: hold\nprovisioning: {{{asked}}}\n")


def test_settings_of_a_job_without_provisioning_raise() -> None:
    with pytest.raises(UserError, match="its workers are started by hand"):
        provisioner_settings(record(JOB), MARKET)


BIDS = f"{JOB}on_preemption: reassign\nprovisioning: {{workers: 3, policy: bidbrain"


def test_settings_contain_the_bidding_options() -> None:
    asked = f"{BIDS}, bidbrain: {{lambda_s: 5, start_s: 60}}}}\n"
    assert provisioner_settings(record(asked), MARKET).bidding == BidSettings(5.0, 60.0)
    assert provisioner_settings(record(f"{BIDS}}}\n"), MARKET).bidding == BidSettings()


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (f"{BIDS}}}\nstart_at: latest\n", "requires a backlog, got start_at: latest"),
        (
            f"{BIDS}}}\n".replace(": reassign", ": hold"),
            "requires `on_preemption: reassign`, got hold",
        ),
        (
            f"{JOB}provisioning: {{workers: 3, policy: pools, bidbrain: {{lambda_s: 5}}}}\n",
            "provisioning.bidbrain: requires policy: bidbrain, got pools",
        ),
        (f"{BIDS}, bidbrain: {{lambda_s: -1}}}}\n", "provisioning.bidbrain.lambda_s"),
    ],
)
def test_inconsistent_bidding_options_are_rejected_with_the_reason(job: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        record(job)
