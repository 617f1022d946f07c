"""A worker holds no more weights than there is room for."""

from __future__ import annotations

import pytest

from common.config.settings import Settings
from common.errors import UserError
from services.worker.memory import check_group_memory

MIB = 1 << 18  # numbers


def test_weights_that_fit_are_let_through() -> None:
    check_group_memory(MIB, 2, Settings(group_memory_mib=13))
    check_group_memory(MIB, 0, Settings())  # half of the machine


@pytest.mark.parametrize("settings", [Settings(group_memory_mib=12), Settings()])
def test_weights_that_do_not_fit_are_refused(settings: Settings) -> None:
    numbers = MIB if settings.group_memory_mib else MIB << 24  # of which no machine has as many
    with pytest.raises(UserError, match="that DOLL_GROUP_MEMORY_MIB allows"):
        check_group_memory(numbers, 2, settings)
