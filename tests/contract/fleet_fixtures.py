"""EC2 for tests: one Moto server for the whole run, started on demand.

A test module that uses it says `pytest_plugins = ["tests.contract.fleet_fixtures"]`.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.contract.fleet_providers import Ec2Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def ec2_server() -> Iterator[Ec2Server]:
    """Start one server for all tests, since Moto has one account, and set credentials."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with closing(Ec2Server()) as server:
            yield server
