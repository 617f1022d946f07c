"""Settings, which are read once from the environment and can be passed on to child processes.

docs/reference/settings.md lists them. For any of them, a variable with the suffix `_FILE` may name
a file that holds the value, as container secrets do: DOLL_REDIS_PASSWORD_FILE=/run/secrets/redis.
Secrets, and values that may contain one, appear neither in `repr` nor in errors. An unknown DOLL_
variable is refused: otherwise a misspelled setting would be silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import ip_network
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from common.config.kafka_properties import (
    property_of,
    refusal_of,
    registry_property_of,
    registry_variable_of,
    variable_of,
    variables,
)
from common.config.validation import complaint, nearest
from common.errors import UserError
from doll.secret_files import SUFFIX, resolve_files

_BEGINNING = re.compile(r"(redis|rediss|unix)://.+", re.DOTALL)
_DATABASE = re.compile(r"(/\d*)?", re.ASCII)


def check_redis_url(value: str) -> str:
    """Return a URL of Redis if it is complete.

    A slash in a password ends the host part too early. The remainder may still be a valid URL,
    whose host and port are pieces of the password and would be shown in a connection error.

    Raises:
        ValueError: If it is not complete. The message says what to do.
    """
    if not _BEGINNING.fullmatch(value):
        raise ValueError("must be redis://host:port/db, rediss://... or unix:///path")
    if not _is_whole(value):
        raise ValueError(
            "is not a complete URL; in a password write / as %2F, ? as %3F, # as %23 and @ as %40,"
            " or set the password in DOLL_REDIS_PASSWORD"
        )
    return value


def holds_password(value: str) -> bool:
    """True if a checked URL contains a password."""
    return bool(urlsplit(value).password)


def _is_whole(value: str) -> bool:
    try:
        url = urlsplit(value)
        host, port = url.hostname, url.port
    except ValueError:
        return False
    if url.fragment or "@" in url.query:
        return False
    if url.scheme == "unix":
        return bool(url.path) and host is None and port is None
    return bool(host) and port != 0 and bool(_DATABASE.fullmatch(url.path))


_PREFIX = "DOLL_"
_EMBEDDED = "embedded:"
_BLOBS = re.compile(r"(file:///.*|s3://[^/@]+(/.*)?)?")
_API = re.compile(r"(https?://[^/@?#\s]+(/[^@?#\s]*)?)?")
_LOOPBACK = re.compile(r"http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/|$)")
_INIT_HOST = re.compile(r"s3://[\w.-]+|[\w.-]+|[\da-fA-F:]+", re.ASCII)
_HOST = re.compile(r"[\w.:-]*", re.ASCII)
_GPU = r" *(\d{1,4}|(GPU|MIG)-[\w/-]+) *"
_GPUS = re.compile(rf"all|none|{_GPU}(,{_GPU})*", re.ASCII)
_ENDPOINT = re.compile(r"http://([\w-]{1,63}(\.[\w-]{1,63})*|\[[\da-fA-F:.]+\])(:\d+)?/?", re.ASCII)


def _legal(is_legal: Callable[[str], object], complaint: str) -> AfterValidator:
    """Validate the form of a text. The error omits a value that might contain a password."""

    def check(value: str) -> str:
        if not is_legal(value):
            raise ValueError(complaint if "@" in value else f"{complaint}, got {value!r}")
        return value

    return AfterValidator(check)


def _names_server(value: str) -> bool:
    # Reading an invalid port raises a `ValueError` of its own.
    return bool(_ENDPOINT.fullmatch(value)) and urlsplit(value).port != 0


def _check_networks(value: tuple[str, ...]) -> tuple[str, ...]:
    for each in value:
        try:
            ip_network(each)
        except ValueError as error:
            raise ValueError(f"must be addresses or networks: {error}") from error
    return value


def _split(value: object) -> object:
    return (
        tuple(filter(None, value.replace(" ", "").split(","))) if isinstance(value, str) else value
    )


def _check_init_hosts(value: tuple[str, ...]) -> tuple[str, ...]:
    for each in value:
        if not _INIT_HOST.fullmatch(each):
            raise ValueError(f"must be host names or s3://bucket, got {each!r}")
    return tuple(each if each.startswith("s3://") else each.lower() for each in value)


_Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
_Url = Annotated[
    str,
    _legal(_API.fullmatch, "must be http://host:port or https://host:port"),
    AfterValidator(lambda value: value.rstrip("/")),
]


# Settings that take any number of variables, each with the function that maps a variable to a
# property.
_PROPERTIES = {"kafka_properties": property_of, "schema_registry": registry_property_of}


class Settings(BaseModel):
    """All settings that a process reads from its environment; `kafka` is DOLL_KAFKA there."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    kafka: Annotated[
        str,
        _legal(
            lambda value: "@" not in value or value.startswith(_EMBEDDED),
            "must be host:port,...; set a password in DOLL_KAFKA_SASL_PASSWORD",
        ),
    ] = "localhost:9092"
    """Addresses of the Kafka brokers, as `host:port,host:port`; for DOLL's built-in broker, which
    `doll up` can start, the path of its socket, as `embedded:/path/to/socket`."""
    kafka_group_protocol: Literal["classic", "consumer"] = "classic"
    """Protocol of Kafka's consumer groups: `classic`, or `consumer` with Kafka 4 or later."""
    kafka_replication: int = -1
    """Replication factor of the Kafka topics that DOLL creates; -1 is the broker's default."""
    kafka_client_rack: str = ""
    """Rack of this process, as in the brokers' `broker.rack`: streams are read from replicas in the
    same rack. `auto` takes the id of the machine's EC2 availability zone from EC2's metadata
    service. Optional. If unset, streams are read from the partitions' leaders."""
    # May contain passwords, like the URL of Redis: neither is ever shown.
    kafka_properties: dict[str, str] = Field(default={}, repr=False)
    """Properties of the Kafka client, one variable for each: DOLL_KAFKA_SASL_USERNAME sets
    `sasl.username`. See [security](../howto/security.md#kafka)."""
    schema_registry: dict[str, str] = Field(default={}, repr=False)
    """Properties of the schema registry's client, one variable for each: DOLL_SCHEMA_REGISTRY_URL
    for its URL, DOLL_SCHEMA_REGISTRY_BASIC_AUTH_USER_INFO for user name and password. See
    [security](../howto/security.md#schema-registry)."""
    redis: Annotated[str, AfterValidator(check_redis_url)] = Field(
        default="redis://localhost:6379", repr=False
    )
    """URL of Redis: `redis://host:port/db`, `rediss://` with TLS, or `unix://`. It may name an ACL
    user: `redis://doll@host`."""
    redis_password: str = Field(default="", repr=False)
    """Password for Redis. Optional. If unset, the password in the URL, or none."""
    redis_ca: str = ""
    """File with the certificate authorities to trust for `rediss://`. Optional. If unset, the
    system's."""
    redis_cert: str = ""
    """File with the client certificate, if Redis requires one. Optional. If unset, none is
    sent."""
    redis_key: str = ""
    """File with the private key of the certificate in DOLL_REDIS_CERT. Required if DOLL_REDIS_CERT
    is set."""
    blobs: Annotated[
        str, _legal(_BLOBS.fullmatch, "must be file:///directory or s3://bucket/prefix")
    ] = ""
    """Object storage for checkpoints: `file:///directory`, or `s3://bucket/prefix` on the server
    that AWS_ENDPOINT_URL_S3 names (if unset, Amazon's). Optional. If unset, there are no
    checkpoints."""
    tasks: _Names = ()
    """Entrypoints (`package.module:Class`) of tasks that jobs may use, separated by commas.
    Optional. If unset, jobs may use only built-in tasks."""
    init_hosts: Annotated[_Names, AfterValidator(_check_init_hosts)] = ()
    """Hosts and buckets from which jobs may start with pretrained weights (`init`), separated by
    commas: host names without a port, and buckets as `s3://bucket`. The bucket of DOLL_BLOBS needs
    no entry. Set it for coordinators and the admin service. Optional. If unset, none."""
    models: str = ""
    """Folder of coordinators with files of pretrained weights (`init`), which jobs name by a
    relative path. Optional. If unset, jobs cannot name a path."""
    coordinator_memory_mib: int = Field(default=2048, ge=1)
    """Maximum memory of a coordinator for one job, in MiB. The memory holds the updates that are in
    progress at the same time and, with `compression`, a record of the weights that each worker has.
    A job that needs more memory is rejected. For `synchronisation.mode: asynchronous` without
    `staleness` and `provisioning.workers`, the coordinator assumes eight updates in progress."""
    gpus: Annotated[
        str, _legal(_GPUS.fullmatch, "must be all, none, or indices and UUIDs, separated by commas")
    ] = "all"
    """GPUs on which a worker computes gradients, each as a worker of its own: `all` that PyTorch
    supports (or the CPU if there is none), `none` (the CPU), or indices in the order of the PCI bus
    and beginnings of UUIDs (`GPU-...`, `MIG-...`), separated by commas. CUDA_VISIBLE_DEVICES limits
    `all`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device on which an evaluator and `doll serve` compute; `auto` is the GPU if there is one,
    otherwise the CPU. A worker has DOLL_GPUS instead."""
    threads: int = Field(default=0, ge=0)
    """Number of CPU threads with which a worker computes a gradient; 0 means all cores."""
    notices: Literal["auto", "none", "ec2", "gce", "azure"] = "auto"
    """Source of notices that the worker's machine will be preempted: the metadata service of EC2
    (`ec2`), Compute Engine (`gce`) or Azure (`azure`), `none`, or `auto` for that of the cloud that
    the machine's firmware names, if any."""
    # Not the AWS_ variable of the same purpose, because it often names a server that only issues
    # credentials and never shows a notice.
    metadata_endpoint: Annotated[
        str, _legal(_names_server, "must be http://host or http://host:port")
    ] = "http://169.254.169.254"
    """URL of the cloud's metadata service. The default is its usual link-local address."""
    # A gradient takes up to a few seconds, and a spot notice comes 120 s ahead. Together with its
    # last messages, a worker ends before Kubernetes kills it, 30 s after its SIGTERM.
    leave_s: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    """Maximum time that a worker that is shutting down waits for its gradients in progress, in
    seconds."""
    advertise: Annotated[
        str, _legal(_HOST.fullmatch, "must be a host's name or address, without a port")
    ] = ""
    """Host name or address at which other workers reach this worker, to sum gradients among
    themselves (`aggregation: {mode: group}`). Optional. If unset, the address from which this
    machine connects to Redis."""
    tier: Literal["reliable", "spot"] = "spot"
    """Kind of this worker's machine: `spot` if the provider may preempt it, otherwise `reliable`.
    Used for jobs with `aggregation: {layout: slices}`, to choose the workers that own slices of the
    weights."""
    owner_pid: int = Field(default=0, ge=0)
    """Id of a process that owns this process: when the owner ends, this process ends, too. 0 means
    that there is no owner."""
    market: str = ""
    """Path of the market file, which lists the machines that can be rented and their prices.
    Optional. If unset, no machines can be rented."""
    fleet_directory: str = ""
    """Directory for the logs of rented machines, if these are local processes (`fleet: process` in
    the file that DOLL_MARKET names). Optional. If unset, a temporary directory."""
    api_host: str = "127.0.0.1"
    """Address on which the admin service listens."""
    api_port: int = Field(default=8080, ge=0, le=65535)
    """Port on which the admin service listens; 0 means any free port."""
    api_tls_cert: str = ""
    """File with the admin service's TLS certificate chain. Optional. If unset, the service speaks
    plain HTTP."""
    api_tls_key: str = ""
    """File with the private key of the certificate in DOLL_API_TLS_CERT. Required if
    DOLL_API_TLS_CERT is set."""
    api_body_bytes: int = Field(default=1 << 20, ge=1024)
    """Maximum size of a request's body that the admin service accepts, in bytes."""
    api_proxies: Annotated[_Names, AfterValidator(_check_networks)] = ()
    """Addresses and networks of proxies that the admin service trusts, separated by commas. For
    requests from these proxies, the client's address is the one in the X-Forwarded-For header.
    Optional. If unset, none."""
    oidc_issuer: _Url = ""
    """URL of the OpenID Connect issuer whose access tokens the admin service accepts, in addition
    to API keys. Optional. If unset, it accepts only API keys."""
    oidc_audience: str = ""
    """Audience that the OpenID Connect issuer's access tokens must have. Required if
    DOLL_OIDC_ISSUER is set."""
    oidc_groups: str = "groups"
    """Claim of the OpenID Connect issuer's access tokens that lists the user's groups."""
    oidc_operators: _Names = ()
    """Groups of the OpenID Connect issuer whose members are operators (may change jobs), separated
    by commas. All other users are viewers (may only read). Optional. If unset, all users are
    viewers."""
    oidc_client_id: str = ""
    """Client id with which the admin service's live page signs users in at the OpenID Connect
    issuer. Optional. If unset, the page has no sign-in, and only programs use tokens."""
    oidc_client_secret: str = Field(default="", repr=False)
    """Secret of the OpenID Connect client in DOLL_OIDC_CLIENT_ID. Optional. If unset, no secret is
    sent (a public client)."""
    oidc_scope: str = "openid"
    """Scopes that the admin service's live page requests from the OpenID Connect issuer, separated
    by spaces, so that the issuer grants tokens for DOLL_OIDC_AUDIENCE."""
    mlflow: _Url = ""
    """URL of the MLflow tracking server to which evaluators report jobs with a `tracking` block.
    Optional. If unset, nothing is reported."""
    mlflow_token: str = Field(default="", repr=False)
    """Bearer token for the MLflow server. Optional. If unset, no token is sent."""
    mlflow_username: str = ""
    """User name for the MLflow server, instead of DOLL_MLFLOW_TOKEN. Optional. If unset, no user
    name is sent."""
    mlflow_password: str = Field(default="", repr=False)
    """Password for the MLflow server, of the user in DOLL_MLFLOW_USERNAME."""
    api: _Url = "http://127.0.0.1:8080"
    """URL of the admin service to which the command line sends requests."""
    api_key: str = Field(default="", repr=False)
    """API key that the command line sends to the admin service. Optional. If unset, none is
    sent."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port on which this process serves metrics and health checks; 0 means that it serves none."""
    metrics_host: str = "127.0.0.1"
    """Address on which this process serves metrics and health checks."""
    traces: _Url = ""
    """URL of the OpenTelemetry collector (OTLP over HTTP) to which this process sends traces of one
    batch in a hundred. Optional. If unset, nothing is traced."""
    log_format: Literal["console", "json"] = "console"
    """Format of this process's log: `console` for people, `json` for programs."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of the events that this process logs: `debug`, `info`, `warning` or `error`."""

    @property
    def embedded_kafka(self) -> str:
        """Path of the embedded broker's control socket; empty for a real broker."""
        return self.kafka.removeprefix(_EMBEDDED) if self.kafka.startswith(_EMBEDDED) else ""

    @model_validator(mode="after")
    def _legal_pairs(self) -> Self:
        if self.redis_password and holds_password(self.redis):
            raise ValueError(
                "DOLL_REDIS_PASSWORD: the URL in DOLL_REDIS has a password, too; remove one of them"
            )
        certificates = self.redis_ca or self.redis_cert or self.redis_key
        if certificates and not self.redis.startswith("rediss://"):
            raise ValueError("DOLL_REDIS: must begin with rediss:// if certificates are set")
        if self.oidc_issuer and not self.oidc_audience:
            raise ValueError("DOLL_OIDC_AUDIENCE: is missing, but DOLL_OIDC_ISSUER is set")
        if self.oidc_issuer.startswith("http://") and not _LOOPBACK.match(self.oidc_issuer):
            raise ValueError(
                "DOLL_OIDC_ISSUER: must begin with https://, or an attacker could forge tokens"
            )
        for name in ("redis", "api_tls"):
            cert, key = getattr(self, f"{name}_cert"), getattr(self, f"{name}_key")
            if bool(cert) != bool(key):
                have, lack = ("CERT", "KEY") if cert else ("KEY", "CERT")
                prefix = f"{_PREFIX}{name.upper()}"
                raise ValueError(f"{prefix}_{lack}: is missing, but {prefix}_{have} is set")
        return self

    @model_validator(mode="after")
    def _legal_mlflow(self) -> Self:
        if bool(self.mlflow_username) != bool(self.mlflow_password):
            have, lack = ("USERNAME", "PASSWORD")[:: 1 if self.mlflow_username else -1]
            raise ValueError(f"DOLL_MLFLOW_{lack}: is missing, but DOLL_MLFLOW_{have} is set")
        if self.mlflow_token and self.mlflow_username:
            raise ValueError(
                "DOLL_MLFLOW_TOKEN: DOLL_MLFLOW_USERNAME is set, too; remove one of them"
            )
        if (self.mlflow_token or self.mlflow_username) and not self.mlflow:
            raise ValueError("DOLL_MLFLOW: is missing, but a token or a password for it is set")
        return self

    @model_validator(mode="after")
    def _legal_registry(self) -> Self:
        url, properties = registry_variable_of("url"), self.schema_registry
        if properties and "url" not in properties:
            raise ValueError(f"{url}: is missing, but other variables of the registry are set")
        if not all(_API.fullmatch(each.strip()) for each in properties.get("url", "").split(",")):
            password = registry_variable_of("basic.auth.user.info")
            raise ValueError(
                f"{url}: must be http://host:port or https://host:port; set a password in"
                f" {password}"
            )
        return self

    def environ(self) -> dict[str, str]:
        """Return the environment from which `read_settings` makes the same settings again."""
        properties = {variable_of(name): value for name, value in self.kafka_properties.items()}
        registry = {registry_variable_of(n): value for n, value in self.schema_registry.items()}
        others = self.model_dump(exclude=set(_PROPERTIES), exclude_defaults=True)
        return (
            properties
            | registry
            | {
                _PREFIX + name.upper(): ",".join(value) if isinstance(value, tuple) else str(value)
                for name, value in others.items()
            }
            | {
                _PREFIX + name.upper(): getattr(self, name)
                for name in ("kafka", "api")
                if name in self.model_fields_set
            }
        )


_VARIABLES = {
    _PREFIX + name.upper(): name for name in Settings.model_fields if name not in _PROPERTIES
}


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings. An empty variable counts as unset.

    Raises:
        UserError: If variables are unknown or invalid. The message names them, their values and
            what is allowed.
    """
    _refuse_unknown(environ)
    given, from_files = resolve_files(environ, _is_ours)
    values: dict[str, object] = {
        name: given[variable] for variable, name in _VARIABLES.items() if given.get(variable)
    }
    for setting, property_named in _PROPERTIES.items():
        values[setting] = {
            name: value
            for variable, value in given.items()
            if value and (name := property_named(variable))
        }
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        wrong = {_PREFIX + str(each["loc"][0]).upper() for each in error.errors() if each["loc"]}
        if hidden := sorted(wrong & from_files):
            # The content may be meant for another variable, and be secret.
            raise UserError(
                f"{hidden[0]}{SUFFIX}: the file has no valid value for {hidden[0]} (not shown)"
            ) from None
        raise UserError(complaint(error, name=lambda path: _PREFIX + path.upper())) from error


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    for variable, value in sorted(environ.items()):
        known = _is_ours(variable) or _is_ours(variable.removesuffix(SUFFIX))
        if variable.startswith(_PREFIX) and value and not known:
            why = refusal_of(variable) or (
                f"unknown setting ({nearest(variable, sorted([*_VARIABLES, *variables()]))})"
            )
            raise UserError(f"{variable}: {why}")


def _is_ours(variable: str) -> bool:
    """True if the variable holds a setting."""
    return variable in _VARIABLES or any(named(variable) for named in _PROPERTIES.values())
