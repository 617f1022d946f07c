"""A network that follows a job's model: each newer version replaces the previous one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar


class Network(Protocol):
    """A network that can follow a job, such as a `torch.nn.Module`."""

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> object:
        """Replace the weights by these tensors."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401 -- any arguments
        """Return the network's outputs."""


Net = TypeVar("Net", bound=Network)


class Served(NamedTuple, Generic[Net]):
    """A network with the weights of one version; they never change.

    Attributes:
        net: The network.
        version: J, the number of updates in the weights.
        epoch: Number of the leadership that made the version.
    """

    net: Net
    version: int
    epoch: int


class Live(Generic[Net]):
    """The newest version of a network. Close it, or use it in a `with` block.

    `live(inputs)` computes with the newest version. To use one version for several calls, keep the
    object in `live.served`, which never changes. While the service cannot be reached, the last
    version stays and `error` says why.

    Attributes:
        served: Network of the newest version. It is replaced as a whole and never modified.
        error: Error of the last poll, or None if the poll succeeded.

    Args:
        net: Network that is copied for each version.
        fetch: Returns the model, given the tag of the last one, or None if the tag is current.
        only_forward: True to skip versions older than the one in use. They appear while Redis is
            unavailable and only checkpoints can be read.
        every_s: Time between polls.
    """

    def __init__(
        self,
        net: Net,
        fetch: Callable[[str], Any],
        *,
        only_forward: bool,
        every_s: float,
    ) -> None:
        self.error: Exception | None = None
        self._net = net
        self._fetch = fetch
        self._only_forward = only_forward
        found = fetch("")
        # Tag of the model that was fetched last, even if it was skipped.
        self._tag = found.tag
        # Submission time, which distinguishes jobs of the same name.
        self._submitted_s = found.metadata.get("submitted_s")
        self.served = self._copy(found)
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._follow, args=(every_s,), name="doll live", daemon=True
        )
        self._thread.start()

    @property
    def version(self) -> int:
        """J, the number of updates in the newest version."""
        return self.served.version

    def __call__(self, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401 -- any arguments
        """Return the outputs of the newest version."""
        return self.served.net(*inputs, **options)

    def close(self) -> None:
        """Stop following the job. The last version stays available."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            try:
                found = self._fetch(self._tag)
                if found is not None:
                    if self._serves(found):
                        self.served = self._copy(found)
                    self._tag = found.tag
                self.error = None
            except Exception as error:  # noqa: BLE001 -- kept in `error`; the next poll may succeed
                self.error = error

    def _serves(self, found: Any) -> bool:  # noqa: ANN401 -- a `doll.Model`
        served = self.served.epoch, self.served.version
        before, self._submitted_s = self._submitted_s, found.metadata.get("submitted_s")
        # The job was purged, and another job has its name.
        is_other = before != self._submitted_s
        return is_other or not self._only_forward or (found.epoch, found.version) > served

    def _copy(self, found: Any) -> Served[Net]:  # noqa: ANN401 -- a `doll.Model`
        net = copy.deepcopy(self._net)
        net.load_state_dict(found)
        return Served(net, found.version, found.epoch)
