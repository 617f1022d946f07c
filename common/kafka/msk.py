"""Who we are to Amazon MSK where IAM says who gets in: a signed request, as a bearer's token."""

from __future__ import annotations

import re

import boto3
from aws_msk_iam_sasl_signer import MSKAuthTokenProvider

from common.errors import UserError

_REGION = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com")


class MskToken:
    """Signs with the credentials of the process, by AWS's own order of where they are looked for.

    Args:
        bootstrap: The brokers, whose names say in which region they are.

    Raises:
        UserError: If neither they nor AWS's own settings name a region.
    """

    def __init__(self, bootstrap: str) -> None:
        named = _REGION.search(bootstrap)
        self._region = named[1] if named else boto3.session.Session().region_name
        if not self._region:
            raise UserError(
                "DOLL_KAFKA names no region of Amazon MSK: set AWS_DEFAULT_REGION to the cluster's"
            )

    def __call__(self, _config: str) -> tuple[str, float]:
        """A new token, and until when it is valid; an error says that there are no credentials."""
        token, until_ms = MSKAuthTokenProvider.generate_auth_token(self._region)
        return token, until_ms / 1e3
