"""A job's provisioning over HTTP: the state in the plans topic, and requests for a new plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from common.api.answers import ProvisioningAnswer
from common.kafka.port import NewTopic
from common.spot.planning.replan import read_ledger
from common.spot.plans import encode_plan
from common.spot.provisioning.records import (
    Ended,
    EstimateRecord,
    LaunchRequested,
    Planned,
    Priced,
    ProvisionerLead,
    Reviewed,
    Settled,
    Started,
)
from tests.unit.admin.conftest import problem
from tests.unit.admin.test_model import SPEC

if TYPE_CHECKING:
    from common.spot.provisioning.records import PlanRecord
    from tests.unit.admin.conftest import World

SHOW = "/v1/jobs/digits/provisioning"
REPLAN = f"{SHOW}/replan"
BELIEVED = {"arrivals_per_s": EstimateRecord(100.0, 2.0, 97.0, 103.0)}


def planned(number: int, at_s: float) -> Planned:
    """Return a plan with two slots on spot, one on demand and one without a machine."""
    return Planned(
        term=0,
        number=number,
        at_s=at_s,
        policy="adaptive",
        why="the first plan" if number == 1 else "a price",
        reason="one more would make it late",
        feasible=True,
        binding="deadline",
        pools=("on-demand", "spot"),
        places=(1, 1, 0, -1),
        spot=2,
        on_demand=1,
        updates_left=100.0,
        deadline_left_s=500.0,
        spent_usd=1.0,
        expected_cost_usd=3.0,
        expected_runtime_s=400.0,
        on_demand_only_usd=5.0,
        stability=1.5,
        usd_per_hour={"on-demand": 0.286, "spot": 0.158},
        believed=BELIEVED,
    )


def decide(world: World, *records: PlanRecord) -> None:
    world.log.create_topics([NewTopic("doll.digits.plans")])
    writer = world.log.writer()
    for record in records:
        writer.append("doll.digits.plans", encode_plan(record))
    assert writer.flush(1.0)


@pytest.fixture
def rented(world: World) -> World:
    """A job with rented machines, whose provisioner leads."""
    world.streams("clinic-a")
    spec = SPEC.model_dump(mode="json") | {"provisioning": {"workers": 4, "policy": "adaptive"}}
    answer = world.ask("POST", "/v1/jobs", json=spec)
    assert answer.status_code == 201, answer.text
    decide(world, ProvisionerLead(-1, "p1", 1000.0))
    return world


def test_plan_for_a_job_uses_the_measured_values_of_its_pools(rented: World) -> None:
    seen = BELIEVED | {
        "availability.spot": EstimateRecord(0.75, 0.01, 0.73, 0.77),
        "cycle_s.spot": EstimateRecord(400.0, 10.0, 380.0, 420.0),
    }
    decide(
        rented,
        Priced(0, 1000.0, {"on-demand": 0.286, "spot": 0.158}),
        msgspec.structs.replace(planned(1, 1001.0), believed=seen),
    )
    pools = [
        {"name": name, "usd_per_hour": 0.158, "availability": 0.9} for name in ("spot", "other")
    ]
    asked = {"job": "digits", "workers": 4, "rate_per_s": 100, "updates": 1000, "pools": pools}
    asked |= {"deadline_s": 10_000, "on_demand_usd_per_hour": 0.286}
    for given, expected in ((True, (0.75, 400.0)), (False, (0.9, 1000.0))):
        answer = rented.ask("POST", "/v1/provisioning/plan", json=asked | {"seen": given})
        assert answer.status_code == 200, answer.text
        by_name = {one["name"]: one for one in answer.json()["pools"]}
        assert (by_name["spot"]["availability"], by_name["spot"]["cycle_s"]) == expected
        assert (by_name["other"]["availability"], by_name["other"]["cycle_s"]) == (0.9, 1000.0)
        assert any("of spot are what" in note for note in answer.json()["notes"]) == given


def test_provisioning_reports_the_current_plan_its_reason_and_history(rented: World) -> None:
    decide(
        rented,
        Priced(0, 1000.0, {"on-demand": 0.286, "spot": 0.158}),
        planned(1, 1001.0),
        LaunchRequested(0, 1, 1002.0, 0, "spot", "w0"),
        Started(0, 1, 1003.0, "m-1"),
        planned(2, 1100.0),
    )
    answer = ProvisioningAnswer.model_validate(rented.get(SHOW))
    assert (answer.policy, answer.workers, answer.running, answer.settled) == ("adaptive", 4, 1, "")
    assert answer.plan is not None
    assert answer.plan.places == {"spot": 2, "on-demand": 1, "none": 1}
    assert (answer.plan.number, answer.plan.reason) == (2, "one more would make it late")
    assert answer.plan.predicted_usd == 4.0
    assert [plan.number for plan in answer.plans] == [2, 1]
    assert [plan.number for plan in answer.plans[:1]] == [
        plan["number"] for plan in rented.get(f"{SHOW}?limit=1")["plans"]
    ]
    assert answer.believed["arrivals_per_s"].high == 103.0
    assert answer.stability == 1.5
    assert answer.cost is not None
    assert (answer.cost.predicted_usd, answer.cost.usd_per_hour) == (4.0, 0.158)


def test_cost_is_compared_with_on_demand_and_at_the_end_with_the_plan(
    rented: World,
) -> None:
    review = Reviewed(0, 1200.0, 50, 50.0, 2, 3, 2.0, 4.0, 0.9, BELIEVED, "too few machines")
    decide(rented, planned(1, 1001.0), review)
    answer = ProvisioningAnswer.model_validate(rented.get(SHOW))
    assert answer.cost is not None
    assert (answer.cost.at_s, answer.cost.ratio_to_on_demand) == (1200.0, 0.5)
    assert answer.cost.ratio_to_prediction is None
    assert (answer.warning, answer.stability) == ("too few machines", 0.9)

    decide(rented, Settled(0, 1300.0, "all updates are made", 3.0, 5.0, 4.0))
    over = rented.replica()
    answer = ProvisioningAnswer.model_validate(over.get(SHOW))
    over.close()
    assert answer.cost is not None
    assert (answer.cost.ratio_to_on_demand, answer.cost.ratio_to_prediction) == (0.6, 0.75)
    assert answer.settled == "all updates are made"


def test_provisioning_before_the_first_plan_shows_only_the_request(rented: World) -> None:
    answer = ProvisioningAnswer.model_validate(rented.get(SHOW))
    assert (answer.plan, answer.plans, answer.cost, answer.stability) == (None, (), None, None)


def test_job_without_provisioning_is_reported_as_renting_no_machines(world: World) -> None:
    world.streams("clinic-a")
    world.ask("POST", "/v1/jobs", json=SPEC.model_dump(mode="json"))
    assert "rents no machines" in problem(world.ask("GET", SHOW), 404)
    assert "rents no machines" in problem(world.ask("POST", REPLAN), 409)
    assert "no job" in problem(world.ask("POST", REPLAN.replace("digits", "letters")), 404)


def test_job_cannot_be_deleted_before_its_machines_are_released(rented: World) -> None:
    decide(rented, LaunchRequested(0, 1, 1002.0, 0, "spot", "w0"), Started(0, 1, 1003.0, "m-1"))
    assert rented.ask("PATCH", "/v1/jobs/digits", json={"wanted": "stopped"}).status_code == 200
    for purge in ("", "?purge=true"):
        detail = problem(rented.ask("DELETE", f"/v1/jobs/digits{purge}"), 409)
        assert '1 machines of the job "digits" are not released yet' in detail

    decide(rented, Ended(0, 1, 1100.0, "released"))
    assert rented.ask("DELETE", "/v1/jobs/digits").status_code == 204


def test_replan_request_is_recorded_with_caller_and_reason(rented: World) -> None:
    answer = rented.ask("POST", REPLAN, json={"reason": "the deadline moved"})
    assert answer.status_code == 202, answer.text
    assert answer.json()["job"] == "digits"
    # A second request has no body.
    assert rented.ask("POST", REPLAN).status_code == 202
    first, again = read_ledger(rented.log, "digits").replans.values()
    assert (first.by, first.reason, again.reason) == ("olga", "the deadline moved", "")
    assert first.at_s == answer.json()["asked_at_s"]


def test_replan_of_an_ended_job_is_rejected(rented: World) -> None:
    decide(rented, Settled(0, 1300.0, "all updates are made", 3.0, 5.0, None))
    assert "all updates are made" in problem(rented.ask("POST", REPLAN), 409)
    rented.ask("PATCH", "/v1/jobs/digits", json={"wanted": "stopped"})
    assert "is stopped" in problem(rented.ask("POST", REPLAN), 409)


def test_viewer_can_see_provisioning_but_not_request_a_plan(rented: World) -> None:
    assert rented.ask("GET", SHOW, key="viewer").status_code == 200
    problem(rented.ask("POST", REPLAN, key="viewer"), 403)
