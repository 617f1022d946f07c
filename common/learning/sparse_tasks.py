"""Built-in tasks of which a record touches few weights: a gradient is zero everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functions
from torch import Tensor, nn

from common.data.fields import INTEGERS, LABELS, NUMBERS, Input


def check_inside(name: str, column: Tensor, size: int) -> Tensor:
    """The column as whole numbers that torch can look up with, all of them in 0..size - 1.

    Raises:
        ValueError: If one is not. On a GPU torch itself would not raise but end the process.
    """
    numbers = column.long()
    strange = (numbers < 0) | (numbers >= size)
    if bool(strange.any()):
        raise ValueError(f"{name}: a number is outside 0..{size - 1}")
    return numbers


def look_up(rows: Tensor, numbers: Tensor) -> Tensor:
    """The rows of these numbers.

    The gradient of the others is not written, either, on a CPU; a GPU would add that of equal
    numbers in any order, and a gradient's bits must not depend on it.
    """
    return functions.embedding(numbers, rows, sparse=rows.device.type == "cpu")


class SparseLinear(nn.Module):
    """One weight for each feature, and a bias; all start at zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, index: Tensor, value: Tensor) -> Tensor:
        """(n,) sums of the weights of each record's features, (n, m), times their values."""
        return (look_up(self.weight, index).squeeze(2) * value).sum(1) + self.bias


@dataclass(frozen=True, slots=True)
class SparseLogistic:
    """Logistic regression of two classes on a few of very many features.

    A record has `entries` features: what it lacks of them has the value 0, which touches nothing.
    """

    features: int
    entries: int

    def build(self) -> nn.Module:
        """Make the network."""
        return SparseLinear(self.features)

    def inputs(self) -> Mapping[str, Input]:
        """Which features, their values, and the class, 0 or 1."""
        return {
            "index": Input((self.entries,), INTEGERS),
            "value": Input((self.entries,), NUMBERS),
            "label": Input((), LABELS),
        }

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """(n,) logits of class 1.

        Raises:
            ValueError: If there is no such feature.
        """
        index = check_inside("index", records["index"], self.features)
        outputs: Tensor = module(index, records["value"].float())
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """(n,) cross-entropy.

        Raises:
            ValueError: If a label is neither 0 nor 1.
        """
        labels = check_inside("label", records["label"], 2).float()
        return functions.binary_cross_entropy_with_logits(outputs, labels, reduction="none")

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(n,) 1 where the likelier class is the label."""
        return {"accuracy": ((outputs > 0) == (records["label"] == 1)).float()}

    def binary_scores(
        self, outputs: Tensor, records: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(n,) logits of class 1, and (n,) whether a record is of it."""
        return outputs, records["label"] == 1


class Factors(nn.Module):
    """A row of numbers for each user and each item."""

    def __init__(self, users: int, items: int, rank: int) -> None:
        super().__init__()
        self.users = nn.Parameter(torch.empty(users, rank))
        self.items = nn.Parameter(torch.empty(items, rank))
        for rows in (self.users, self.items):
            nn.init.trunc_normal_(rows, std=0.1)  # `normal_` costs a second on the device "meta"

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """(n, 2): the rows' product, and the sum of their squares, which regularisation takes."""
        rows, columns = look_up(self.users, user), look_up(self.items, item)
        return torch.stack([(rows * columns).sum(1), (rows**2 + columns**2).sum(1)], 1)


@dataclass(frozen=True, slots=True)
class MatrixFactorisation:
    """Ratings as products of a row for the user and a row for the item.

    The loss of a rating is half its squared error, and `regularisation` times half the squares of
    both rows: the maximum a posteriori of probabilistic matrix factorisation (Salakhutdinov, Mnih
    2007).
    """

    users: int
    items: int
    rank: int
    regularisation: float

    def build(self) -> nn.Module:
        """Make the rows, small and random: from zero nothing would ever move."""
        return Factors(self.users, self.items, self.rank)

    def inputs(self) -> Mapping[str, Input]:
        """Who rated what, and how."""
        return {
            "user": Input((), INTEGERS),
            "item": Input((), INTEGERS),
            "rating": Input((), NUMBERS),
        }

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """(n, 2), see `Factors`.

        Raises:
            ValueError: If there is no such user or item.
        """
        user = check_inside("user", records["user"], self.users)
        outputs: Tensor = module(user, check_inside("item", records["item"], self.items))
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """(n,) half the squared errors, regularised."""
        errors = outputs[:, 0] - records["rating"].float()
        return (errors**2 + self.regularisation * outputs[:, 1]) / 2

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(n,) squared errors: the root of their mean is the RMSE."""
        return {"squared_error": (outputs[:, 0] - records["rating"].float()) ** 2}
