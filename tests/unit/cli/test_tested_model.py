"""The result of a model's test in a process of its own is read from the output of the process."""

from __future__ import annotations

import pytest

from common.errors import DollError
from services.cli.demo.tested_model import result_of

RESULT = '{"loss":0.053,"accuracy":0.986}'


@pytest.mark.parametrize(
    "said", [RESULT, f"UserWarning: slow\n{RESULT}", f"{RESULT}\nException ignored in: a thread"]
)
def test_result_is_found_beside_warnings_of_libraries(said: str) -> None:
    assert result_of(0, said) == {"loss": 0.053, "accuracy": 0.986}


@pytest.mark.parametrize(
    ("exit_code", "said"), [(1, RESULT), (-9, "it said nothing"), (0, "it said nothing")]
)
def test_test_that_failed_or_gave_no_result_is_an_error_with_its_output(
    exit_code: int, said: str
) -> None:
    with pytest.raises(DollError) as failed:
        result_of(exit_code, said)
    assert str(failed.value) == (
        f"the last model could not be tested (exit code {exit_code}): {said}"
    )
