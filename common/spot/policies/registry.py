"""All policies by name: the paper's three, then those that go beyond it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.spot.policies.adaptive import Adaptive
from common.spot.policies.bidding import Bidding
from common.spot.policies.chance import Chance
from common.spot.policies.fixed import OnDemandOnly, Static
from common.spot.policies.pools import Pools

if TYPE_CHECKING:
    from common.config.policy_names import PolicyName
    from common.spot.policies.policy import Policy


def policy_of(
    name: PolicyName,
    probability: float = 0.95,
    spot: int | None = None,
    pools: Pools | None = None,
    bidding: Bidding | None = None,
) -> Policy:
    """Make a policy.

    Args:
        name: Name of the policy.
        probability: Probability of meeting the deadline, for policies that have one.
        spot: N_s for the static policy, instead of the optimum.
        pools: Optional. The policy `pools`. If unset, one with its default settings.
        bidding: Optional. The policy `bidbrain`. If unset, one without past prices.
    """
    policies: dict[PolicyName, Policy] = {
        "on-demand": OnDemandOnly(),
        "static": Static(spot),
        "adaptive": Adaptive(),
        "chance": Chance(probability),
        "pools": pools or Pools(),
        "bidbrain": bidding or Bidding(),
    }
    return policies[name]
