"""Kafka brokers for tests only: with TLS and users, or a further node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.embedded.apache_kafka import ApacheKafka
from common.embedded.process import free_port

if TYPE_CHECKING:
    from pathlib import Path

# Property of Java that names the URLs at which a broker may fetch an issuer's keys.
_ALLOWED_URLS = "-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls"

# The broker also has its open listener, without restrictions, for itself and the tests.
_SAFE_PROPERTIES = """\
listener.name.safe.ssl.keystore.type=PEM
listener.name.safe.ssl.keystore.location={keystore}
listener.name.safe.sasl.enabled.mechanisms={mechanisms}
listener.name.safe.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
"""

# The same listener, for clients with a token of an issuer.
_ISSUER_PROPERTIES = """\
listener.name.safe.oauthbearer.sasl.server.callback.handler.class=\
org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler
listener.name.safe.oauthbearer.sasl.jaas.config=\
org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;
sasl.oauthbearer.expected.issuer={issuer}
sasl.oauthbearer.expected.audience={audience}
sasl.oauthbearer.jwks.endpoint.url={issuer}/jwks
"""


@dataclass(frozen=True, slots=True)
class Safe:
    """A listener with TLS and one user without rights, who authenticates by SCRAM-SHA-512."""

    # PEM: the private key, then the chain of certificates.
    keystore: Path
    username: str
    password: str
    # URL of the issuer whose tokens the broker accepts. If empty, it accepts no tokens.
    issuer: str = ""
    # Audience that the token must have.
    audience: str = ""


class GuardedKafka(ApacheKafka):
    """A broker with an open listener, and one with TLS and passwords at `safe_address`."""

    def __init__(self, jars: Path, data: Path, safe: Safe) -> None:
        self._safe = safe
        self._safe_port = free_port()
        super().__init__(jars, data)

    @property
    def safe_address(self) -> str:
        """Return the address of the listener with TLS and a password."""
        return f"127.0.0.1:{self._safe_port}"

    def _configuration(self) -> str:
        mechanisms, more = "SCRAM-SHA-512", ""
        if self._safe.issuer:
            mechanisms += ",OAUTHBEARER"
            more = _ISSUER_PROPERTIES.format(issuer=self._safe.issuer, audience=self._safe.audience)
        both = f"PLAINTEXT://127.0.0.1:{self._port},SAFE://{self.safe_address}"
        more += (
            f"listeners={both},CONTROLLER://127.0.0.1:{self.controller_port}\n"
            f"advertised.listeners={both}\n"
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SAFE:SASL_SSL,CONTROLLER:PLAINTEXT\n"
        )
        safe = _SAFE_PROPERTIES.format(keystore=self._safe.keystore, mechanisms=mechanisms)
        return super()._configuration() + more + safe

    def _format(self, *options: str) -> None:
        user = f"SCRAM-SHA-512=[name={self._safe.username},password={self._safe.password}]"
        super()._format(*options, "--add-scram", user)

    def _java(self, *main: str) -> list[str]:
        java, *others = super()._java(*main)
        return [java, f"{_ALLOWED_URLS}={self._safe.issuer}/jwks", *others]


class FurtherBroker(ApacheKafka):
    """A broker without a controller, in the cluster of another node.

    Args:
        jars: Folder of Kafka's jars.
        data: Folder of its data.
        first: The cluster's first node, which is the only controller.
        node: Its id, above 1.
        properties: Further lines of its configuration.
    """

    def __init__(
        self, jars: Path, data: Path, first: ApacheKafka, node: int, properties: str
    ) -> None:
        self.node = node
        self._first = first
        super().__init__(jars, data, properties=properties)

    def _configuration(self) -> str:
        return (
            f"{super()._configuration()}\n"
            "process.roles=broker\n"
            f"controller.quorum.voters=1@127.0.0.1:{self._first.controller_port}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{self._port}\n"
        )

    def _cluster(self) -> str:
        known = (self._first.data / "log" / "meta.properties").read_text()
        return known.partition("cluster.id=")[2].partition("\n")[0]
