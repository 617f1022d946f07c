"""The environment, read once into frozen settings, and back for the processes that we start.

docs/reference/settings.md lists them. Any of them, with `_FILE` behind its name, may name a file
that holds the value, as secrets of containers do: DOLL_REDIS_PASSWORD_FILE=/run/secrets/redis.
What is a secret, or may hold one, appears neither in `repr` nor in errors. A DOLL_ variable that is
none of them is refused: a setting that is misspelt would be left out in silence.
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
    """Return a URL of Redis if it is whole.

    A password with a slash in it ends the host's part too early: what is left may well be a URL,
    whose host and port, pieces of the password, would be told when nobody answers there.

    Raises:
        ValueError: If it is not; says what to do.
    """
    if not _BEGINNING.fullmatch(value):
        raise ValueError("must be redis://host:port/db, rediss://... or unix:///path")
    if not _is_whole(value):
        raise ValueError(
            "is not a complete URL: in a password write / as %2F, ? as %3F, # as %23 and @ as %40,"
            " or put it into DOLL_REDIS_PASSWORD"
        )
    return value


def holds_password(value: str) -> bool:
    """Whether a checked URL holds a password."""
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
_HOST = re.compile(r"[\w.:-]*", re.ASCII)
_ENDPOINT = re.compile(r"http://([\w-]{1,63}(\.[\w-]{1,63})*|\[[\da-fA-F:.]+\])(:\d+)?/?", re.ASCII)


def _legal(is_legal: Callable[[str], object], complaint: str) -> AfterValidator:
    """A text that has a form, or it is refused; it is not shown where it might hold a password."""

    def check(value: str) -> str:
        if not is_legal(value):
            raise ValueError(complaint if "@" in value else f"{complaint}, got {value!r}")
        return value

    return AfterValidator(check)


def _names_server(value: str) -> bool:
    # The port is checked where it is read: that raises a `ValueError` of its own.
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


_Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
_Url = Annotated[
    str,
    _legal(_API.fullmatch, "must be http://host:port or https://host:port"),
    AfterValidator(lambda value: value.rstrip("/")),
]


# Settings of any number of variables, and which of their properties a variable sets.
_PROPERTIES = {"kafka_properties": property_of, "schema_registry": registry_property_of}


class Settings(BaseModel):
    """Everything that a process takes from its environment; `kafka` is DOLL_KAFKA there."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    kafka: Annotated[
        str,
        _legal(
            lambda value: "@" not in value or value.startswith(_EMBEDDED),
            "must be host:port,...; a password goes to DOLL_KAFKA_SASL_PASSWORD",
        ),
    ] = "localhost:9092"
    """`host:port,host:port`, or `embedded:/its/socket`."""
    kafka_group_protocol: Literal["classic", "consumer"] = "classic"
    """`classic`, or `consumer` from Kafka 4 on."""
    kafka_replication: int = -1
    """Replicas of topics that we create; -1: the broker's."""
    kafka_client_rack: str = ""
    """Where this process runs, as the brokers' `broker.rack` says it: streams are read from the
    replicas there. `auto`: the id of its zone, from the metadata service."""
    # By the client's names. May hold passwords, like the URL of Redis: neither is ever shown.
    kafka_properties: dict[str, str] = Field(default={}, repr=False)
    """Properties of the Kafka client by their names, DOLL_KAFKA_SASL_USERNAME for `sasl.username`:
    see [security](../howto/security.md#kafka)."""
    schema_registry: dict[str, str] = Field(default={}, repr=False)
    """Where schemas of records are (`URL`), and who we are there (`BASIC_AUTH_USER_INFO`, ...): see
    [security](../howto/security.md#schema-registry)."""
    redis: Annotated[str, AfterValidator(check_redis_url)] = Field(
        default="redis://localhost:6379", repr=False
    )
    """`redis://`, `rediss://` or `unix://`; an ACL user stands in it: `redis://doll@host`."""
    redis_password: str = Field(default="", repr=False)
    """Its password, unless the URL holds it."""
    redis_ca: str = ""
    """File of the authorities that `rediss://` trusts; by default the system's."""
    redis_cert: str = ""
    """File of our own certificate, where Redis wants one."""
    redis_key: str = ""
    """File of that certificate's key."""
    blobs: Annotated[
        str, _legal(_BLOBS.fullmatch, "must be file:///directory or s3://bucket/prefix")
    ] = ""
    """`file:///directory` or `s3://bucket/prefix`, of the server that AWS_ENDPOINT_URL_S3 names; by
    default, Amazon's."""
    tasks: _Names = ()
    """Entrypoints that jobs may name, between commas."""
    coordinator_memory_mib: int = Field(default=2048, ge=1)
    """Of a coordinator, in MiB: for one job's updates in flight, where they are several, and for
    what its workers know with `compression`. Of `asynchronous` jobs that say neither `staleness`
    nor `provisioning.workers` eight are counted."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What gradients are computed on; `auto`: the GPU if there is one, else the CPU."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of one gradient; 0: all cores."""
    notices: Literal["none", "ec2"] = "none"
    """Where a machine hears of its end: `none` or `ec2`."""
    # Not the AWS_ variable of the same purpose: whoever sets that one often names a server that
    # hands out credentials and nothing else, at which no notice would ever be found.
    metadata_endpoint: Annotated[
        str, _legal(_names_server, "must be http://host or http://host:port")
    ] = "http://169.254.169.254"
    """URL of EC2's instance metadata service; by default link-local."""
    # A gradient takes up to seconds and a spot notice gives 120 s; with the last announcements, it
    # is still over before Kubernetes loses patience, 30 s after its SIGTERM.
    leave_s: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    """Longest wait, when leaving, for gradients under way."""
    advertise: Annotated[
        str, _legal(_HOST.fullmatch, "must be a host's name or address, without a port")
    ] = ""
    """Name or address of this machine for workers that add up gradients among themselves; by
    default the one from which it reaches Redis."""
    tier: Literal["reliable", "spot"] = "spot"
    """`reliable` or `spot`: whether the machine stays, or may vanish; of a worker of a job with
    `aggregation: {layout: slices}`."""
    owner_pid: int = Field(default=0, ge=0)
    """Process with whose end this one ends; 0: none."""
    market: str = ""
    """File of the machines that can be rented."""
    fleet_directory: str = ""
    """Where machines that are processes keep their logs; by default a temporary one."""
    api_host: str = "127.0.0.1"
    """The address on which the admin service listens."""
    api_port: int = Field(default=8080, ge=0, le=65535)
    """Its port; 0: any that is free."""
    api_tls_cert: str = ""
    """File of its certificate chain, for https."""
    api_tls_key: str = ""
    """File of the certificate's key."""
    api_body_bytes: int = Field(default=1 << 20, ge=1024)
    """Largest body of a request."""
    api_proxies: Annotated[_Names, AfterValidator(_check_networks)] = ()
    """Addresses and networks, between commas, of proxies whose X-Forwarded-For is believed."""
    oidc_issuer: _Url = ""
    """OpenID Connect issuer whose access tokens the admin service takes, beside API keys."""
    oidc_audience: str = ""
    """The audience that tokens must be for."""
    oidc_groups: str = "groups"
    """Their claim that holds a person's groups."""
    oidc_operators: _Names = ()
    """Groups whose members are operators, between commas; everybody else looks."""
    oidc_client_id: str = ""
    """Client as which the page signs people in; without it tokens are for programs."""
    oidc_client_secret: str = Field(default="", repr=False)
    """Its secret, if it has one."""
    oidc_scope: str = "openid"
    """What the page asks for, between spaces, so that the token is for the audience."""
    mlflow: _Url = ""
    """URL of the MLflow tracking server to which an evaluator reports jobs that have `tracking`."""
    mlflow_token: str = Field(default="", repr=False)
    """Bearer token for the MLflow server."""
    mlflow_username: str = ""
    """User of the MLflow server, instead of a token."""
    mlflow_password: str = Field(default="", repr=False)
    """That user's password."""
    api: _Url = "http://127.0.0.1:8080"
    """URL of the admin service that the command line asks."""
    api_key: str = Field(default="", repr=False)
    """The key that the command line shows it."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Where a process tells metrics and health; 0: not."""
    metrics_host: str = "127.0.0.1"
    """The address that it does so on."""
    traces: _Url = ""
    """URL of an OpenTelemetry collector (OTLP over HTTP), for one batch of a hundred."""
    log_format: Literal["console", "json"] = "console"
    """`console` or `json`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug`, `info`, `warning` or `error`."""

    @property
    def embedded_kafka(self) -> str:
        """Path of the embedded broker's control socket, empty for a real broker."""
        return self.kafka.removeprefix(_EMBEDDED) if self.kafka.startswith(_EMBEDDED) else ""

    @model_validator(mode="after")
    def _legal_pairs(self) -> Self:
        if self.redis_password and holds_password(self.redis):
            raise ValueError("DOLL_REDIS_PASSWORD: the URL in DOLL_REDIS holds one already")
        certificates = self.redis_ca or self.redis_cert or self.redis_key
        if certificates and not self.redis.startswith("rediss://"):
            raise ValueError("DOLL_REDIS: must begin with rediss:// where there are certificates")
        if self.oidc_issuer and not self.oidc_audience:
            raise ValueError("DOLL_OIDC_AUDIENCE: is missing, but DOLL_OIDC_ISSUER is set")
        if self.oidc_issuer.startswith("http://") and not _LOOPBACK.match(self.oidc_issuer):
            raise ValueError(
                "DOLL_OIDC_ISSUER: must be https: whoever is between could let people in"
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
                "DOLL_MLFLOW_TOKEN: DOLL_MLFLOW_USERNAME is set, too: keep one of both"
            )
        if (self.mlflow_token or self.mlflow_username) and not self.mlflow:
            raise ValueError("DOLL_MLFLOW: is missing: nobody would be shown the token or password")
        return self

    @model_validator(mode="after")
    def _legal_registry(self) -> Self:
        url, properties = registry_variable_of("url"), self.schema_registry
        if properties and "url" not in properties:
            raise ValueError(f"{url}: is missing, but others of the registry's variables are set")
        if not all(_API.fullmatch(each.strip()) for each in properties.get("url", "").split(",")):
            password = registry_variable_of("basic.auth.user.info")
            raise ValueError(
                f"{url}: must be http://host:port or https://host:port; a password goes to"
                f" {password}"
            )
        return self

    def environ(self) -> dict[str, str]:
        """The variables from which `read_settings` makes these settings in a child process."""
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
    """Read the settings; a variable that is empty counts as not set.

    Raises:
        UserError: Naming the variables that there are not, or that make no sense, what they hold
            and may hold.
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
            # Whose content may be meant for another variable, and secret.
            raise UserError(
                f"{hidden[0]}{SUFFIX}: the file holds no valid {hidden[0]} (which is not shown)"
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
    """Whether it holds a setting."""
    return variable in _VARIABLES or any(named(variable) for named in _PROPERTIES.values())
