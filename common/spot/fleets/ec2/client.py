"""Access to EC2, for machines and for prices: timeouts, retries, classes of errors.

Credentials come from boto3's usual sources: environment, profile, or the machine's role.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)

from common.errors import OutsideError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from types_boto3_ec2 import EC2Client

    from common.spot.market.market_file import Ec2Provider

# Number of parallel requests. A machine takes a second or two; EC2 allows more requests.
CONNECTIONS = 8
_CONNECT_TIMEOUT_S = 5.0
# EC2 answers a request for an instant fleet only once the machine exists or has been refused.
_READ_TIMEOUT_S = 30.0
_ATTEMPTS = 5
# Codes of temporary errors. They are prefixes, because some codes have several spellings.
PASSING = ("RequestLimitExceeded", "Throttl", "ServiceUnavailable", "Unavailable", "Internal")


def connect(provider: Ec2Provider) -> EC2Client:
    """Make a client, which may be shared between threads. It does not connect yet."""
    return boto3.session.Session().client(
        "ec2",
        region_name=provider.region,
        endpoint_url=provider.endpoint or None,
        config=Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
            max_pool_connections=CONNECTIONS,
            # Adaptive mode sends throttled requests more slowly, not only later.
            retries={"mode": "adaptive", "total_max_attempts": _ATTEMPTS},
        ),
    )


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Convert boto3's errors to ours.

    Args:
        what: Object of the request, for the message.

    Raises:
        UnavailableError: If EC2 is unavailable, busy or failing.
        OutsideError: If it refuses: credentials, permissions, or parameters.
    """
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise OutsideError(f"{what}: {error}; see boto3's guide to credentials") from error
    except ParamValidationError as error:
        raise OutsideError(f"{what}: {error}") from error
    except ClientError as error:
        kind = UnavailableError if passing(error) else OutsideError
        raise kind(f"{what}: {error}") from error
    except BotoCoreError as error:
        raise UnavailableError(f"{what}: {error}") from error


def code_of(error: ClientError) -> str:
    """Return EC2's code of the error."""
    return error.response.get("Error", {}).get("Code", "")


def refuses_us(error: ClientError) -> bool:
    """Return True if EC2 refuses the account, not the request."""
    return _status(error) in (401, 403) or code_of(error) in (
        *(
            "UnauthorizedOperation",
            "AuthFailure",
            "Blocked",
            "OptInRequired",
            "PendingVerification",
        ),
        *("InvalidClientTokenId", "ExpiredToken", "RequestExpired", "SignatureDoesNotMatch"),
    )


def passing(error: ClientError) -> bool:
    """Return True if the same call may succeed later."""
    status = _status(error)
    return status >= 500 or status == 429 or code_of(error).startswith(PASSING)


def _status(error: ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
