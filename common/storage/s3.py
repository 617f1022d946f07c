"""Object storage by the S3 protocol: AWS, or any other server with conditional writes."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError

from common.errors import OutsideError, UnavailableError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MISSING = "NoSuchKey"
_LOST_RACE = {"PreconditionFailed", "ConditionalRequestConflict", _MISSING}
# Size of a part. Ten parts are in memory at a time, and a blob has at most 10,000.
_PART_BYTES = 32 << 20
# Limit of each attempt to connect. It is short, because a candidate holds the lease while it reads
# checkpoints.
_CONNECT_S = 3.0
_TIMEOUT_S = 10.0
# S3 asks clients to slow down in normal operation. The caller handles errors that last longer.
_ATTEMPTS = 3


def s3_server() -> str:
    """Return the URL of the server that AWS_ENDPOINT_URL_S3 names, or Amazon's."""
    url: str = boto3.session.Session().client("s3").meta.endpoint_url
    return url


class S3Blobs:
    """Objects of one bucket below a prefix. May be shared between threads.

    boto3 finds the credentials: in the environment, a profile, or the machine's role.

    Args:
        bucket: Name of an existing bucket.
        prefix: Text before every name, usually with a slash at the end.
        endpoint_url: Optional. URL of the server. If unset, AWS_ENDPOINT_URL_S3 or AWS.
        region: Optional. Region. If unset, boto3's own settings.
        part_bytes: Larger blobs are uploaded in parts of this size, several at a time. S3 requires
            at least 5 MiB, except for the last part.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        endpoint_url: str | None = None,
        region: str | None = None,
        part_bytes: int = _PART_BYTES,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._client = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint_url,
            region_name=region,
            config=Config(
                # Otherwise, boto3 signs URLs by version 2, which S3 no longer accepts everywhere.
                signature_version="s3v4",
                connect_timeout=_CONNECT_S,
                read_timeout=_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
                # Some other servers lack AWS's newer checksums. Manifests have their own.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        self._host = urlsplit(self._client.meta.endpoint_url).netloc.rpartition("@")[2]
        self._transfer = TransferConfig(
            multipart_threshold=part_bytes, multipart_chunksize=part_bytes
        )
        self._part_bytes = part_bytes

    @property
    def where(self) -> str:
        """Address of the bucket and the prefix, and of a server other than AWS."""
        at = f" at {self._host}" if self._host else ""
        return f"s3://{self._bucket}/{self._prefix}{at}"

    def put(self, name: str, data: bytes | memoryview) -> None:
        """See `Blobs`."""
        body, key = io.BytesIO(data), self._prefix + name
        with self._storage(name):
            if len(body.getbuffer()) <= self._part_bytes:
                self._client.put_object(Bucket=self._bucket, Key=key, Body=body)
            else:
                self._client.upload_fileobj(body, self._bucket, key, Config=self._transfer)

    def get(self, name: str) -> bytes | None:
        """See `Blobs`."""
        found = self.get_tagged(name)
        return None if found is None else found[0]

    def signed_url(self, name: str, expires_s: int) -> str:
        """Return a URL at which anyone can read a blob until it expires.

        Raises:
            UserError: If there are no credentials.
        """
        with self._storage(name):
            url: str = self._client.generate_presigned_url(
                "get_object",
                Params={"Bucket": self._bucket, "Key": self._prefix + name},
                ExpiresIn=expires_s,
            )
        return url

    def names(self, prefix: str) -> list[str]:
        """Return all names with a prefix, sorted.

        Raises:
            UnavailableError: If an answer is not a list of this bucket. A proxy or another server
                may have sent it, and names that it lacks must not count as deleted.
        """
        wanted, keys, token = self._prefix + prefix, list[str](), ""
        while True:
            more: Any = {"ContinuationToken": token} if token else {}
            with self._storage(prefix):
                page: Mapping[str, Any] = self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=wanted, **more
                )
            if wrong := self.why_no_list(page, wanted, token):
                raise UnavailableError(
                    f"{self.where}: expected a list of the names that begin with {wanted!r}, got"
                    f" an answer {wrong}; check the address, and any proxy in between",
                    "storage",
                )
            keys += (each["Key"] for each in page.get("Contents", ()))
            if not page["IsTruncated"]:
                return sorted(key.removeprefix(self._prefix) for key in keys)
            token = page["NextContinuationToken"]

    def why_no_list(self, page: Mapping[str, Any], wanted: str, token: str) -> str:
        """Return why a page is not a part of the requested list; empty if it is."""
        keys = [each.get("Key", "") for each in page.get("Contents", ())]
        if "Name" not in page or "IsTruncated" not in page:
            return "that is not a list"
        if page["Name"] != self._bucket:
            return f"of the bucket {page['Name']!r}"
        if page.get("Prefix", "") != wanted or not all(key.startswith(wanted) for key in keys):
            return f"of names that begin with {page.get('Prefix', '')!r}"
        if page.get("KeyCount", len(keys)) != len(keys):
            return f"of {page['KeyCount']} names with {len(keys)} in it"
        if page["IsTruncated"] and page.get("NextContinuationToken", token) == token:
            return "that is truncated without a continuation token"
        return ""

    def delete(self, name: str) -> None:
        """See `Blobs`."""
        with self._storage(name):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """See `Blobs`."""
        with self._storage(name):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            except ClientError as error:
                if _code(error) == _MISSING:
                    return None
                raise
            if "ETag" not in answer:
                raise UnavailableError(
                    f"{self.where}: {name}: the answer is not an object of a bucket", "storage"
                )
            return answer["Body"].read(), answer["ETag"]

    def replace(self, name: str, data: bytes, tag: str | None) -> bool:
        """See `Blobs`."""
        condition: Any = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        with self._storage(name):
            try:
                self._client.put_object(
                    Bucket=self._bucket, Key=self._prefix + name, Body=data, **condition
                )
            except ClientError as error:
                if _code(error) in _LOST_RACE:
                    return False
                raise
            return True

    @contextlib.contextmanager
    def _storage(self, name: str) -> Iterator[None]:
        """Turn errors of boto3 into ours.

        Raises:
            UserError: If there is no such bucket, or no access to it.
            UnavailableError: If the server is unavailable, busy or failing.
            OutsideError: If the server refuses for another reason.
        """
        where = f"s3://{self._bucket}/{self._prefix}{name}"
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise UserError(f"{where}: {error}; set credentials as in boto3's guide") from error
        except ClientError as error:
            raise _as_ours(error, where) from error
        except (BotoCoreError, ResponseParserError) as error:
            raise UnavailableError(f"{where}: {error}", "storage") from error


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")


def _as_ours(error: ClientError, where: str) -> UserError | OutsideError:
    code = _code(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchBucket" or status in (401, 403):
        return UserError(f"{where}: {error}; check the bucket's name and its policy")
    if status >= 500 or status == 429 or code in {"SlowDown", "RequestTimeout"}:
        return UnavailableError(f"{where}: {error}", "storage")
    return OutsideError(f"{where}: {error}", "storage")
