"""Opens the Kafka that the settings name, with our identity."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import OutsideError, UserError
from common.kafka.settings import KafkaSettings, embedded_settings
from common.telemetry.logging import event_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.config.settings import Settings
    from common.kafka.port import Log
    from common.kafka.settings import MakeToken

_REGION = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com")


def open_log(settings: Settings, client_id: str = "doll") -> Log:
    """Open Kafka without connecting to a real broker.

    Raises:
        UnavailableError: If the settings name an embedded broker that has ended.
        UserError: If the settings name Amazon MSK, and its signing package is not installed.
    """
    from common.kafka.log import KafkaLog  # noqa: PLC0415 -- a wrong command needs no client

    return KafkaLog(kafka_settings(settings, client_id))


def kafka_settings(settings: Settings, client_id: str) -> KafkaSettings:
    """Return the clients' settings. If the rack is `auto`, look up our zone.

    Raises:
        UnavailableError: If the settings name an embedded broker that has ended.
        UserError: If the settings name Amazon MSK, and its signing package is not installed.
    """
    if settings.embedded_kafka:
        return replace(embedded_settings(settings.embedded_kafka), client_id=client_id)
    properties, token = _identity(settings)
    return KafkaSettings(
        bootstrap=settings.kafka,
        named="kafka" in settings.model_fields_set,
        client_id=client_id,
        group_protocol=settings.kafka_group_protocol,
        replication_factor=settings.kafka_replication,
        rack=_rack(settings),
        properties=properties,
        token=token,
    )


def _rack(settings: Settings) -> str:
    if settings.kafka_client_rack != "auto":
        return settings.kafka_client_rack
    from common.notices.metadata import InstanceMetadata  # noqa: PLC0415 -- see above

    logger = event_logger("kafka")
    try:
        rack = InstanceMetadata(settings.metadata_endpoint).zone_id()
    # Reading from another zone costs money, but has no other effect.
    except OutsideError as error:
        logger.warning("client_rack_unknown", reason=str(error))
        return ""
    logger.info("client_rack", zone_id=rack)
    return rack


def _identity(settings: Settings) -> tuple[Mapping[str, str], MakeToken | None]:
    """Return the client's properties that identify us, and the maker of our tokens."""
    properties = settings.kafka_properties
    if properties.get("sasl.mechanism") != "AWS_MSK_IAM":
        return properties, None
    return {**properties, "sasl.mechanism": "OAUTHBEARER"}, MskToken(settings.kafka)


class MskToken:
    """Our identity for Amazon MSK with IAM: a signed request, used as a bearer token.

    It signs with the credentials of the process, which AWS's library looks up in its usual order.

    Args:
        bootstrap: The brokers, whose names contain the region.

    Raises:
        UserError: If the signing package is not installed, or if neither the brokers nor AWS's own
            settings name a region.
    """

    def __init__(self, bootstrap: str) -> None:
        try:
            from aws_msk_iam_sasl_signer import MSKAuthTokenProvider  # noqa: PLC0415 -- optional
            from boto3.session import Session  # noqa: PLC0415 -- comes with it
        except ModuleNotFoundError as error:
            raise UserError(
                "DOLL_KAFKA_SASL_MECHANISM: the library that signs for Amazon MSK is not"
                " installed; run pip install 'doll[msk]'"
            ) from error
        named = _REGION.search(bootstrap)
        self._region = named[1] if named else Session().region_name
        if not self._region:
            raise UserError(
                "DOLL_KAFKA: the address contains no region of Amazon MSK; set AWS_DEFAULT_REGION"
                " to the cluster's region"
            )
        self._signed = MSKAuthTokenProvider.generate_auth_token

    def __call__(self, _config: str) -> tuple[str, float]:
        """Return a new token and its expiry in seconds since 1970; raise without credentials."""
        token, until_ms = self._signed(self._region)
        return token, until_ms / 1e3
