"""A network that follows a job's model: each newer version takes the place of the one before."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar


class Network(Protocol):
    """What can be followed, such as a `torch.nn.Module`."""

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> object:
        """Take these tensors."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401 -- whatever it takes
        """Answer."""


Net = TypeVar("Net", bound=Network)


class Served(NamedTuple, Generic[Net]):
    """A network whose weights stay as they are, and the version that they are of."""

    net: Net
    version: int
    epoch: int


class Live(Generic[Net]):
    """The newest version of a network; close it, or leave its `with` block.

    `live(inputs)` asks the newest; `live.served` is one version for as long as you hold it. Where
    the service is away, the version that is there goes on being served, and `error` says why.

    Attributes:
        served: The network of now: replaced whole, never changed.
        error: Why the last look failed; None: it did not.

    Args:
        net: What is copied for each version.
        fetch: Weights other than those of a tag; None: there are none.
        only_forward: Whether a version is passed over that is older than the one that is served:
            as while Redis is unavailable, and checkpoints are all that can be read.
        every_s: Between looks.
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
        self._tag = found.tag  # of what was looked at last
        self._submitted_s = found.metadata.get("submitted_s")  # of the job that is served
        self.served = self._copy(found)
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._follow, args=(every_s,), name="doll live", daemon=True
        )
        self._thread.start()

    @property
    def version(self) -> int:
        """J of what is served."""
        return self.served.version

    def __call__(self, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401 -- whatever the network takes
        """Ask the newest version."""
        return self.served.net(*inputs, **options)

    def close(self) -> None:
        """Follow no more; what is served stays."""
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
            except Exception as error:  # noqa: BLE001 -- told by `error`; the next look may succeed
                self.error = error

    def _serves(self, found: Any) -> bool:  # noqa: ANN401 -- a `doll.Model`
        served = self.served.epoch, self.served.version
        before, self._submitted_s = self._submitted_s, found.metadata.get("submitted_s")
        is_other = before != self._submitted_s  # the job was purged, and another has its name
        return is_other or not self._only_forward or (found.epoch, found.version) > served

    def _copy(self, found: Any) -> Served[Net]:  # noqa: ANN401 -- a `doll.Model`
        net = copy.deepcopy(self._net)
        net.load_state_dict(found)
        return Served(net, found.version, found.epoch)
