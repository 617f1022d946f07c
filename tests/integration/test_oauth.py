"""A real broker accepts tokens of a real issuer, from both sources of tokens.

The client requests the token from the issuer itself (OpenID Connect), or a function of ours creates
it, as for Amazon MSK.
"""

from __future__ import annotations

import json
import time
import urllib.request
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka.admin import AdminClient

from common.config.settings import read_settings
from common.core.spans import Assigned, Partition
from common.errors import ForbiddenError, OutsideError, UnavailableError
from common.kafka.opening import kafka_settings, open_log
from common.kafka.port import NewTopic
from common.kafka.stream import KafkaStreamLog, open_stream_log
from tests.certificates import Authority
from tests.integration.test_security import acls_of, rights
from tests.integration.token_issuer import token_issuer
from tests.kafka_nodes import GuardedKafka, Safe
from tests.servers import kafka_jars

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.kafka.port import StreamLog

pytestmark = [pytest.mark.kafka, pytest.mark.nightly]

LONG_S = 20.0
AUDIENCE = "kafka"
# Lifetime of a token in seconds. Clients renew some tokens during the test.
LIFE_S = 10


class Issued(NamedTuple):
    """Settings of clients that connect to the broker with a token, and the URL of tokens."""

    environ: dict[str, str]
    token_url: str


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    claims = {"sub": "${clientId}", "aud": ["${scope}"]}
    with token_issuer(tmp_path_factory.mktemp("oauth"), claims, LIFE_S) as url:
        yield url


@pytest.fixture(scope="module")
def issued(issuer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Issued]:
    jars, folder = kafka_jars(), tmp_path_factory.mktemp("kafka")
    authority = Authority(folder)
    pair = authority.issue("kafka")
    keystore = folder / "keystore.pem"
    keystore.write_bytes(pair.key.read_bytes() + pair.cert.read_bytes())
    safe = Safe(keystore, "someone", "else", issuer, AUDIENCE)
    with GuardedKafka(jars, folder / "data", safe) as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.settings.bootstrap})
        allowed = {acl for line in rights(("topic ", "group ")) for acl in acls_of(line)}
        for answer in admin.create_acls([*allowed]).values():
            answer.result()
        with closing(open_log(read_settings({"DOLL_KAFKA": kafka.settings.bootstrap}))) as log:
            log.create_topics([NewTopic("clinic-a")])
        environ = {
            "DOLL_KAFKA": kafka.safe_address,
            "DOLL_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "DOLL_KAFKA_SASL_MECHANISM": "OAUTHBEARER",
            "DOLL_KAFKA_SSL_CA_LOCATION": str(authority.cert),
        }
        yield Issued(environ, f"{issuer}/token")


def oidc(issued: Issued, **changes: str) -> dict[str, str]:
    settings = {
        "METHOD": "oidc",
        "CLIENT_ID": "doll",
        "CLIENT_SECRET": "its-secret",
        "SCOPE": AUDIENCE,
        "TOKEN_ENDPOINT_URL": issued.token_url,
        **changes,
    }
    return issued.environ | {f"DOLL_KAFKA_SASL_OAUTHBEARER_{k}": v for k, v in settings.items()}


def everything_works(log: StreamLog, topic: str) -> None:
    """Every kind of client in a process connects, even after its first token has expired."""
    log.create_topics([NewTopic(topic, kept_forever=True)])
    with (
        closing(log.writer()) as writer,
        closing(log.tail(Partition(topic, 0), 0)) as tail,
        closing(log.stream("doll.job", ["clinic-a"], "w1")) as reader,
    ):
        until = time.monotonic() + LIFE_S + 2
        number, seen, assigned = 0, list[bytes | None](), False
        while time.monotonic() < until or len(seen) < number or not assigned:
            assert time.monotonic() < until + LONG_S
            if time.monotonic() < until:
                writer.append(topic, b"%d" % number)
                assert writer.flush(LONG_S)
                number += 1
            # The broker refuses a connection whose session ends within a second, so the client
            # reconnects.
            with suppress(UnavailableError):
                seen += [record.value for record in tail.read(10, 0.2)]
            with suppress(UnavailableError):
                for event in reader.poll(10, 0.05):
                    assigned = assigned or isinstance(event, Assigned)
        assert seen == [b"%d" % each for each in range(number)]
        assert log.bounds(Partition(topic, 0)).end == number


def test_client_gets_its_tokens_from_an_openid_issuer(issued: Issued) -> None:
    with closing(open_stream_log(read_settings(oidc(issued)))) as log:
        everything_works(log, "doll.oidc.control")


def test_token_function_provides_tokens_of_every_client(issued: Issued) -> None:
    made = list[float]()

    def token(_config: str) -> tuple[str, float]:
        form = f"grant_type=client_credentials&client_id=doll&client_secret=x&scope={AUDIENCE}"
        with urllib.request.urlopen(issued.token_url, form.encode(), LONG_S) as answer:  # noqa: S310 -- our own http
            fields = json.load(answer)
        made.append(time.time() + fields["expires_in"])
        return fields["access_token"], made[-1]

    settings = replace(kafka_settings(read_settings(issued.environ), "doll"), token=token)
    with closing(KafkaStreamLog(settings)) as log:
        everything_works(log, "doll.signed.control")
    # Each client got a token, and some renewed theirs.
    assert len(made) > 5


@pytest.mark.parametrize(
    "changes",
    [{"SCOPE": "another-audience"}, {"CLIENT_ID": "nobody"}],
)
def test_token_with_wrong_audience_or_client_is_refused(
    issued: Issued, changes: dict[str, str]
) -> None:
    with closing(open_log(read_settings(oidc(issued, **changes)))) as log:
        with pytest.raises(OutsideError) as raised:
            log.create_topics([NewTopic("doll.refused.control")])
        # A client waits while a right is missing, because an operator may grant it.
        assert isinstance(raised.value, ForbiddenError) or not raised.value.retriable
        assert "its-secret" not in str(raised.value)
