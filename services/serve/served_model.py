"""The served version of a model. Weights are swapped between batches, which delays no request."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import torch

from common.errors import UnavailableError
from common.learning.devices import resolve_device
from common.learning.errors import WrongTaskError
from common.learning.inputs import forward_of
from common.learning.named_outputs import outputs_of, tensors_of
from common.learning.outputs import check_outputs, guest
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, fit_base, task_of
from common.telemetry.logging import event_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    from common.config.settings import Settings
    from common.core.messages import ModelId, Vector
    from common.data.fields import Columns
    from common.jobs.models import VersionSelector
    from common.jobs.spec import JobSpec
    from common.learning.checkpoint import Kind


_log = event_logger(__name__)


class Version(NamedTuple):
    """Version in a snapshot."""

    made: ModelId
    made_at_s: float  # seconds since 1970


class Predicted(NamedTuple):
    """Predictions of a version for some records."""

    # Arrays (n, ...) by name.
    outputs: Mapping[str, npt.NDArray[np.float32]]
    version: Version

    def of(self, rows: slice | int) -> Predicted:
        """Return the predictions for some of the records, or, without an axis n, for one."""
        outputs = {name: values[rows] for name, values in self.outputs.items()}
        return Predicted(outputs, self.version)


@dataclass(slots=True)
class _Buffer:
    model: FlatModel
    version: Version | None = None
    # Held while computing or loading.
    lock: threading.Lock = field(default_factory=threading.Lock)


class ServedModel:
    """The version that an alias selects, loaded for predictions. Thread-safe.

    Args:
        alias: Selects the version.

    Raises:
        UserError: If the task cannot be built, or the device does not exist.
    """

    def __init__(self, spec: JobSpec, settings: Settings, alias: VersionSelector) -> None:
        self.alias = alias
        self._task, self._seed = task_of(spec, settings.tasks), spec.seed
        self._device = resolve_device(settings.device, _log.warning)
        self._current, self._spare = (
            _Buffer(FlatModel(build_model(self._task, spec.seed).to(self._device)))
            for _ in range(2)
        )
        for buffer in (self._current, self._spare):
            buffer.model.module.eval()
        module = self._current.model.module
        self.forward = forward_of(self._task, module, spec.records.described())
        self._confirmed_at = monotonic()

    @property
    def version(self) -> Version | None:
        """Version that answers now, or None if none is loaded yet."""
        return self._current.version

    @property
    def number(self) -> int:
        """J of the version that answers now, or -1 if none is loaded yet."""
        return -1 if self.version is None else self.version.made.version

    def behind_s(self) -> float:
        """Return for how long a newer version may have existed; 0 if a number is selected."""
        return 0.0 if isinstance(self.alias, int) else monotonic() - self._confirmed_at

    def confirm(self) -> None:
        """Note that the version is the selected one at this moment."""
        self._confirmed_at = monotonic()

    def load(
        self, version: Version, weights: Vector, kind: Kind, read_base: Callable[[str], bytes]
    ) -> None:
        """Answer with another version from now on.

        Waits for a batch that still uses the spare buffer.

        Args:
            version: The version.
            weights: (P + B,) float32
            kind: Model of the weights.
            read_base: Reads frozen tensors by their digest, if this process has others.

        Raises:
            CorruptError: If the weights are not of this model; names the first difference.
            UnavailableError: If the frozen tensors cannot be read now.
        """
        spare = self._spare
        spare.model.check(kind.layout)
        with spare.lock:
            fit_base(spare.model, self._task, self._seed, kind.base, read_base)
            spare.model.load(weights)
            spare.version = version
        self._current, self._spare = spare, self._current
        self.confirm()

    def predict(self, columns: Columns) -> Predicted:
        """Return predictions for records, all from one version.

        Raises:
            UnavailableError: If no version is loaded yet.
            TaskError: If the task raises on some of the records.
        """
        buffer, count = self._current, len(next(iter(columns.values())))
        if buffer.version is None:
            raise UnavailableError("there is no snapshot of the model yet")
        tensors = {name: torch.from_numpy(each).to(self._device) for name, each in columns.items()}
        with buffer.lock, torch.inference_mode(), guest(self._task):
            answered = self._task.forward(buffer.model.module, tensors)
            check_outputs(self._task, answered)
            outputs: dict[str, npt.NDArray[np.float32]] = {
                name: tensor.to("cpu", torch.float32).numpy()
                for name, tensor in outputs_of(answered, count).items()
                if name in (self.forward.outputs or (name,))
            }
            version = buffer.version
        if not outputs:
            rows = [len(each) for each in tensors_of(answered).values() if each.ndim]
            what = f"forward returned {max(rows, default=0)} outputs for {count} records"
            raise WrongTaskError(self._task, "forward", what)
        return Predicted(outputs, version)
