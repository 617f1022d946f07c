"""Object storage by the S3 protocol: AWS itself, or any server that knows conditional writes."""

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
_PART_BYTES = 32 << 20  # ten of them are in memory at a time; 10,000 are the most that a blob has
_CONNECT_S = 3.0  # each attempt: a candidate that looks for checkpoints holds the lease meanwhile
_TIMEOUT_S = 10.0
_ATTEMPTS = 3  # S3 says "slow down" in ordinary operation; what outlasts this is the caller's


def s3_server() -> str:
    """Return the URL of the server that AWS_ENDPOINT_URL_S3 names, or Amazon's."""
    url: str = boto3.session.Session().client("s3").meta.endpoint_url
    return url


class S3Blobs:
    """Objects of one bucket under one prefix; may be shared between threads.

    Credentials come from where boto3 looks for them: environment, profile, or the machine's role.

    Args:
        bucket: It must exist.
        prefix: Put before every name, as it is; end it with a slash.
        endpoint_url: A server other than the one that AWS_ENDPOINT_URL_S3 names, or Amazon.
        region: Where boto3's own settings do not say it.
        part_bytes: Larger blobs go up in parts of this size, several at a time; S3 takes none that
            is smaller than 5 MiB, but the last.
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
                connect_timeout=_CONNECT_S,
                read_timeout=_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
                # other servers do not all know AWS's newer checksums; manifests have their own
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
        """Write whole or not at all; a reader never sees a part."""
        body, key = io.BytesIO(data), self._prefix + name
        with self._storage(name):
            if len(body.getbuffer()) <= self._part_bytes:
                self._client.put_object(Bucket=self._bucket, Key=key, Body=body)
            else:
                self._client.upload_fileobj(body, self._bucket, key, Config=self._transfer)

    def get(self, name: str) -> bytes | None:
        """Read whole, or None where there is no such name."""
        found = self.get_tagged(name)
        return None if found is None else found[0]

    def names(self, prefix: str) -> list[str]:
        """Return all names that begin so, sorted.

        Raises:
            UnavailableError: If an answer is no list of this bucket. A proxy or another server may
                have answered, and what it leaves out is not deleted.
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
                    f"{self.where}: expected a list of the names that begin with {wanted!r}, got an"
                    f" answer {wrong}; check the address, and what stands between",
                    "storage",
                )
            keys += (each["Key"] for each in page.get("Contents", ()))
            if not page["IsTruncated"]:
                return sorted(key.removeprefix(self._prefix) for key in keys)
            token = page["NextContinuationToken"]

    def why_no_list(self, page: Mapping[str, Any], wanted: str, token: str) -> str:
        """Say why a page is no part of the list that was requested; empty if it is one."""
        keys = [each.get("Key", "") for each in page.get("Contents", ())]
        if "Name" not in page or "IsTruncated" not in page:
            return "that is no list"
        if page["Name"] != self._bucket:
            return f"of the bucket {page['Name']!r}"
        if page.get("Prefix", "") != wanted or not all(key.startswith(wanted) for key in keys):
            return f"of names that begin with {page.get('Prefix', '')!r}"
        if page.get("KeyCount", len(keys)) != len(keys):
            return f"of {page['KeyCount']} names with {len(keys)} in it"
        if page["IsTruncated"] and page.get("NextContinuationToken", token) == token:
            return "that is cut off and does not say how it continues"
        return ""

    def delete(self, name: str) -> None:
        """Delete; nothing happens where there is no such name."""
        with self._storage(name):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Read together with a tag that changes whenever the content does."""
        with self._storage(name):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            except ClientError as error:
                if _code(error) == _MISSING:
                    return None
                raise
            if "ETag" not in answer:
                raise UnavailableError(
                    f"{self.where}: {name}: the answer is no object of a bucket", "storage"
                )
            return answer["Body"].read(), answer["ETag"]

    def replace(self, name: str, data: bytes, tag: str | None) -> bool:
        """Write only if the content still has this tag (None: only if there is none yet)."""
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
        """Turn what boto3 raises into our errors.

        Raises:
            UserError: If there is no such bucket, or it does not let us in.
            UnavailableError: If the store is unavailable, busy or failing.
            OutsideError: If it refuses for another reason.
        """
        where = f"s3://{self._bucket}/{self._prefix}{name}"
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise UserError(f"{where}: {error}; see boto3's guide to credentials") from error
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
