"""Opens the Kafka that the settings name: where it is, and who we are to it."""

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
    """Open Kafka; a real broker is not asked before the first call.

    Raises:
        UnavailableError: If the settings name an embedded broker that is gone.
        UserError: If they name Amazon MSK and what signs for it is not installed.
    """
    from common.kafka.log import KafkaLog  # noqa: PLC0415 -- a wrong command needs no client

    return KafkaLog(kafka_settings(settings, client_id))


def kafka_settings(settings: Settings, client_id: str) -> KafkaSettings:
    """What the clients of Kafka are told; where `auto` is our rack, its zone is looked up.

    Raises:
        UnavailableError: If the settings name an embedded broker that is gone.
        UserError: If they name Amazon MSK and what signs for it is not installed.
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
    except OutsideError as error:  # reading from another zone costs money, and nothing else
        logger.warning("client_rack_unknown", reason=str(error))
        return ""
    logger.info("client_rack", zone_id=rack)
    return rack


def _identity(settings: Settings) -> tuple[Mapping[str, str], MakeToken | None]:
    """Who we are to Kafka: what the client is told of it, and who makes its tokens."""
    properties = settings.kafka_properties
    if properties.get("sasl.mechanism") != "AWS_MSK_IAM":
        return properties, None
    return {**properties, "sasl.mechanism": "OAUTHBEARER"}, MskToken(settings.kafka)


class MskToken:
    """Who we are to Amazon MSK where IAM says who gets in: a signed request, as a bearer's token.

    It signs with the credentials of the process, by AWS's own order of where they are looked for.

    Args:
        bootstrap: The brokers, whose names say in which region they are.

    Raises:
        UserError: If what signs is not installed, or neither they nor AWS's own settings name a
            region.
    """

    def __init__(self, bootstrap: str) -> None:
        try:
            from aws_msk_iam_sasl_signer import MSKAuthTokenProvider  # noqa: PLC0415 -- optional
            from boto3.session import Session  # noqa: PLC0415 -- comes with it
        except ModuleNotFoundError as error:
            raise UserError(
                "DOLL_KAFKA_SASL_MECHANISM: what signs for Amazon MSK is not installed here:"
                " pip install 'doll[msk]'"
            ) from error
        named = _REGION.search(bootstrap)
        self._region = named[1] if named else Session().region_name
        if not self._region:
            raise UserError(
                "DOLL_KAFKA names no region of Amazon MSK: set AWS_DEFAULT_REGION to the cluster's"
            )
        self._signed = MSKAuthTokenProvider.generate_auth_token

    def __call__(self, _config: str) -> tuple[str, float]:
        """A new token, and until when it is valid; an error says that there are no credentials."""
        token, until_ms = self._signed(self._region)
        return token, until_ms / 1e3
