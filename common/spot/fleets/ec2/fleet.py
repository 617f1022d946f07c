"""EC2 instances of one job (`common.spot.machines.Fleet`), each launched as an instant fleet.

    order ──▶ does a machine have this token as its tag? ──no──▶ create_fleet(ClientToken=token)
                            │yes                                       │
                         nothing                            a machine, tagged, or Refused

Both checks are needed: EC2 lists a new machine a little after it makes it, and forgets a token some
time after its machine has ended. The fleet is every machine with the job's tag; nothing is stored
here.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, cast

from botocore.exceptions import ClientError

from common.errors import WireError
from common.spot.fleets.ec2.client import (
    CONNECTIONS,
    PASSING,
    asking,
    code_of,
    connect,
    passing,
    refuses_us,
)
from common.spot.fleets.ec2.machines import JOB, TOKEN, machine_of, tags_of
from common.spot.machines import Refused
from common.spot.market.market_file import SpotPool
from common.telemetry.logging import Rejections

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import (
        CreateFleetRequestTypeDef,
        CreateFleetResultTypeDef,
        FilterTypeDef,
        FleetLaunchTemplateConfigRequestTypeDef,
        FleetLaunchTemplateOverridesRequestTypeDef,
        InstanceTypeDef,
    )

    from common.spot.machines import LaunchRequest, Machine
    from common.spot.market.market_file import Ec2Provider, Market, OnDemandPool

# EC2's limit of values in one filter.
_VALUES = 200
# There are no machines, or we are at our limit. Another pool, or a later try, may succeed.
_CAPACITY = {
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientFreeAddressesInSubnet",
    "InsufficientCapacity",
    "UnfulfillableCapacity",
    "SpotMaxPriceTooLow",
    "MaxSpotInstanceCountExceeded",
    "MaxSpotFleetRequestCountExceeded",
    "InstanceLimitExceeded",
    "VcpuLimitExceeded",
}
# The token is known, from an order with other parameters or from a machine that has ended.
_GIVEN_BEFORE = {
    "IdempotentParameterMismatch",
    "IdempotentInstanceTerminated",
}


class Ec2Fleet:
    """The machines with the job's tag.

    Args:
        market: The market with its pools.
        provider: The market's region and launch template.
        job: Id of the job.
        client: Optional. If unset, one is made for the provider.
    """

    def __init__(
        self, market: Market, provider: Ec2Provider, job: str, client: EC2Client | None = None
    ) -> None:
        self._provider = provider
        self._job = job
        self._pools = {pool.name: pool for pool in market.pools}
        self._client = client or connect(provider)
        self._rejections = Rejections()

    def launch(self, orders: Sequence[LaunchRequest]) -> tuple[Refused, ...]:
        """Request machines in parallel. EC2 lists those that are not refused soon after.

        Raises:
            UnavailableError: If EC2 is unavailable. Some of the orders may have been carried out.
            OutsideError: If it refuses the account.
        """
        given = self._given(order.token for order in orders)
        new = {order.token: order for order in orders if order.token not in given}
        if not new:
            return ()
        with ThreadPoolExecutor(min(len(new), CONNECTIONS)) as threads:
            answers = list(threads.map(self._order, new.values()))
        return tuple(refused for refused in answers if refused is not None)

    def release(self, machines: Sequence[str]) -> None:
        """Terminate running and stopped machines of the job; others are skipped.

        Raises:
            UnavailableError: If EC2 is unavailable.
            OutsideError: If it refuses the account.
        """
        # A call that names a missing machine ends none, so the machines are looked up first.
        for some in _portions(machines):
            there = [
                machine.id
                for machine in self._read(self._instances("instance-id", some))
                if machine.state != "ended"
            ]
            if there:
                with asking(f"to end machines of job {self._job!r}"):
                    self._client.terminate_instances(InstanceIds=there)

    def machines(self) -> tuple[Machine, ...]:
        """Return all machines of the job that EC2 lists; ended ones are listed for about an hour.

        Raises:
            UnavailableError: If EC2 is unavailable.
            OutsideError: If it refuses the account.
        """
        found = self._read(self._instances())
        return tuple(sorted(found, key=lambda machine: (machine.launch, machine.id)))

    def close(self) -> None:
        """Close the connection. The machines stay."""
        self._client.close()

    def _order(self, order: LaunchRequest) -> Refused | None:
        pool = self._pools.get(order.pool)
        if pool is None:
            reason = f"the market has no pool {order.pool!r}"
            return Refused(order.launch, capacity=False, reason=reason)
        with asking(f"a machine of pool {order.pool!r}"):
            try:
                return _refused(order, self._client.create_fleet(**self._request(order, pool)))
            except ClientError as error:
                code = code_of(error)
                if code in _GIVEN_BEFORE:
                    return None
                if code not in _CAPACITY and (passing(error) or refuses_us(error)):
                    raise
                return Refused(order.launch, code in _CAPACITY, str(error))

    def _request(
        self, order: LaunchRequest, pool: OnDemandPool | SpotPool
    ) -> CreateFleetRequestTypeDef:
        template: FleetLaunchTemplateConfigRequestTypeDef = {
            "LaunchTemplateSpecification": {
                "LaunchTemplateName": self._provider.launch_template,
                "Version": self._provider.launch_template_version,
            }
        }
        if overrides := _overrides(order, pool, self._provider.subnets):
            template["Overrides"] = overrides
        request: CreateFleetRequestTypeDef = {
            "ClientToken": order.token,
            "Type": "instant",
            "LaunchTemplateConfigs": [template],
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": 1,
                "OnDemandTargetCapacity": 1,
                "DefaultTargetCapacityType": "on-demand",
            },
            "TagSpecifications": [
                {"ResourceType": "instance", "Tags": tags_of(order, self._job)},
            ],
        }
        if isinstance(pool, SpotPool):
            request["SpotOptions"] = {"AllocationStrategy": "price-capacity-optimized"}
            request["TargetCapacitySpecification"] = {
                "TotalTargetCapacity": 1,
                "SpotTargetCapacity": 1,
                "DefaultTargetCapacityType": "spot",
            }
        else:
            request["OnDemandOptions"] = {"AllocationStrategy": "lowest-price"}
        return request

    def _given(self, tokens: Iterable[str]) -> set[str]:
        """Return the tokens that a machine has, or recently had."""
        return {
            tag["Value"]
            for some in _portions(sorted(set(tokens)))
            for instance in self._instances(f"tag:{TOKEN}", some)
            for tag in instance["Tags"]
            if tag["Key"] == TOKEN
        }

    def _read(self, instances: Iterable[InstanceTypeDef]) -> Iterator[Machine]:
        for instance in instances:
            try:
                yield machine_of(instance)
            # The instance was tagged by hand, so it is neither used nor ended.
            except WireError as error:
                self._rejections.reject("machine", str(error))

    def _instances(self, name: str = "", values: Sequence[str] = ()) -> list[InstanceTypeDef]:
        """Return instances of the job, all or by a filter."""
        filters: list[FilterTypeDef] = [{"Name": f"tag:{JOB}", "Values": [self._job]}]
        if name:
            filters.append({"Name": name, "Values": values})
        with asking(f"the machines of job {self._job!r} on EC2 in {self._provider.region}"):
            pages = self._client.get_paginator("describe_instances").paginate(Filters=filters)
            return [
                instance
                for page in pages
                for reservation in page["Reservations"]
                for instance in reservation["Instances"]
            ]


def _overrides(
    order: LaunchRequest, pool: OnDemandPool | SpotPool, subnets: Sequence[str]
) -> list[FleetLaunchTemplateOverridesRequestTypeDef]:
    """Return each combination of a type and a subnet or zone; empty if the template decides.

    The type and zone of the order, if it has them, replace those of the pool.
    """
    zones: Sequence[str] = ()
    bid: dict[str, str] = {}
    if isinstance(pool, SpotPool):
        zones = (order.zone,) if order.zone else pool.zones
        if order.bid_usd_per_hour is not None:
            bid = {"MaxPrice": f"{order.bid_usd_per_hour:.6f}"}
    places = [{"SubnetId": subnet} for subnet in subnets]
    places = places or [{"AvailabilityZone": zone} for zone in zones] or [{}]
    names = (order.type,) if order.type else pool.instance_types
    types = [{"InstanceType": name} for name in names] or [{}]
    each = [one | place | bid for one, place in product(types, places)]
    found = cast("list[FleetLaunchTemplateOverridesRequestTypeDef]", each)
    return [override for override in found if override]


def _refused(order: LaunchRequest, answer: CreateFleetResultTypeDef) -> Refused | None:
    if any(each.get("InstanceIds") for each in answer.get("Instances", ())):
        return None
    # One error for each override that was tried.
    errors = answer.get("Errors", ())
    codes = {error.get("ErrorCode", "") for error in errors}
    reasons = {f"{error.get('ErrorCode')}: {error.get('ErrorMessage')}" for error in errors}
    if not errors:
        return Refused(order.launch, capacity=True, reason="EC2 returned no instance and no reason")
    capacity = bool(codes & _CAPACITY) or any(code.startswith(PASSING) for code in codes)
    return Refused(order.launch, capacity, "; ".join(sorted(reasons)))


def _portions(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), _VALUES):
        yield values[start : start + _VALUES]
