"""Settings are read from the environment once, and written back for child processes."""

from __future__ import annotations

import re
import subprocess
import traceback
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.config.settings import Settings, read_settings
from common.errors import UserError

ROOT = Path(__file__).parents[3]
FULL = {
    "DOLL_KAFKA": "a:9092,b:9092",
    "DOLL_KAFKA_GROUP_PROTOCOL": "consumer",
    "DOLL_KAFKA_REPLICATION": "3",
    "DOLL_KAFKA_CLIENT_RACK": "eu-west-1a",
    "DOLL_KAFKA_COMPRESSION_TYPE": "zstd",
    "DOLL_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
    "DOLL_KAFKA_SASL_USERNAME": "doll",
    "DOLL_KAFKA_SASL_PASSWORD": "secret",
    "DOLL_REDIS": "rediss://r:6379/0",
    "DOLL_REDIS_PASSWORD": "secret",
    "DOLL_REDIS_CA": "/tls/ca.pem",
    "DOLL_REDIS_CERT": "/tls/doll.pem",
    "DOLL_REDIS_KEY": "/tls/doll.key",
    "DOLL_BLOBS": "s3://bucket/models",
    "DOLL_TASKS": "a.b:C, d:E",
    "DOLL_GPUS": "0, GPU-8a,MIG-GPU-1b/2/0",
    "DOLL_DEVICE": "cpu",
    "DOLL_THREADS": "2",
    "DOLL_NOTICES": "ec2",
    "DOLL_METADATA_ENDPOINT": "http://[fd00:ec2::254]:80",
    "DOLL_LEAVE_S": "7.5",
    "DOLL_METRICS_PORT": "9464",
    "DOLL_METRICS_HOST": "::1",
    "DOLL_LOG_FORMAT": "json",
    "DOLL_LOG_LEVEL": "debug",
}


def test_every_variable_sets_its_field() -> None:
    settings = read_settings(FULL)
    assert settings.kafka == "a:9092,b:9092"
    assert settings.kafka_replication == 3
    assert settings.kafka_properties == {
        "compression.type": "zstd",
        "security.protocol": "SASL_SSL",
        "sasl.username": "doll",
        "sasl.password": "secret",
    }
    assert settings.tasks == ("a.b:C", "d:E")
    assert settings.threads == 2
    assert settings.leave_s == 7.5


def test_empty_environment_gives_the_defaults() -> None:
    assert read_settings({}) == Settings()
    assert read_settings({"DOLL_KAFKA": "", "DOLL_THREADS": "", "PATH": "/bin"}) == Settings()


def test_child_process_gets_the_same_settings() -> None:
    settings = read_settings(FULL)
    assert read_settings(settings.environ()) == settings
    assert Settings().environ() == {}


def test_hosts_of_pretrained_weights_are_names_in_lower_case_and_buckets() -> None:
    settings = read_settings({"DOLL_INIT_HOSTS": "Models.Example, s3://nets,::1"})
    assert settings.init_hosts == ("models.example", "s3://nets", "::1")


def test_embedded_broker_is_named_by_its_socket() -> None:
    assert read_settings({"DOLL_KAFKA": "embedded:/run/k.sock"}).embedded_kafka == "/run/k.sock"
    assert read_settings({}).embedded_kafka == ""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DOLL_THREADS", "many", 'DOLL_THREADS: must be a whole number, got "many"'),
        ("DOLL_THREADS", "-1", 'DOLL_THREADS: must be at least 0, got "-1"'),
        ("DOLL_DEVICE", "tpu", "DOLL_DEVICE: must be 'auto', 'cpu' or 'cuda', got \"tpu\""),
        ("DOLL_GPUS", "first", "DOLL_GPUS: must be all, none, or indices and UUIDs, separated by"),
        ("DOLL_GPUS", "all,0", "DOLL_GPUS: must be all, none, or indices and UUIDs, separated by"),
        ("DOLL_GPUS", "-1", "DOLL_GPUS: must be all, none, or indices and UUIDs, separated by"),
        ("DOLL_BLOBS", "/tmp", "DOLL_BLOBS: must be file:///directory or s3://bucket/prefix, g"),  # noqa: S108 -- only a text
        ("DOLL_NOTICES", "ibm", "DOLL_NOTICES: must be 'auto', 'none', 'ec2', 'gce' or 'azure',"),
        ("DOLL_LEAVE_S", "-1", 'DOLL_LEAVE_S: must be at least 0.0, got "-1"'),
        ("DOLL_LEAVE_S", "inf", 'DOLL_LEAVE_S: must be a finite number, got "inf"'),
        ("DOLL_REDIS", "r:6379", "DOLL_REDIS: must be redis://host:port/db, rediss://... or unix"),
        (
            "DOLL_REDIS",
            "redis://:a/b@r:6379",
            "DOLL_REDIS: is not a complete URL; in a password wr",
        ),
        ("DOLL_REDIS_CA", "/ca.pem", "DOLL_REDIS: must begin with rediss:// if certificates"),
        ("DOLL_API_TLS_CERT", "/a.pem", "DOLL_API_TLS_KEY: is missing, but DOLL_API_TLS_CERT is "),
        ("DOLL_API_TLS_KEY", "/a.key", "DOLL_API_TLS_CERT: is missing, but DOLL_API_TLS_KEY is "),
        (
            "DOLL_INIT_HOSTS",
            "a,b/c",
            "DOLL_INIT_HOSTS: must be host names or s3://bucket, got 'b/c",
        ),
        ("DOLL_INIT_HOSTS", "https://a", "DOLL_INIT_HOSTS: must be host names or s3://bucket, g"),
        ("DOLL_MLFLOW", "http://u:secret@m", "DOLL_MLFLOW: must be http://host:port or https://ho"),
        ("DOLL_MLFLOW_TOKEN", "secret", "DOLL_MLFLOW: is missing, but a token or a password"),
        ("DOLL_MLFLOW_USERNAME", "me", "DOLL_MLFLOW_PASSWORD: is missing, but DOLL_MLFLOW_USERNA"),
        ("DOLL_MLFLOW_PASSWORD", "secret", "DOLL_MLFLOW_USERNAME: is missing, but DOLL_MLFLOW_PA"),
        ("DOLL_KAFKA", "u:secret@k:9092", "DOLL_KAFKA: must be host:port,...; set a password in"),
        ("DOLL_BLOBS", "s3://u:secret@b", "DOLL_BLOBS: must be file:///directory or s3://bucket/"),
    ],
)
def test_invalid_value_is_rejected_with_its_variable(name: str, value: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_settings({name: value})
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint", ["http://169.254.169.254", "http://[fd00:ec2::254]/", "http://metadata.local:8080"]
)
def test_metadata_endpoint_with_host_and_port_is_accepted(endpoint: str) -> None:
    assert read_settings({"DOLL_METADATA_ENDPOINT": endpoint}).metadata_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "169.254.169.254",
            "https://a",
            "http://",
            "http://a/latest",
            "http://a:0",
            "http://a..b",
        ),
        *(
            "http://a:70000",
            "http://u@a",
            "http://a b",
            "http://ä",
            "http://" + 64 * "a",
            "http://[",
        ),
    ],
)
def test_invalid_metadata_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(UserError, match="DOLL_METADATA_ENDPOINT: "):
        read_settings({"DOLL_METADATA_ENDPOINT": endpoint})


@pytest.mark.parametrize(
    "url",
    [
        *("redis://r", "redis://r:6379/", "rediss://u:p%2F@r:1/15", "redis://[::1]:6379/0"),
        *("unix:///run/redis.sock", "unix://u:p@/run/redis.sock?db=2"),
    ],
)
def test_complete_redis_url_is_accepted(url: str) -> None:
    assert read_settings({"DOLL_REDIS": url}).redis == url


@pytest.mark.parametrize(
    "url",
    [
        *("redis://:a#b@r", "redis://u:12#b@r", "redis://u:12/b@r", "redis://u:12?b@r:6379"),
        *("redis://:12?b@r", "redis://r:70000", "redis://r:0", "redis://[::1", "redis:///0"),
        *("unix://:a/b@/run/redis.sock", "unix://:12/b@/run/redis.sock", "unix://u", "redis://r/x"),
    ],
)
def test_redis_url_split_by_a_password_is_rejected(url: str) -> None:
    with pytest.raises(
        UserError, match=r"DOLL_REDIS: is not a complete URL.*in DOLL_REDIS_PASSWORD"
    ):
        read_settings({"DOLL_REDIS": url})


def test_redis_password_in_two_places_is_rejected() -> None:
    with pytest.raises(UserError, match="DOLL_REDIS_PASSWORD: the URL in DOLL_REDIS has a"):
        read_settings({"DOLL_REDIS": "redis://:a@r", "DOLL_REDIS_PASSWORD": "b"})
    named = read_settings({"DOLL_REDIS": "redis://u@r", "DOLL_REDIS_PASSWORD": "b"})
    assert (named.redis, named.redis_password) == ("redis://u@r", "b")


# --- secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FULL if not name.endswith("_PROTOCOL")])
def test_every_variable_can_come_from_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "value"
    path.write_text(FULL[name] + "\n")
    others = {each: value for each, value in FULL.items() if each != name}
    assert read_settings({**others, name + "_FILE": str(path)}) == read_settings(FULL)


@pytest.mark.parametrize(
    ("content", "value"),
    [(b"a", "a"), (b"a\n", "a"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b" a\nb \n", " a\nb ")],
)
def test_one_trailing_newline_of_a_file_is_removed(
    tmp_path: Path, content: bytes, value: str
) -> None:
    path = tmp_path / "password"
    path.write_bytes(content)
    settings = read_settings({"DOLL_REDIS_PASSWORD_FILE": str(path)})
    assert settings.redis_password == value
    assert read_settings(settings.environ()) == settings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "DOLL_REDIS_PASSWORD_FILE: the file cannot be read: No such file or directory"),
        (b"", "DOLL_REDIS_PASSWORD_FILE: the file is empty"),
        (b"\n", "DOLL_REDIS_PASSWORD_FILE: the file is empty"),
        (b"a\0b", "DOLL_REDIS_PASSWORD_FILE: the file is not text"),
        (b"\xff", "DOLL_REDIS_PASSWORD_FILE: the file is not UTF-8 text"),
        (70_000 * b"a", "DOLL_REDIS_PASSWORD_FILE: the file is larger than 65536 bytes"),
    ],
)
def test_file_without_a_valid_value_is_rejected_with_its_variable(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_settings({"DOLL_REDIS_PASSWORD_FILE": str(path)})
    assert str(caught.value) == message


def test_value_given_both_directly_and_as_a_file_is_rejected(tmp_path: Path) -> None:
    path = str(tmp_path / "password")
    both = {"DOLL_KAFKA_SASL_PASSWORD": "a", "DOLL_KAFKA_SASL_PASSWORD_FILE": path}
    with pytest.raises(
        UserError, match=r"^DOLL_KAFKA_SASL_PASSWORD and DOLL_KAFKA_SASL_PASSWORD_FI"
    ):
        read_settings(both)
    (tmp_path / "password").write_text("b")
    settings = read_settings({**both, "DOLL_KAFKA_SASL_PASSWORD": ""})
    assert settings.kafka_properties == {"sasl.password": "b"}


def test_files_that_the_kafka_client_reads_are_passed_on() -> None:
    names = {
        "DOLL_KAFKA_SSL_CA_LOCATION": "/ca.pem",
        "DOLL_KAFKA_SASL_OAUTHBEARER_ASSERTION_FILE": "/assertion",
        "DOLL_KAFKA_SASL_OAUTHBEARER_ASSERTION_PRIVATE_KEY_FILE": "/key",
    }
    settings = read_settings(names)
    assert settings.kafka_properties == {
        "ssl.ca.location": "/ca.pem",
        "sasl.oauthbearer.assertion.file": "/assertion",
        "sasl.oauthbearer.assertion.private.key.file": "/key",
    }
    assert read_settings(settings.environ()) == settings


def test_file_variables_of_other_programs_are_not_read() -> None:
    assert read_settings({"NEWS_FILE": "/none", "redis_password_FILE": "/none"}) == Settings()


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("DOLL_REDIS_URL", 'did you mean "DOLL_REDIS"?'),
        ("DOLL_KAFKA_HOST", 'did you mean "DOLL_KAFKA"?'),
        ("DOLL_KAFKA_RACK", 'did you mean "DOLL_KAFKA_CLIENT_RACK"?'),
        ("DOLL_KAFKA_COMPRESSION", 'did you mean "DOLL_KAFKA_COMPRESSION_TYPE"?'),
        ("DOLL_BLOB_FILE", 'did you mean "DOLL_BLOBS"?'),
        ("DOLL_KAFKA_SECURITY", 'did you mean "DOLL_KAFKA_SECURITY_PROTOCOL"?'),
        ("DOLL_KAFKA_COMPRESSION_TYPE_FILES", 'did you mean "DOLL_KAFKA_COMPRESSION_TYPE"?'),
        ("DOLL_XYZZY", "allowed are DOLL_ADVERTISE, DOLL_API, "),
    ],
)
def test_unknown_variable_is_rejected_with_a_suggestion(variable: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"^{variable}: unknown setting ") as caught:
        read_settings({variable: "secret"})
    assert hint in str(caught.value)
    assert "secret" not in str(caught.value)
    assert read_settings({variable: ""}) == Settings()


def test_variables_in_deployments_and_documents_are_known() -> None:
    listed = subprocess.run(
        ["git", "grep", "-ohE", r"\bDOLL_[A-Z][A-Z0-9_]*[A-Z0-9]\b", "--", ":!tests", ":!*.md"],  # noqa: S607 -- of this checkout
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pages = (path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    written = re.findall(r"\bDOLL_[A-Z][A-Z0-9_]*[A-Z0-9](?=[=:\s`])", "".join(pages))
    names = {*listed.split(), *written}
    assert len(names) > 50
    for name in names:
        try:
            read_settings({name: "1"})
        except UserError as error:
            assert "unknown setting" not in str(error)  # noqa: PT017 -- what it may hold is not asked


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("DOLL_KAFKA_ISOLATION_LEVEL", "exactly-once training depends on it"),
        ("DOLL_KAFKA_ACKS_FILE", "exactly-once training depends on it"),
        ("DOLL_KAFKA_GROUP_ID", "consumer groups and their members are named after"),
        ("DOLL_KAFKA_FETCH_MIN_BYTES", "it limits a process's memory and the waiting"),
        ("DOLL_KAFKA_BOOTSTRAP_SERVERS", "the brokers' addresses are set in DOLL_KAFKA"),
        ("DOLL_KAFKA_PLUGIN_LIBRARY_PATHS", "it could load code"),
    ],
)
def test_reserved_client_property_is_rejected_with_the_reason(variable: str, why: str) -> None:
    with pytest.raises(UserError, match=f"^{variable}: cannot be set: {why}"):
        read_settings({variable: "1"})


def test_content_of_an_invalid_file_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("hunter2")
    with pytest.raises(UserError) as caught:
        read_settings({"DOLL_BLOBS_FILE": str(path)})
    assert str(caught.value).startswith(
        "DOLL_BLOBS_FILE: the file has no valid value for DOLL_BLOB"
    )
    assert "hunter2" not in all_text(caught.value)


def test_passwords_are_not_shown() -> None:
    assert "secret" not in repr(read_settings(FULL))


def all_text(error: BaseException) -> str:
    """Return all text of an error and its causes that a traceback may show."""
    return "".join(traceback.format_exception(error))


# Stands between the letters of a secret.
SIGN = "¤"
# Settings that hold a password, or may do so by mistake.
HOLD_SECRETS = {
    "DOLL_REDIS": "rediss://u:{}@r",
    "DOLL_REDIS_PASSWORD": "{}",
    "DOLL_REDIS_PASSWORD_FILE": "{}",
    "DOLL_KAFKA": "u:{}@k:9092",
    "DOLL_KAFKA_SASL_PASSWORD": "{}",
    "DOLL_KAFKA_SASL_PASSWORD_FILE": "{}",
    "DOLL_KAFKA_SSL_KEY_PEM": "{}",
    "DOLL_BLOBS": "s3://u:{}@bucket",
    "DOLL_METADATA_ENDPOINT": "http://u:{}@m",
    "DOLL_API": "https://u:{}@a",
    "DOLL_API_KEY": "{}",
    "DOLL_MLFLOW": "https://u:{}@m",
    "DOLL_MLFLOW_TOKEN": "{}",
    "DOLL_MLFLOW_PASSWORD": "{}",
}


@given(
    st.sets(st.sampled_from(sorted(HOLD_SECRETS)), min_size=1),
    st.text(st.characters(exclude_categories=["C", "Z"]), min_size=2, max_size=40),
    st.dictionaries(st.sampled_from(["DOLL_THREADS", "DOLL_DEVICE"]), st.just("bad")),
)
@example({"DOLL_REDIS"}, "1/2", {})
@example({"DOLL_REDIS"}, "]/[", {})
def test_no_part_of_a_secret_is_shown_by_settings_or_errors(
    names: set[str], characters: str, others: dict[str, str]
) -> None:
    secret = SIGN.join(characters)
    environ = {**others, **{name: HOLD_SECRETS[name].format(secret) for name in names}}
    try:
        shown = repr(read_settings(environ))
    except UserError as error:
        shown = str(error) + all_text(error)
    assert SIGN not in shown


@given(st.dictionaries(st.sampled_from(sorted(FULL)), st.text(max_size=10)))
def test_any_environment_gives_settings_or_an_error(environ: dict[str, str]) -> None:
    try:
        settings = read_settings(environ)
    except UserError as error:
        assert "DOLL_" in str(error)  # noqa: PT017 -- both ends are right
    else:
        assert read_settings(settings.environ()) == settings


def test_schema_registry_variables_become_client_properties() -> None:
    environ = {
        "DOLL_SCHEMA_REGISTRY_URL": "https://registry:8081,https://other:8081/api",
        "DOLL_SCHEMA_REGISTRY_BASIC_AUTH_USER_INFO": "doll:a-secret",
    }
    settings = read_settings(environ)
    assert settings.schema_registry == {
        "url": "https://registry:8081,https://other:8081/api",
        "basic.auth.user.info": "doll:a-secret",
    }
    assert settings.environ() == environ
    assert "a-secret" not in repr(settings)
    assert read_settings({}).schema_registry == {}


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("URL", "registry:8081", r"^DOLL_SCHEMA_REGISTRY_URL: must be http://host:port"),
        ("URL", "http://me:a-secret@registry", r"set a password in \S*_BASIC_AUTH_USER_INFO"),
        ("PROXY", "http://proxy:1", "^DOLL_SCHEMA_REGISTRY_URL: is missing"),
        ("BASIC_AUTH_USERINFO", "x", 'did you mean "DOLL_SCHEMA_REGISTRY_BASIC_AUTH_USER_INFO"'),
    ],
)
def test_invalid_schema_registry_settings_are_rejected(
    variable: str, value: str, expected: str
) -> None:
    with pytest.raises(UserError, match=expected) as refused:
        read_settings({f"DOLL_SCHEMA_REGISTRY_{variable}": value})
    assert "a-secret" not in str(refused.value)
