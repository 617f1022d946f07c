"""A job file becomes a job, or its error has the field's path, the value and what is allowed."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.core.settings import AggregationSettings, Mode, Rule
from common.errors import UserError
from common.jobs.edit import changed_spec
from common.jobs.job_file import parse_job
from common.jobs.spec import JobSpec, job_from_json

TEXT = """
name: digits
streams: [clinic-a, clinic-b]          # one Kafka topic per datastream
records:
  codec: tensor
  fields:
    image: {dtype: uint8, shape: [1, 28, 28]}
    label: {dtype: int64}
task: {name: image-classifier, classes: 10}
batch_size: 256                        # b
group_size: 20                         # K
optimizer: {name: adam, learning_rate: 1.0e-3}
stop: {updates: 10000, loss: 0.35, deadline_s: 6720}
checkpoint: {every_updates: 200, keep: 3}
on_preemption: reassign
provisioning: {workers: 64, policy: adaptive}
"""


def changed(path: str = "", value: Any = None) -> str:  # noqa: ANN401 -- any JSON
    """The job file with one value set (or removed: None) at a dotted path."""
    data = yaml.safe_load(TEXT)
    *parents, last = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return yaml.safe_dump(data, sort_keys=False)


def test_plain_data_validates_the_same_as_a_submitted_job() -> None:
    data = yaml.safe_load(TEXT)
    data["tuner"] = {"group_size": [10, 40]}
    data["task"] |= {"network": "cnn-28"}
    spec = JobSpec.model_validate(data)
    assert spec == job_from_json(json.dumps(data))
    assert JobSpec.model_validate(spec.model_dump()) == spec
    assert JobSpec.model_validate(spec) is spec
    assert JobSpec.model_validate(data | {"optimizer": spec.optimizer}) == spec
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(data | {"streams": ["clinic-a", 7]})
    assert caught.value.errors()[0]["loc"] == ("streams", 1)


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_job(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_example_job_file_is_parsed() -> None:
    spec = parse_job(TEXT)
    assert (spec.name, spec.batch_size, spec.group_size) == ("digits", 256, 20)
    assert spec.streams == ("clinic-a", "clinic-b")
    assert list(spec.records.fields) == ["image", "label"]
    assert spec.optimizer.learning_rate == 0.001
    assert spec.task.options == {"classes": 10}
    assert (spec.on_missing, spec.start_at, spec.reduction) == ("redispatch", "earliest", "mean")


AVERAGING = {"mode": "averaging", "local_rate": 0.5}


def test_averaging_with_group_size_1_is_rejected() -> None:
    text = yaml.safe_dump(yaml.safe_load(changed("group_size", 1)) | {"synchronisation": AVERAGING})
    assert refusal(text) == (
        "job file: synchronisation.local_rate: requires a group_size above 1, got 1; remove"
        " local_rate, or raise group_size"
    )


@pytest.mark.parametrize(
    ("block", "other", "message"),
    [
        ({"layout": "slices"}, {}, "aggregation: layout: requires mode: group, got board"),
        ({"mode": "group", "owners": 1}, {}, "aggregation: owners: requires layout: slices"),
        ({"mode": "group", "stage": 2}, {}, "aggregation: stage: requires layout: slices"),
        (
            {"mode": "group", "layout": "slices", "owners": 4},
            {},
            "aggregation.owners: must be at most 3, got 4",
        ),
        (
            {"mode": "group", "layout": "slices", "servers": 0},
            {},
            "aggregation: servers: must be auto or at least 1, got 0",
        ),
        (
            {"mode": "group"},
            {"synchronisation": {"mode": "stale"}},
            "aggregation.mode: group requires synchronisation.mode synchronous or averaging",
        ),
        (
            {"mode": "group"},
            {"synchronisation": {"rules": [{"mode": "asynchronous", "when": {"workers_from": 2}}]}},
            "aggregation.mode: group requires synchronisation.mode synchronous or averaging",
        ),
        (
            {"mode": "group"},
            {"compression": {"significance": 1.5}},
            "aggregation.mode: group cannot be combined with compression",
        ),
        (
            {"mode": "group", "layout": "slices", "owners": 4},
            {},
            "aggregation.owners: must be at most 3",
        ),
    ],
)
def test_invalid_aggregation_is_rejected(
    block: dict[str, Any], other: dict[str, Any], message: str
) -> None:
    text = yaml.safe_dump(yaml.safe_load(TEXT) | {"aggregation": block} | other)
    assert refusal(text).startswith(f"job file: {message}")


def test_group_aggregation_uses_default_settings() -> None:
    block = {"mode": "group"}
    found = parse_job(yaml.safe_dump(yaml.safe_load(TEXT) | {"aggregation": block}))
    assert found.grouped
    assert found.aggregation is not None
    assert found.aggregation.core == AggregationSettings()


def test_board_aggregation_can_be_named_explicitly() -> None:
    named = parse_job(yaml.safe_dump(yaml.safe_load(TEXT) | {"aggregation": {"mode": "board"}}))
    assert not named.grouped
    assert "aggregation" not in parse_job(TEXT).model_dump()


@pytest.mark.parametrize(
    ("block", "staleness", "per_worker", "local_rate", "bound"),
    [
        (None, 0, 0, 0.0, 40),
        ({"mode": "synchronous"}, 0, 0, 0.0, 40),
        ({"mode": "stale"}, 1, 0, 0.0, 60),
        ({"mode": "stale", "staleness": 3, "damped": True}, 3, 0, 0.0, 100),
        ({"mode": "asynchronous"}, 0, 4, 0.0, 40),
        ({"mode": "asynchronous", "staleness": 9, "local_rate": 0.5}, 9, 0, 0.5, 40),
        (AVERAGING, 0, 0, 0.5, 40),
    ],
)
def test_synchronisation_mode_sets_its_core_numbers(
    block: object, staleness: int, per_worker: int, local_rate: float, bound: int
) -> None:
    sgd = changed("optimizer.name", "sgd")
    spec = parse_job(yaml.safe_dump(yaml.safe_load(sgd) | {"synchronisation": block}))
    mode = spec.synchronised.core_mode(spec.group_size)
    assert (mode.staleness, mode.staleness_per_worker) == (staleness, per_worker)
    assert (mode.local_rate, spec.waiting_bound) == (local_rate, bound)
    assert job_from_json(spec.model_dump_json()) == spec


BUSY = {"when": {"busy_below": 0.4}, "mode": "asynchronous", "group_size": 4, "local_rate": 0.1}
MANY = {"when": {"workers_from": 64}, "mode": "stale", "staleness": 2, "learning_rate": 0.5}


def with_rules(*rules: object, **fields: object) -> str:
    job = yaml.safe_load(changed("optimizer.name", "sgd"))
    return json.dumps(job | {"synchronisation": {"rules": list(rules)}} | fields)


def test_synchronisation_rules_become_core_rules() -> None:
    spec = parse_job(with_rules(BUSY, MANY))
    busy, many = spec.synchronised.core_rules(spec.group_size)
    assert busy == Rule(
        Mode(4, staleness_per_worker=4, single_worker=True, local_rate=0.1), busy_below=0.4
    )
    assert many == Rule(Mode(20, 0.5, staleness=2), workers_from=64)
    assert spec.synchronised.core_mode(20) == Mode(20)
    assert (spec.waiting_bound, spec.largest_group) == (4 * 20, 20)
    assert job_from_json(spec.model_dump_json()) == spec


def test_waiting_bound_covers_the_largest_group_of_any_rule() -> None:
    large = MANY | {"group_size": 50}
    spec = parse_job(with_rules(BUSY, large))
    assert (spec.waiting_bound, spec.largest_group) == (4 * 50, 50)
    assert refusal(with_rules(large, waiting_batches=49)).startswith(
        "job file: waiting_batches: must be at least group_size (50)"
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([BUSY | {"when": {}}], "rules[0].when: must have either busy_below or workers_from"),
        ([BUSY | {"when": {"busy_below": 1.5}}], "rules[0].when.busy_below: must be at most 1"),
        ([BUSY | {"group_size": 1}], "rules[0].local_rate: requires a group_size above 1"),
        ([BUSY | {"learning_rate": 0.1}], "rules[0].learning_rate: cannot be combined with local"),
        ([MANY, MANY | {"when": {"workers_from": 65}}], "rules[1].when: is never used"),
        ([BUSY, MANY, BUSY], "rules[2].when: is never used, because rules[0] always holds"),
        (
            [MANY | {"mode": "averaging"}],
            "rules[0]: staleness: requires mode stale or asynchronous",
        ),
    ],
)
def test_invalid_rule_is_rejected(rules: list[object], message: str) -> None:
    refused = refusal(with_rules(*rules))
    assert message in refused, refused


def test_rules_ordered_from_narrow_to_wide_are_accepted() -> None:
    fewer = MANY | {"when": {"workers_from": 8}}
    assert len(parse_job(with_rules(MANY, fewer)).synchronised.rules) == 2


RENTED = {"provisioning": {"workers": 8}, "stop": {}}


def with_tuner(tuner: object, **fields: object) -> str:
    return json.dumps(yaml.safe_load(TEXT) | {"tuner": tuner} | fields)


def test_tuner_can_choose_group_size_and_workers() -> None:
    spec = parse_job(with_tuner({"group_size": [2, 24], "workers": "balanced"}, **RENTED))
    assert spec.group_sizes == (2, 24)
    assert (spec.waiting_bound, spec.largest_group) == (48, 24)
    assert job_from_json(spec.model_dump_json()) == spec
    assert parse_job(with_tuner({"workers": "balanced"}, **RENTED)).group_sizes is None


@pytest.mark.parametrize(
    ("tuner", "fields", "message"),
    [
        ({}, {}, "tuner: must have group_size, workers, or both"),
        ({"group_size": [24, 2]}, {}, "with least at least 2, because noise is measured between"),
        ({"group_size": [1, 24]}, {}, "got [1, 24]"),
        ({"group_size": [2, 19]}, {}, "must include group_size (20), got [2, 19]"),
        ({"group_size": [2, 24]}, {"waiting_batches": 23}, "must be at least group_size (24)"),
        (
            {"group_size": [2, 24]},
            {"synchronisation": {"mode": "asynchronous"}},
            "tuner.group_size: cannot be combined with synchronisation.mode: asynchronous",
        ),
        ({"workers": "cost"}, RENTED, "tuner.workers: `cost` would always choose one worker"),
        ({"workers": "fast"}, RENTED, "tuner.workers: must be 'balanced', got \"fast\""),
        ({"workers": "balanced"}, {"provisioning": None}, "tuner.workers: requires `provisioning`"),
        (
            {"workers": "balanced"},
            RENTED | {"on_preemption": "hold"},
            "tuner.workers: requires `on_preemption: reassign`, got hold",
        ),
        (
            {"workers": "balanced"},
            RENTED | {"stop": {"deadline_s": 60.0}},
            "tuner.workers: cannot be combined with stop.deadline_s",
        ),
    ],
)
def test_invalid_tuner_is_rejected(tuner: object, fields: dict[str, object], message: str) -> None:
    refused = refusal(with_tuner(tuner, **fields))
    assert message in refused, refused


def test_records_of_a_pass_follow_from_their_size_unless_the_job_says_otherwise() -> None:
    # 28 x 28 uint8 and an int64.
    assert parse_job(TEXT).records_per_pass == (128 << 10) // (28 * 28 + 8)
    assert parse_job(changed("pass_records", 4096)).records_per_pass == 4096
    large = parse_job(changed("records.fields.image.shape", [3, 256, 256]))
    assert large.records_per_pass == 1


def test_job_json_omits_unset_blocks() -> None:
    written = parse_job(TEXT).model_dump_json()
    assert "synchronisation" not in written
    assert "clip_norm" not in written
    assert "tuner" not in written


def test_yaml_and_json_give_the_same_job() -> None:
    spec = parse_job(TEXT)
    assert parse_job(json.dumps(yaml.safe_load(TEXT), indent="\t")) == spec
    assert job_from_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("group_size", -3, "job file: group_size: must be at least 1, got -3"),
        ("batch_size", "256", 'job file: batch_size: must be a whole number, got "256"'),
        ("batch_size", True, "job file: batch_size: must be a whole number, got true"),
        ("name", "Digits", "job file: name: must be 1 to 100 lower case letters"),
        ("name", "a" * 101, "job file: name: must be 1 to 100 lower case letters"),
        ("streams", [], "job file: streams: must have at least 1 entries, got []"),
        ("streams", ["a", "a"], "job file: streams: must be different topics, got 'a' twice"),
        ("streams", ["a b"], "job file: streams: 'a b' cannot be a Kafka topic"),
        ("streams", ["doll.x.control"], "job file: streams: 'doll.x.control' is reserved"),
        ("synchronisation", {"mode": "ssp"}, "job file: synchronisation.mode: must be 'synchronou"),
        (
            "synchronisation",
            {"rules": [{"when": {"workers_from": 2}}]},
            "job file: synchronisation.rules[0].mode: is missing",
        ),
        ("compression", {}, "job file: compression: must have either significance or changes"),
        (
            "compression",
            {"significance": 1.5, "changes": 0.01},
            "job file: compression: must have either significance or changes",
        ),
        (
            "compression",
            {"significance": 0},
            "job file: compression.significance: must be above 0.0, got 0",
        ),
        (
            "compression",
            {"changes": 1.5},
            "job file: compression.changes: must be at most 1.0, got 1.5",
        ),
        (
            "synchronisation",
            {"mode": "stale", "staleness": -1},
            "job file: synchronisation.staleness: must be at least 1, got -1",
        ),
        (
            "synchronisation",
            {"mode": "synchronous", "staleness": 2},
            "job file: synchronisation: staleness: requires mode stale or asynchronous, got",
        ),
        (
            "synchronisation",
            {"mode": "averaging"},
            "job file: synchronisation: local_rate: is missing; mode averaging requires it",
        ),
        (
            "synchronisation",
            {"mode": "stale", "local_rate": 0.5},
            "job file: synchronisation: local_rate: requires mode averaging or asynchronous",
        ),
        (
            "synchronisation",
            {"mode": "averaging", "local_rate": 0.5, "damped": True},
            "job file: synchronisation: damped: requires mode stale or asynchronous, got mode aver",
        ),
        (
            "synchronisation",
            {"mode": "averaging", "local_rate": 0.5},
            "job file: optimizer.name: must be sgd or momentum with synchronisation.local_rate",
        ),
        ("records.codec", "xml", "job file: records.codec: must be one of tensor, json, avro"),
        ("records.codec", "json-schema", "job file: records.codec: must be json for records with"),
        ("records.fields.label.dtype", "int65", "job file: records.fields.label.dtype: must be"),
        ("records.fields.image.shape", [28, 0], "job file: records.fields.image.shape[1]: must"),
        ("records.fields.label", None, "job file: records.fields.label: is missing; image-"),
        ("records.fields.image.shape", [28, 28], "job file: records.fields.image: must be numbers"),
        (
            "records.fields.label.dtype",
            "float32",
            "job file: records.fields.label: must be a whole",
        ),
        ("task.name", "gan", "job file: task.name: must be one of image-classifier, logistic"),
        ("task.name", None, "job file: task: must have one of name, entrypoint and module"),
        ("optimizer.learning_rate", 0, "job file: optimizer.learning_rate: must be above 0"),
        (
            "optimizer.momentum",
            0.9,
            "job file: optimizer: momentum: is not an option of adam, only of sgd, momentum; remo",
        ),
        (
            "optimizer",
            {"name": "sgd", "learning_rate": 0.1, "nesterov": True},
            "job file: optimizer: nesterov: requires a momentum with sgd; set momentum",
        ),
        (
            "optimizer.schedule",
            {"kind": "cosine"},
            "job file: optimizer.schedule: updates: is missing; kind cosine requires it",
        ),
        (
            "optimizer.schedule",
            {"kind": "inverse_sqrt", "updates": 9, "final": 0.5},
            "job file: optimizer.schedule: final: is not an option of kind inverse_sqrt; remove",
        ),
        ("optimizer.clip_norm", 0.0, "job file: optimizer.clip_norm: must be above 0.0, got 0.0"),
        ("optimizer", None, "job file: optimizer: is missing"),
        ("stop.loss", "low", 'job file: stop.loss: must be a number, got "low"'),
        ("start_at", "noon", "job file: start_at: must be earliest, latest or a time such as"),
        ("start_at", "2026-01-31T12:00:00", "job file: start_at: must be a time with a zone"),
        ("waiting_batches", 3, "job file: waiting_batches: must be at least group_size (20)"),
        ("tracking", {"mlflow": "http://m"}, 'job file: unknown field "tracking.mlflow" (allowed'),
        ("tracking", {"register": "a/b"}, "job file: tracking.register: must be a name"),
        ("evaluation", {"every_updates": 0}, "job file: evaluation.every_updates: must be at"),
        ("evaluation", {"stream": "a test"}, "job file: evaluation.stream: must be a valid"),
        ("evaluation", {"stream": "clinic-a"}, "job file: evaluation.stream: must not be one of"),
        ("on_preemption", "pray", "job file: on_preemption: must be 'reassign' or 'hold', got"),
    ],
)
def test_invalid_value_is_rejected_by_its_path(path: str, value: object, message: str) -> None:
    assert refusal(changed(path, value)).startswith(message)


def test_tracking_round_trips_and_is_omitted_if_unset() -> None:
    assert parse_job(changed("tracking", {})).tracking is not None
    spec = parse_job(changed("tracking", {"register": "digits"}))
    assert spec.tracking is not None
    assert (spec.tracking.experiment, spec.tracking.model) == ("Default", "digits")
    assert job_from_json(spec.model_dump_json()) == spec
    # Programs of versions before `tracking` can read such a job.
    assert "tracking" not in parse_job(TEXT).model_dump_json()


def test_misspelt_field_is_rejected_with_a_suggestion() -> None:
    text = TEXT.replace("batch_size:", "batchsize:")
    assert 'unknown field "batchsize" (did you mean "batch_size"?)' in refusal(text)
    text = TEXT.replace("workers: 64", "worker: 64")
    assert 'unknown field "provisioning.worker" (did you mean "workers"?)' in refusal(text)
    text = TEXT.replace("label: {dtype:", "label: {dtpe:")
    assert 'unknown field "records.fields.label.dtpe" (did you mean "dtype"?)' in refusal(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job file: must be a mapping of fields to values, got null"),
        ("[1]", "job file: must be a mapping"),
        ("{", "job file: line 1, column 2: "),
        ("[" * 100_000, "job file: must be YAML or JSON"),
        ("a: &x 1\nb: *x", "job file: line 2, column 4: aliases (*x) are not allowed"),
        ("a: 1\na: 2", 'job file: line 2, column 1: field "a" is given twice'),
        ("a: !!binary aGk=", "job file: line 1, column 4: tags (tag:yaml.org,2002:binary) are not"),
        ("a: !!python/object:os.system x", "job file: line 1, column 4: tags (tag:yaml.org"),
        ("a: 1\n---\na: 2", "job file: line 2, column 1: a second document is not allowed"),
        ("? [a]\n: 1", "job file: line 1, column 3: a field's name must be text"),
        ("[" + "[]," * 300_000, "job file: must be YAML or JSON: more than 20,000 keys"),
        ("a" * 1_000_001, "job file: must have at most 1,000,000 characters, got"),
    ],
)
def test_text_that_is_not_a_mapping_is_rejected_with_its_position(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


def test_job_file_is_parsed_as_yaml_1_2() -> None:
    assert parse_job(TEXT.replace("1.0e-3", "1e-3")).optimizer.learning_rate == 0.001
    assert parse_job(TEXT.replace("name: digits", "name: no")).name == "no"


def test_task_columns_of_different_lengths_are_rejected() -> None:
    fields = {
        "index": {"dtype": "int32", "shape": [39]},
        "value": {"dtype": "float32", "shape": [40]},
        "label": {"dtype": "int64"},
    }
    task = {"name": "sparse-logistic", "features": 1000}
    text = json.dumps(yaml.safe_load(TEXT) | {"task": task, "records": {"fields": fields}})
    assert refusal(text) == (
        "job file: records.fields.value: must be as long as the task's other fields (39), got 40"
    )


def test_start_time_is_converted_to_seconds_since_1970() -> None:
    spec = parse_job(TEXT + "start_at: 2026-01-31T12:00:00Z\n")
    assert spec.start_s == datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
    assert parse_job(TEXT).start_s is None


def test_default_waiting_bound_is_twice_the_group_size() -> None:
    assert parse_job(TEXT).waiting_bound == 40
    assert parse_job(TEXT + "waiting_batches: 20\n").waiting_bound == 20


def test_task_sizes_come_from_the_records_and_cannot_differ() -> None:
    sizes = {"channels": 1, "height": 28, "width": 28}
    assert parse_job(TEXT).task_options == {**sizes, "classes": 10}
    with pytest.raises(UserError, match=r"task\.width: must be 28 as in the records, got 30"):
        parse_job(TEXT.replace("classes: 10", "classes: 10, width: 30"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(JobSpec.model_fields)), json_values)
def test_arbitrary_field_value_is_accepted_or_rejected_in_one_line(
    field: str, value: object
) -> None:
    data = {**yaml.safe_load(TEXT), field: value}
    try:
        spec = parse_job(json.dumps(data))
    except UserError as error:
        assert str(error).startswith("job file: ")  # noqa: PT017 -- both ends are right
    else:
        assert job_from_json(spec.model_dump_json()) == spec


@given(st.text(max_size=40))
def test_parse_job_raises_only_user_errors_on_arbitrary_text(text: str) -> None:
    with pytest.raises(UserError):
        parse_job(text)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("/etc/passwd", "must be s3://bucket/key, https://host/path or a relative path"),
        ("../a", "must be s3"),
        ("a/../../b", "must be s3"),
        ("a//b", "must be s3"),
        ("./a", "must be s3"),
        ("", "must be s3"),
        ("a\nb", "must be s3"),
        ("file:///etc/passwd", "must be s3"),
        ("ftp://host/a", "must be s3"),
        ("https://user:secret@host/a", "must be s3"),
        ("https://host", "must be s3"),
        ("https://host\\@evil/a", "must be s3"),
        ("https://host /a", "must be s3"),
        ("s3://bucket", "must be s3"),
        ("s3://bucket/../other/a", "must be s3"),
        ("http://host/a", "must begin with https://"),
        ("http://127.0.0.1.evil/a", "must begin with https://"),
    ],
)
def test_source_of_pretrained_weights_that_leads_elsewhere_is_rejected(
    source: str, problem: str
) -> None:
    with pytest.raises(UserError) as refused:
        parse_job(changed("init", {"from": source, "sha256": "0" * 64}))
    assert f"init.from: {problem}" in str(refused.value)


@pytest.mark.parametrize("sha256", ["0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_checksum_of_pretrained_weights_must_be_complete(sha256: str) -> None:
    with pytest.raises(UserError, match=r"init\.sha256: must be 64 hexadecimal digits"):
        parse_job(changed("init", {"from": "a", "sha256": sha256}))
    with pytest.raises(UserError, match=r"init\.sha256: is missing"):
        parse_job(changed("init", {"from": "a"}))


def test_pretrained_weights_survive_the_jobs_topic_and_show_no_query() -> None:
    given = {"from": "https://host/a?token=1", "sha256": "0" * 64, "new": ["head.*"]}
    spec = parse_job(changed("init", given))
    assert job_from_json(spec.model_dump_json()) == spec
    assert spec.init is not None
    assert spec.init.shown == "https://host/a"
    assert "init" not in parse_job(TEXT).model_dump(mode="json")


def test_members_that_hold_the_weights_cannot_start_with_pretrained_ones() -> None:
    data = yaml.safe_load(changed("init", {"from": "a", "sha256": "0" * 64}))
    with pytest.raises(UserError, match="mode: group cannot be combined with init"):
        parse_job(yaml.safe_dump(data | {"aggregation": {"mode": "group"}}))


def with_optimizer(name: str = "sgd", **options: Any) -> str:  # noqa: ANN401 -- any JSON
    return changed("optimizer", {"name": name, "learning_rate": 0.1, **options})


def test_groups_of_parameters_are_parsed_and_omitted_if_unset() -> None:
    groups = [{"match": "encoder.*", "learning_rate": 0.01}, {"match": "*", "weight_decay": 0}]
    spec = parse_job(with_optimizer("adamw", groups=groups, no_decay=["norms", "biases"]))
    first, second = spec.optimizer.groups
    assert (first.match, first.learning_rate, first.weight_decay) == ("encoder.*", 0.01, None)
    assert (second.learning_rate, second.weight_decay) == (None, 0)
    assert spec.optimizer.options == {}
    assert job_from_json(spec.model_dump_json()) == spec
    record = parse_job(TEXT).model_dump_json()
    assert "groups" not in record
    assert "no_decay" not in record


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (with_optimizer(groups=[{"match": "a"}]), "must have learning_rate, weight_decay, or both"),
        (with_optimizer(groups=[{"match": "", "weight_decay": 0}]), "optimizer.groups[0].match"),
        (with_optimizer(groups=[{"match": "a", "learning_rate": 0}]), "groups[0].learning_rate"),
        (with_optimizer(no_decay=["weights"]), "optimizer.no_decay[0]"),
        (with_optimizer("ftrl", no_decay=["norms"]), "no_decay: ftrl has no weight decay"),
        (
            with_optimizer(
                "ftrl",
                groups=[{"match": "a", "learning_rate": 1}, {"match": "b", "weight_decay": 1}],
            ),
            "groups[1].weight_decay: ftrl has no weight decay",
        ),
    ],
)
def test_invalid_group_of_parameters_is_rejected(text: str, reason: str) -> None:
    assert reason in refusal(text)


def test_group_rates_cannot_be_combined_with_local_steps() -> None:
    data = yaml.safe_load(with_optimizer(groups=[{"match": "a", "learning_rate": 1}]))
    data["synchronisation"] = {"mode": "averaging", "local_rate": 0.1}
    assert "optimizer.groups: a learning_rate of a group" in refusal(yaml.safe_dump(data))
    data["optimizer"]["groups"] = [{"match": "a", "weight_decay": 1}]
    assert parse_job(yaml.safe_dump(data)).optimizer.groups


def test_change_of_group_size_with_group_rates_requires_a_learning_rate() -> None:
    spec = parse_job(with_optimizer(groups=[{"match": "a", "learning_rate": 1}]))
    with pytest.raises(UserError, match="set learning_rate, too"):
        changed_spec(spec, {"group_size": 10})
    made = changed_spec(spec, {"group_size": 10, "learning_rate": 0.2})
    assert (made.group_size, made.optimizer.learning_rate) == (10, 0.2)
    assert made.optimizer.groups == spec.optimizer.groups
    with pytest.raises(UserError, match='"groups" cannot be changed'):
        changed_spec(spec, {"groups": None})
