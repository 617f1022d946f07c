"""The blob store's contract, in memory, in a directory and on a server of the S3 protocol."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.settings import Settings
from common.errors import UnavailableError, UserError
from common.http.client import BoundedClient
from common.jobs.spec import InitSpec
from common.storage.disk import DiskBlobs
from common.storage.memory import MemoryBlobs
from common.storage.s3 import S3Blobs
from load.harness.s3_servers import LyingServer, S3Server
from services.coordinator.initial_weights import SourceFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from wsgiref.types import StartResponse, WSGIEnvironment

    from common.storage.port import Blobs
    from load.harness.s3_servers import Lie

BUCKET = "checkpoints"
REGION = "us-east-1"
# Names per page of the test server; S3 lists a thousand.
PAGE = 50


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Start a Moto server with one bucket, set credentials, and yield the address."""
    server = S3Server()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("MOTO_S3_DEFAULT_MAX_KEYS", str(PAGE))
        client = boto3.client("s3", endpoint_url=server.url, region_name=REGION)
        client.create_bucket(Bucket=BUCKET)
        yield server.url
    server.close()


@pytest.fixture(params=["memory", "disk", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "memory":
        return MemoryBlobs()
    if request.param == "disk":
        return DiskBlobs(tmp_path / "blobs")
    url = request.getfixturevalue("s3_server")
    return S3Blobs(BUCKET, f"{request.node.name}/", url, REGION)


# --- every store ---------------------------------------------------------------------------------


def test_put_blob_is_read_back_complete(blobs: Blobs) -> None:
    assert blobs.get("job/model") is None
    blobs.put("job/model", b"first")
    blobs.put("job/model", memoryview(b"second"))
    blobs.put("job/empty", b"")
    assert blobs.get("job/model") == b"second"
    assert blobs.get("job/empty") == b""


def test_signed_url_of_s3_is_readable_without_credentials(s3_server: str) -> None:
    blobs = S3Blobs(BUCKET, "signed/", s3_server, REGION)
    blobs.put("a b", b"data")
    url = blobs.signed_url("a b", 60)
    assert "X-Amz-Signature=" in url
    assert BoundedClient("S3", 60.0).ask("GET", url) == (200, b"data")


def test_pretrained_weights_are_read_from_a_bucket(
    s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    settings = Settings(blobs=f"s3://{BUCKET}/checkpoints")
    S3Blobs(BUCKET, "", s3_server, REGION).put("nets/a b?", b"data")

    def read(key: str) -> bytes:
        sha256 = hashlib.sha256(b"data").hexdigest()
        init = InitSpec.model_validate({"from": f"s3://{BUCKET}/{key}", "sha256": sha256})
        with closing(SourceFile(init, settings)) as file:
            file.read()
            return file.path.read_bytes()

    assert read("nets/a b?") == b"data"
    with pytest.raises(UserError, match=r"nets/other returned status 404"):
        read("nets/other")


def test_large_blob_is_read_back_complete(blobs: Blobs) -> None:
    data = os.urandom(1 << 20) * 41  # on S3 it goes up in two parts
    blobs.put("large", data)
    assert blobs.get("large") == data


def test_listing_returns_names_with_the_prefix(blobs: Blobs) -> None:
    names = ["a/b/1", "a/b/10", "a/b/2", "a/bc", "a2/x", "z"]
    for name in reversed(names):
        blobs.put(name, b"")
    assert blobs.names("") == names
    assert blobs.names("a/b") == names[:4]
    assert blobs.names("a/b/") == names[:3]
    assert blobs.names("a/b/1") == names[:2]
    assert blobs.names("nowhere/") == []


def test_get_of_a_folder_returns_none(blobs: Blobs) -> None:
    blobs.put("a/b", b"")
    assert blobs.get("a") is None
    assert blobs.get("a/b/c") is None


def test_listing_returns_more_names_than_fit_on_a_page(blobs: Blobs) -> None:
    names = [f"many/{number:04}" for number in range(2 * PAGE + 5)]
    for name in names:
        blobs.replace(name, b"", None)
    assert blobs.names("many/") == names


def test_delete_removes_blob_and_ignores_missing_blob(blobs: Blobs) -> None:
    blobs.put("job/model", b"data")
    blobs.delete("job/model")
    blobs.delete("job/model")
    blobs.delete("never/was")
    assert blobs.get("job/model") is None
    assert blobs.names("") == []


def test_tag_changes_with_content(blobs: Blobs) -> None:
    assert blobs.get_tagged("latest") is None
    tags = []
    for data in (b"1", b"2", b"3"):
        blobs.put("latest", data)
        found = blobs.get_tagged("latest")
        assert found is not None
        assert found[0] == data
        tags.append(found[1])
    assert len(set(tags)) == 3


def test_replace_needs_the_current_tag(blobs: Blobs) -> None:
    assert not blobs.replace("latest", b"0", "no such tag")
    assert blobs.replace("latest", b"1", None)
    assert not blobs.replace("latest", b"2", None)
    found = blobs.get_tagged("latest")
    assert found is not None
    assert blobs.replace("latest", b"3", found[1])
    assert not blobs.replace("latest", b"4", found[1])
    assert blobs.get("latest") == b"3"


def test_replace_of_deleted_blob_fails(blobs: Blobs) -> None:
    blobs.put("latest", b"1")
    found = blobs.get_tagged("latest")
    assert found is not None
    blobs.delete("latest")
    assert not blobs.replace("latest", b"2", found[1])
    assert blobs.get("latest") is None


def test_concurrent_replaces_lose_no_increment(blobs: Blobs) -> None:
    """A counter that all writers increment ends at the number of increments."""
    blobs.put("counter", b"0")
    start = threading.Barrier(4)

    def increment(_: int) -> None:
        start.wait(20)
        for _attempt in range(1000):
            found = blobs.get_tagged("counter")
            assert found is not None
            if blobs.replace("counter", b"%d" % (int(found[0]) + 1), found[1]):
                return
        pytest.fail("another writer was faster every time")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(4)))
    assert blobs.get("counter") == b"4"


def test_reader_never_sees_partial_blob(blobs: Blobs) -> None:
    whole = [bytes([number]) * 100_000 for number in range(4)]
    blobs.put("model", whole[0])
    with ThreadPoolExecutor() as pool:
        writing = [pool.submit(blobs.put, "model", data) for data in whole * 5]
        while not all(each.done() for each in writing):
            assert blobs.get("model") in whole
        for each in writing:
            each.result()


# --- a directory ---------------------------------------------------------------------------------

OUTSIDE = [
    "../escape",
    "a/../../escape",
    "/etc/passwd",
    "",
    "a//b",
    "a/",
    ".hidden",
    ".lock",
    "a\0",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_disk_store_rejects_names_outside_its_directory(tmp_path: Path, name: str) -> None:
    blobs = DiskBlobs(tmp_path / "blobs")
    calls: list[Callable[[], object]] = [
        lambda: blobs.put(name, b"x"),
        lambda: blobs.get(name),
        lambda: blobs.delete(name),
        lambda: blobs.get_tagged(name),
        lambda: blobs.replace(name, b"x", None),
    ]
    for call in calls:
        with pytest.raises(UserError, match="is not a valid blob name"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["blobs"]


@given(prefix=st.text("./a", max_size=6))
def test_disk_listing_ignores_prefixes_outside_its_directory(
    tmp_path_factory: pytest.TempPathFactory, prefix: str
) -> None:
    parent = tmp_path_factory.mktemp("parent")
    (parent / "a").write_bytes(b"not ours")
    assert DiskBlobs(parent / "blobs").names(prefix) == []


def test_disk_stores_of_one_directory_share_blobs(tmp_path: Path) -> None:
    DiskBlobs(tmp_path).put("job/model", b"data")
    assert DiskBlobs(tmp_path).get("job/model") == b"data"


def test_unfinished_files_are_hidden_and_deleted_after_a_day(tmp_path: Path) -> None:
    blobs = DiskBlobs(tmp_path)
    leftovers = [tmp_path / ".unfinished" / name for name in ("old", "new")]
    for leftover in leftovers:
        leftover.write_bytes(b"half of")
    two_days_ago = time.time() - 2 * 86_400
    os.utime(leftovers[0], (two_days_ago, two_days_ago))
    assert blobs.names("") == []
    assert DiskBlobs(tmp_path).names("") == []
    assert [leftover.exists() for leftover in leftovers] == [False, True]


def test_disk_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    blobs = DiskBlobs(tmp_path)
    blobs.put("a", b"1")
    blobs.replace("a", b"2", "no such tag")
    assert list((tmp_path / ".unfinished").iterdir()) == []


def test_disk_store_rejects_blob_name_that_is_also_a_folder(tmp_path: Path) -> None:
    blobs = DiskBlobs(tmp_path)
    blobs.put("a", b"1")
    with pytest.raises(UserError, match="folder"):
        blobs.put("a/b", b"2")
    with pytest.raises(UserError, match="folder"):
        blobs.put("a/b/c", b"2")
    blobs.put("b/c", b"3")
    with pytest.raises(UserError, match="folder"):
        blobs.put("b", b"4")


# --- S3 ------------------------------------------------------------------------------------------

PART_BYTES = 5 << 20  # the smallest that S3 takes
LARGE = bytes(range(256)) * (12 << 12)  # 12 MiB: three parts


class FailingServer(S3Server):
    """A server on which the second part of a large blob always fails."""

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if "partNumber=2" in environ["QUERY_STRING"]:
            start("500 Internal Server Error", [("Connection", "close")])
            return [b"<Error><Code>InternalError</Code></Error>"]
        return super()._answer(environ, start)


@pytest.fixture
def failing(s3_server: str) -> Iterator[str]:
    """Yield the failing server's address; it shares the buckets of the other server."""
    del s3_server
    server = FailingServer()
    yield server.url
    server.close()


def test_blob_above_part_size_is_uploaded_in_parts(s3_server: str) -> None:
    blobs = S3Blobs(BUCKET, "parts/", s3_server, REGION, PART_BYTES)
    for name, data, parts in (("large", LARGE, 3), ("small", LARGE[:PART_BYTES], None)):
        blobs.put(name, data)
        found = blobs.get_tagged(name)
        assert found is not None
        assert found[0] == data
        # S3 adds the number of parts to the tag of an object that was uploaded in parts.
        assert ("-" in found[1]) == (parts is not None)
        assert parts is None or found[1].strip('"').endswith(f"-{parts}")
    assert blobs.names("") == ["large", "small"]


def test_failed_part_aborts_upload_and_keeps_previous_blob(failing: str) -> None:
    blobs = S3Blobs(BUCKET, "failing/", failing, REGION, PART_BYTES)
    with pytest.raises(UnavailableError):
        blobs.put("large", LARGE)
    assert blobs.get("large") is None
    assert blobs.names("") == []
    blobs.put("large", b"small")
    with pytest.raises(UnavailableError):
        blobs.put("large", memoryview(LARGE))
    assert blobs.get("large") == b"small"
    client = boto3.client("s3", endpoint_url=failing, region_name=REGION)
    # S3 would charge for parts that remain.
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET)


def test_unfinished_upload_of_killed_writer_is_not_listed(s3_server: str) -> None:
    client = boto3.client("s3", endpoint_url=s3_server, region_name=REGION)
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="killed/large")["UploadId"]
    client.upload_part(
        Bucket=BUCKET, Key="killed/large", UploadId=upload, PartNumber=1, Body=LARGE[:PART_BYTES]
    )
    blobs = S3Blobs(BUCKET, "killed/", s3_server, REGION, PART_BYTES)
    assert blobs.get("large") is None
    assert blobs.names("") == []
    blobs.put("large", LARGE)
    assert blobs.get("large") == LARGE
    client.abort_multipart_upload(Bucket=BUCKET, Key="killed/large", UploadId=upload)


def test_unreachable_store_raises_unavailable(s3_server: str) -> None:
    # The test needs only the credentials that the fixture sets.
    del s3_server
    blobs = S3Blobs(BUCKET, "", "http://127.0.0.1:1", REGION)
    with pytest.raises(UnavailableError):
        blobs.get("job/model")
    with pytest.raises(UnavailableError):
        blobs.put("job/model", b"data")


def test_missing_bucket_raises_user_error(s3_server: str) -> None:
    blobs = S3Blobs("elsewhere", "", s3_server, REGION)
    for call in (lambda: blobs.put("a", b""), lambda: blobs.get("a"), lambda: blobs.names("")):
        with pytest.raises(UserError, match="bucket"):
            call()
    with pytest.raises(UserError, match="bucket"):
        blobs.replace("a", b"", None)


def test_prefixes_of_one_bucket_are_separate_stores(s3_server: str) -> None:
    one, two = (S3Blobs(BUCKET, prefix, s3_server, REGION) for prefix in ("one/", "two/"))
    one.put("a", b"1")
    assert two.get("a") is None
    assert two.names("") == []


@pytest.fixture
def lying(s3_server: str) -> Iterator[LyingServer]:
    """Yield a server that can answer wrongly; it shares the buckets of the other server."""
    del s3_server
    server = LyingServer()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("lie", "reason"),
    [("other", "of the bucket 'another'"), ("page", "that is not a list")],
)
def test_invalid_list_response_raises_unavailable(
    lying: LyingServer, lie: Lie, reason: str
) -> None:
    blobs = S3Blobs(BUCKET, "lies/", lying.url, REGION)
    blobs.put("a", b"1")
    lying.lies, lying.newest = {"lies": lie}, {"lies": ""}
    with pytest.raises(UnavailableError, match=reason) as raised:
        blobs.names("")
    assert f"s3://{BUCKET}/lies/ at 127.0.0.1" in str(raised.value)
    lying.lies = {}
    assert blobs.names("") == ["a"]


def test_page_instead_of_an_object_raises_unavailable(lying: LyingServer) -> None:
    blobs = S3Blobs(BUCKET, "lies/", lying.url, REGION)
    lying.lies, lying.newest = {"lies": "page"}, {"lies": ""}
    with pytest.raises(UnavailableError, match="not an object of a bucket"):
        blobs.get_tagged("a")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"IsTruncated": True}, "truncated"),
        ({"KeyCount": 7}, "of 7 names with 1 in it"),
        ({"Prefix": "others/"}, "begin with 'others/'"),
        ({"Contents": [{"Key": "others/a"}]}, "begin with"),
        ({"IsTruncated": None}, "not a list"),
    ],
)
def test_list_that_contradicts_itself_is_rejected(
    s3_server: str, changed: dict[str, object], reason: str
) -> None:
    blobs = S3Blobs(BUCKET, "lies/", s3_server, REGION)
    page = {
        "Name": BUCKET,
        "Prefix": "lies/",
        "IsTruncated": False,
        "KeyCount": 1,
        "Contents": [{"Key": "lies/a"}],
    }
    assert blobs.why_no_list(page, "lies/", "") == ""
    page = {name: value for name, value in (page | changed).items() if value is not None}
    assert reason in blobs.why_no_list(page, "lies/", "")


def test_list_with_repeated_continuation_token_is_rejected(s3_server: str) -> None:
    blobs = S3Blobs(BUCKET, "", s3_server, REGION)
    page = {"Name": BUCKET, "IsTruncated": True, "NextContinuationToken": "t"}
    assert blobs.why_no_list(page, "", "") == ""
    assert "truncated" in blobs.why_no_list(page, "", "t")


def test_unreadable_folder_raises_unavailable(tmp_path: Path) -> None:
    blobs = DiskBlobs(tmp_path)
    blobs.put("job/model", b"")
    assert blobs.names("nowhere/") == []
    if os.geteuid() == 0:
        pytest.skip("root reads every folder")
    (tmp_path / "job").chmod(0)
    with pytest.raises(UnavailableError):
        blobs.names("job/")
    (tmp_path / "job").chmod(0o700)
