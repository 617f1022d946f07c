"""The block `synchronisation`: of a job's file, and of an experiment's that asks what it brings."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST = 2**31 - 1  # of whatever is counted: products of two of them still fit into 64 bits

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=MOST)]


class Part(BaseModel):
    """What all parts share: nothing unknown, nothing converted silently, nothing changed later.

    Where a validator of ours says in better words what is allowed, the schema is told beside it.
    The docstrings of fields are their descriptions: in the API's document, and in
    docs/reference/job-file.md.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


SynchronisationMode: TypeAlias = Literal["synchronous", "stale", "asynchronous", "averaging"]


class SynchronisationSpec(Part):
    """When workers wait for each other, and at which weights they compute."""

    mode: SynchronisationMode
    """`synchronous`: K gradients at exactly the version before, the paper's; `stale`: each at most
    `staleness` versions older; `asynchronous`: K of one worker, nobody waits for anybody;
    `averaging`: between the batches that it is asked for together a worker takes steps of its own,
    and an update averages what the workers came to."""
    staleness: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """s, of `stale` (1 unless said) and of `asynchronous` (4 for each worker that lives)."""
    local_rate: Positive | None = None
    """Learning rate of a worker's own steps: of `averaging`, and perhaps of `asynchronous`."""
    damped: bool = False
    """Divide the learning rate by 1 + how many versions older the oldest gradient is."""

    @model_validator(mode="after")
    def _fits(self) -> SynchronisationSpec:
        if self.staleness is not None and self.mode not in _STALE_MODES:
            raise ValueError(
                f"staleness: nothing is stale where the mode is {self.mode}, got {self.staleness}:"
                " leave it out, or take mode: stale"
            )
        if self.damped and self.mode not in _STALE_MODES:
            raise ValueError(
                f"damped: nothing is stale where the mode is {self.mode}: leave it out, or take"
                " mode: stale"
            )
        if self.local_rate is None and self.mode == "averaging":
            raise ValueError("local_rate: averaging needs one, such as 0.1")
        if self.local_rate is not None and self.mode not in _WALKING_MODES:
            raise ValueError(
                f"local_rate: workers take no steps of their own where the mode is {self.mode},"
                f" got {self.local_rate:g}: leave it out, or take mode: averaging"
            )
        return self

    @property
    def fixed_staleness(self) -> int:
        """s; 0 where nothing is stale, and where it grows with the workers that live."""
        return self.staleness or (self.mode == "stale")

    @property
    def staleness_per_worker(self) -> int:
        """By how much s grows with each worker that lives."""
        return 4 if self.mode == "asynchronous" and not self.staleness else 0

    @property
    def groups_held(self) -> int:
        """How many groups a worker may have to hold batches for: that in flight, and the next."""
        return 2 if self.mode == "asynchronous" else 2 + self.fixed_staleness

    def check_walks(self, group_size: int, optimizer: str, field: str) -> None:
        """Refuse steps of a worker's own where there are none, or they cannot be averaged.

        Args:
            group_size: K.
            optimizer: Its name.
            field: Which says so.

        Raises:
            ValueError: With what to write.
        """
        if self.local_rate and group_size == 1:
            raise ValueError(
                f"synchronisation.local_rate: with group_size 1 a worker is never asked for several"
                f" batches together, got {self.local_rate:g}: leave it out, or raise group_size"
            )
        if self.local_rate and optimizer == "adam":
            raise ValueError(
                f"{field}: what workers came to is averaged with sgd or momentum, got adam:"
                " take one of these, or leave synchronisation.local_rate out"
            )


_STALE_MODES = ("stale", "asynchronous")
_WALKING_MODES = ("averaging", "asynchronous")

SYNCHRONOUS = SynchronisationSpec(mode="synchronous")  # without the block
