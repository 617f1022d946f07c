"""Submission refuses bad jobs, and accepts jobs that it cannot check."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import pytest

from common.config.settings import Settings
from common.errors import GivenError
from common.jobs.check import (
    CheckReport,
    CheckRequest,
    Unchecked,
    built_apart,
    check_init,
    check_submission,
    unasked,
)
from common.jobs.spec import JobSpec
from common.jobs.task_check import built
from doll.yaml_file import as_json, load_text
from tests.unit.admin.live.helpers import SPEC

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

OWN = "tests.unit.jobs.odd_tasks"
MEMORY_MIB = 2_048
Build: TypeAlias = "Callable[[JobSpec, Collection[str]], CheckReport]"


def spec(**task: Any) -> JobSpec:  # noqa: ANN401 -- options of a task
    text = as_json(load_text(SPEC))
    made = JobSpec.model_validate_json(text).model_dump(mode="json")
    return JobSpec.model_validate_json(as_json_of(made | {"task": task}))


def as_json_of(fields: dict[str, Any]) -> str:
    import json  # noqa: PLC0415 -- only here

    return json.dumps(fields)


def own(name: str, **options: int) -> JobSpec:
    return spec(entrypoint=f"{OWN}:{name}", **options)


def problem_of(made: JobSpec) -> str:
    """Return the refusal of the task check. Its program runs in this process."""
    entrypoint = made.task.entrypoint or ""
    return built_here(made, (entrypoint,)).refused


def built_here(made: JobSpec, allowed: Collection[str]) -> CheckReport:
    """Build a task in this process, because each other process would load torch."""
    return built(CheckRequest(msgspec.Raw(made.model_dump_json().encode()), tuple(allowed)))


# Long enough for all other processes of a busy machine to run first.
patient = partial(built_apart, patience_s=600.0)


def refusal(made: JobSpec, build: Build = patient) -> GivenError:
    with pytest.raises(GivenError) as refused:
        check_submission(made, [made.task.entrypoint or ""], MEMORY_MIB, build)
    assert "\n" not in str(refused.value)
    return refused.value


def test_valid_job_passes_the_check() -> None:
    check_submission(spec(name="logistic-regression", classes=2), (), MEMORY_MIB)
    check_submission(own("Plain"), [f"{OWN}:Plain"], MEMORY_MIB, patient)


@pytest.mark.parametrize(
    ("source", "settings", "place"),
    [
        ("https://Models.example/a", {"init_hosts": ("other", "models")}, "models.example"),
        ("https://models.example:8443/a", {}, "models.example"),
        ("http://localhost/a", {}, "localhost"),
        ("s3://other/a", {"blobs": "s3://mine/doll"}, "s3://other"),
        ("s3://mine-2/a", {"blobs": "s3://mine"}, "s3://mine-2"),
        ("https://models.example:8443/a", {"init_hosts": ("models.example",)}, ""),
        ("s3://mine/a", {"blobs": "s3://mine/doll"}, ""),
        ("s3://other/a", {"blobs": "s3://mine", "init_hosts": ("s3://other",)}, ""),
        # Only coordinators know what is below their folder, and the bucket if it is not set here.
        ("nets/a.safetensors", {}, ""),
        ("s3://mine/a", {}, ""),
    ],
)
def test_pretrained_weights_of_an_unlisted_place_are_rejected(
    source: str, settings: dict[str, Any], place: str
) -> None:
    fields = spec(name="logistic-regression", classes=2).model_dump(mode="json")
    fields |= {"init": {"from": source, "sha256": "0" * 64}}
    made = JobSpec.model_validate_json(as_json_of(fields))
    if not place:
        check_init(made, Settings(**settings))
        return
    with pytest.raises(GivenError) as refused:
        check_init(made, Settings(**settings))
    assert refused.value.fields == ("init.from",)
    assert refused.value.problem == (
        f"{place} is not listed in the setting DOLL_INIT_HOSTS of coordinators and of the admin"
        " service; add it there"
    )


def test_invalid_option_of_a_built_in_task_is_rejected_by_field() -> None:
    assert refusal(spec(name="logistic-regression", classes=1)).fields == ("task",)
    wrong = refusal(spec(name="logistic-regression", classes=2, features=5))
    assert (wrong.fields, wrong.problem) == (
        ("task.features",),
        "must be 4 as in the records, got 5; change the field or the task's option",
    )


def test_group_of_no_parameter_is_rejected_by_field_for_built_in_and_own_tasks() -> None:
    for made in (spec(name="logistic-regression", classes=2), own("Plain")):
        by = made.optimizer.model_dump(exclude_none=True)
        by |= {
            "groups": [
                {"match": "*", "learning_rate": 0.1},
                {"match": "wieght", "learning_rate": 1},
            ]
        }
        fields = made.model_dump(mode="json") | {"optimizer": by}
        wrong = refusal(JobSpec.model_validate_json(as_json_of(fields)), built_here)
        assert wrong.fields == ("optimizer.groups[1].match",)
        assert "got 'wieght'; the nearest names are" in wrong.problem
        assert "weight" in wrong.problem


@pytest.mark.parametrize(
    ("synchronisation", "workers", "in_flight"),
    [
        ({"mode": "stale", "staleness": 4}, None, 5),
        ({"mode": "stale", "staleness": 9}, 3, 3),
        ({"mode": "asynchronous"}, 6, 6),
        ({"mode": "asynchronous"}, None, 8),
        ({"mode": "asynchronous", "staleness": 2}, None, 3),
        ({"mode": "synchronous"}, 64, 1),
    ],
)
def test_gradient_sums_above_the_coordinator_memory_are_rejected(
    synchronisation: dict[str, Any], workers: int | None, in_flight: int
) -> None:
    large = spec(name="tabular-mlp", classes=2, hidden=[10_000, 10_000]).model_dump(mode="json")
    rented = {"workers": workers} if workers else None
    fields = large | {"synchronisation": synchronisation, "provisioning": rented}
    made = JobSpec.model_validate_json(as_json_of(fields))
    assert made.most_rounds == in_flight
    size_mb = 382
    check_submission(made, (), (in_flight + 2) * size_mb)
    if in_flight == 1:
        check_submission(made, (), 1)
        return
    with pytest.raises(GivenError) as refused:
        check_submission(made, (), (in_flight + 2) * size_mb - 5)
    assert refused.value.fields == ("synchronisation.staleness",)
    assert f"{in_flight} updates in flight" in refused.value.problem
    assumed = "assuming 8 workers, because neither staleness nor provisioning.workers is"
    assert (assumed in refused.value.problem) == (in_flight == 8)
    assert "DOLL_COORDINATOR_MEMORY_MIB allows; lower it, or allow more" in refused.value.problem


def test_compression_view_counts_towards_the_coordinator_memory() -> None:
    large = spec(name="tabular-mlp", classes=2, hidden=[10_000, 10_000]).model_dump(mode="json")
    for synchronisation, sums, field in (
        ({"mode": "synchronous"}, 3, "compression"),
        ({"mode": "stale"}, 4, "synchronisation.staleness"),
    ):
        fields = large | {"synchronisation": synchronisation, "compression": {"changes": 0.1}}
        made = JobSpec.model_validate_json(as_json_of(fields))
        check_submission(made, (), (sums + 1) * 382)
        with pytest.raises(GivenError) as refused:
            check_submission(made, (), (sums + 1) * 382 - 5)
        assert refused.value.fields == (field,)
        assert "and the tracked weights of workers" in refused.value.problem


def test_model_above_the_memory_setting_is_rejected_without_building() -> None:
    large = spec(name="tabular-mlp", classes=2, hidden=[2**31 - 1, 2**31 - 1])
    assert "the model takes 17,592" in str(refusal(large, build=built_here))
    assert "more than 16,384; make it smaller" in str(
        refusal(own("Plain", inputs=2**31), build=built_here)
    )


def test_task_that_raises_or_rejects_its_options_is_rejected() -> None:
    wrong = refusal(own("Plain", inputs=0))
    assert wrong.fields == ("task",)
    assert "refuses its options {'inputs': 0}: ValueError: inputs: must be positive" in str(wrong)
    assert "got an unexpected keyword argument 'colour'" in problem_of(own("Plain", colour=1))
    assert "the task raised an error when it was checked: TypeError: 'int' object" in problem_of(
        own("WrongInputs")
    )
    raised = problem_of(own("Raising"))
    assert "build() of the task raised KeyError: 'no such layer' (odd_tasks.py, line" in raised


def unchecked(made: JobSpec, build: Build, *allowed: str) -> Unchecked:
    """Return the reason why a task was not checked."""
    model_mb, found = check_submission(made, allowed, MEMORY_MIB, build)
    assert found is not None
    assert model_mb == 0
    return found


def test_task_that_this_service_cannot_check_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = "shop.tasks:Clicks"
    found = unchecked(spec(entrypoint=task), built_here, task)
    assert "shop" in found.why
    found.refuse()
    found = unchecked(spec(entrypoint=task), built_here)
    assert found == Unchecked("DOLL_TASKS of this process does not list shop.tasks:Clicks")
    found.refuse()
    monkeypatch.setattr("common.jobs.check.find_spec", lambda _: None)
    found = unchecked(spec(entrypoint=task), built_here, task)
    assert found == Unchecked("PyTorch is not installed here")
    found.refuse()


@pytest.mark.parametrize(
    ("made", "build", "why"),
    [
        (own("Dying"), patient, "the check of the task ended early with status 3"),
        (own("Killed"), patient, "the check of the task was killed by signal 9 (Killed)"),
        (own("LooksAtValues", inputs=2**31), patient, "the model needs more than the 4,096 MiB"),
        (
            own("Plain"),
            partial(built_apart, patience_s=0.01),
            "the check of the task did not end within 0.01 s",
        ),
    ],
)
def test_unfinished_check_rejects_the_job_unless_unchecked_is_allowed(
    made: JobSpec, build: Build, why: str
) -> None:
    task = made.task.entrypoint or ""
    found = unchecked(made, build, task)
    assert found.begun
    with pytest.raises(GivenError, match="--unchecked") as refused:
        found.refuse()
    assert refused.value.fields == ("task",)
    assert refused.value.problem.startswith(why)
    # Unchecked jobs that the request allows are not refused.
    unchecked(made, unasked, task).refuse()
