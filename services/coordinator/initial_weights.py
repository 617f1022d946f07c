"""Pretrained weights that a job starts with: the file is read once, and version 0 is stored.

    source ──bounded──▶ temporary file ──checksum──▶ module ──▶ base and weights in object storage

The file is read by a thread of its own, because a turn must not take minutes. Meanwhile the
candidate keeps its lease, and each of its searches finds that the file is still being read.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from common.core.snapshot_search import SEARCH_AGAIN_S
from common.errors import UnavailableError, UserError
from common.http.client import BoundedClient
from common.jobs.build import parts_of
from common.jobs.spec import place_of
from common.learning.checkpoint import model_in
from common.learning.pretrained import take
from common.learning.task_options import MAX_MODEL_MIB
from common.learning.trainer import Trainer
from common.storage.store import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.config.settings import Settings
    from common.jobs.spec import InitSpec
    from services.coordinator.replica import JobContext

# Time limit of one attempt, redirects included, and the number of requests that it may take.
READ_S = 600.0
REQUESTS = 5
# A search waits this long for the file, so that a small one needs no second search.
WAIT_S = 0.5
# Lifetime in Redis of the reason why the job waits: several pauses between searches.
WAITS_TTL_S = 10.0
# Time without a search after which the file is dropped: this replica is not a candidate any more.
UNUSED_S = 60.0
_PART = 1 << 20
MOST_BYTES = MAX_MODEL_MIB << 20
# Errors of a path that remain until a person acts. ELOOP is a symbolic link.
_WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EINVAL}
# Statuses besides 5xx that a later request may not get.
_TEMPORARY = {408, 429}


class SourceFile:
    """A copy of the file that `init` names, in a temporary file.

    Args:
        init: Names the file.
        settings: Settings of the process.

    Attributes:
        path: The copy.
        size: Number of bytes so far.
        done: Set by the thread. Its exception is the one of `read`.
    """

    def __init__(self, init: InitSpec, settings: Settings) -> None:
        self._init, self._settings = init, settings
        self._until = monotonic() + READ_S
        self._file = NamedTemporaryFile(prefix="doll-init-")  # noqa: SIM115 -- closed by `close`
        self.path = Path(self._file.name)
        self.size = 0
        self.done = Future[None]()
        self._closed = threading.Event()

    def begin(self) -> None:
        """Read the file in a thread."""
        threading.Thread(target=self._run, name="initial weights", daemon=True).start()

    def close(self) -> None:
        """Delete the copy. If the file is still being read, the thread ends at the next part."""
        self._closed.set()
        if self.done.done():
            self._file.close()

    def _run(self) -> None:
        try:
            self.read()
            self.done.set_result(None)
        except BaseException as error:  # noqa: BLE001 -- raised again by `done`
            self.done.set_exception(error)
        if self._closed.is_set():
            self._file.close()

    def read(self) -> None:
        """Read the file.

        Raises:
            UserError: If it may not be read, or is too large or another file.
            UnavailableError: If it cannot be read now.
        """
        init, settings = self._init, self._settings
        try:
            if why := init.why_unlisted(settings.init_hosts, settings.blobs):
                raise UserError(f"init.from: {why}")
            if init.source.startswith("s3://"):
                self._download(_signed_url(init.source), ())
            elif place_of(init.source):
                self._download(init.source, settings.init_hosts)
            else:
                self._copy()
            self._file.flush()
        except OSError as error:
            raise UnavailableError(f"init: {init.shown}: {error}") from error
        if (found := self._sum.hexdigest()) != init.sha256:
            raise UserError(
                f"init.sha256: the file {init.shown} has the SHA-256 {found}, expected"
                f" {init.sha256}"
            )

    def _restart(self) -> None:
        self.size, self._sum = 0, sha256()
        self._file.seek(0)
        self._file.truncate()

    def _take(self, part: bytes) -> None:
        if self._closed.is_set() or monotonic() > self._until:
            raise UnavailableError(f"init: {self._init.shown} could not be read in time")
        self.size += len(part)
        if self.size > MOST_BYTES:
            raise UserError(f"init.from: {self._init.shown} has more than {MOST_BYTES:,} bytes")
        self._sum.update(part)
        self._file.write(part)

    def _download(self, url: str, hosts: tuple[str, ...]) -> None:
        """Request a URL, and follow redirects to these hosts."""
        shown = self._init.shown
        for _ in range(REQUESTS):
            self._restart()
            client = BoundedClient(f"init: the host of {shown}", max(self._until - monotonic(), 0))
            try:
                request = client.receive("GET", url, self._take)
                status, headers = client.submit(request).result()
            finally:
                client.close()
            if status == 200:
                return
            if status >= 500 or status in _TEMPORARY:
                raise UnavailableError(f"init: {shown} returned status {status}")
            if not 300 <= status < 400:
                raise UserError(f"init.from: {shown} returned status {status}")
            url = _redirected(url, headers.get("location", ""), hosts, shown)
        raise UserError(f"init.from: {shown} redirects more than {REQUESTS - 1} times")

    def _copy(self) -> None:
        """Copy a file below DOLL_MODELS. None of the path's parts may be a symbolic link."""
        self._restart()
        folder, shown = self._settings.models, self._init.shown
        if not folder:
            raise UserError("init.from: is a path, but DOLL_MODELS of coordinators is not set")
        with ExitStack() as opened:

            def at(name: str, flags: int, parent: int | None) -> int:
                found = os.open(name, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=parent)
                opened.callback(os.close, found)
                return found

            try:
                place = at(folder, os.O_DIRECTORY, None)
                *parents, last = self._init.source.split("/")
                for parent in parents:
                    place = at(parent, os.O_DIRECTORY | os.O_NOFOLLOW, place)
                file = at(last, os.O_NOFOLLOW, place)
            except OSError as error:
                if error.errno not in _WRONG_PATH:
                    raise
                raise UserError(
                    f"init.from: {shown} below DOLL_MODELS cannot be read, or is a symbolic link:"
                    f" {error}"
                ) from error
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise UserError(f"init.from: {shown} below DOLL_MODELS is not a file")
            while part := os.read(file, _PART):
                self._take(part)


def _signed_url(source: str) -> str:
    """Return a URL at which an object of S3 can be read with this process's credentials."""
    from common.storage.s3 import S3Blobs  # noqa: PLC0415 -- imported on first use

    bucket, _, key = source.removeprefix("s3://").partition("/")
    return S3Blobs(bucket).signed_url(key, int(READ_S))


def _redirected(url: str, location: str, hosts: tuple[str, ...], shown: str) -> str:
    """Return the URL that a redirect names.

    Raises:
        UserError: If it is not of a listed host.
    """
    host = ""
    # A malformed URL raises an error in each of these functions.
    with suppress(ValueError):
        target = urljoin(url, location)
        host = urlsplit(target).netloc.rpartition("@")[2][:200]
        if target.startswith("http") and place_of(target) in hosts:
            return target
    raise UserError(
        f"init.from: {shown} redirects to {host!r}, which is not listed in the setting"
        " DOLL_INIT_HOSTS"
    )


class InitialWeights:
    """Makes version 0 from the file that a job's `init` names, before the job's first leader leads.

    Args:
        job: The job.
        is_unused: Returns True if nobody has led the job yet.
    """

    def __init__(self, job: JobContext, is_unused: Callable[[], bool]) -> None:
        self._job, self._is_unused = job, is_unused
        self._source: SourceFile | None = None
        # When the last search was, and when the file may be read again after `_why`.
        self._searched_at = self._again_at = 0.0
        self._why = ""

    def prepare(self) -> None:
        """Store version 0, if `init` requires it and no coordinator has done it.

        Raises:
            TaskMissingError: If this process does not have the task.
            UserError: If the file or the task cannot be used. Nothing is stored.
            UnavailableError: If the file is still being read, or a server is unavailable.
        """
        job, init, blobs = self._job, self._job.spec.init, self._job.replica.blobs
        if init is None or blobs is None:
            return
        self._searched_at = monotonic()
        store = CheckpointStore(blobs, job.id)
        if store.init():
            return
        if job.record.wanted == "stopped":
            raise UserError("init: the job was stopped before the file was read")
        if not (self._is_unused() or job.record.from_start):
            raise UserError(
                f"init: the weights of {init.shown} are not in {store.where} any more; restore"
                " them; or `doll job resume --after-loss --from-start` reads the file again"
            )
        try:
            source = self._read(init)
        except UnavailableError as error:
            # A file that is being read is logged once it was read.
            if self._source is None and job.changes("init", str(error)):
                job.log.info("initial_weights_awaited", reason=str(error))
            job.board.put_unable(job.replica.name, str(error), WAITS_TTL_S)
            raise
        self._store(init, source, store)
        self.drop()

    def poll(self) -> None:
        """Drop the file if this replica is not a candidate any more."""
        if self._source is not None and monotonic() - self._searched_at > UNUSED_S:
            self.drop()

    def drop(self) -> None:
        """Delete the copy of the file, and stop reading it."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _read(self, init: InitSpec) -> SourceFile:
        """Return the complete file.

        Raises:
            UserError: See `SourceFile.read`.
            UnavailableError: If it is still being read, or cannot be read now.
        """
        if self._source is None:
            if monotonic() < self._again_at:
                raise UnavailableError(self._why)
            try:
                self._source = SourceFile(init, self._job.replica.settings)
            except OSError as error:
                raise UnavailableError(f"init: no temporary file can be made: {error}") from error
            self._source.begin()
        source = self._source
        try:
            source.done.result(WAIT_S)
        except TimeoutError:
            raise UnavailableError(
                f"reads the initial weights from {init.shown}: {source.size >> 20:,} MiB so far"
            ) from None
        except Exception as error:
            self.drop()
            self._again_at, self._why = monotonic() + SEARCH_AGAIN_S, str(error)
            raise
        return source

    def _store(self, init: InitSpec, source: SourceFile, store: CheckpointStore) -> None:
        job, found = self._job, list[str]()
        parts = parts_of(
            job.spec,
            job.replica.settings.tasks,
            store,
            lambda module: found.append(str(take(module, source.path, init.new))),
        )
        reason = f"with the weights of {init.shown}: {found[0]}"
        # Later leaders find the stored weights and write no event, so the event comes first.
        job.replica.job_store.initialised(job.record, reason)
        store.put_init(model_in(Trainer(*parts).snapshot()))
        job.log.info("weights_initialised", reason=reason)
