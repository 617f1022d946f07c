"""Built-in tasks whose records use few weights, so that gradients are mostly zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functions
from torch import Tensor, nn

from common.data.fields import INTEGERS, LABELS, NUMBERS, Input


def check_inside(name: str, column: Tensor, size: int) -> Tensor:
    """Return the column as integers, after checking that all are in 0..size - 1.

    Raises:
        ValueError: If one is outside. On a GPU, torch would end the process instead of raising.
    """
    numbers = column.long()
    strange = (numbers < 0) | (numbers >= size)
    if bool(strange.any()):
        raise ValueError(f"{name}: a number is outside 0..{size - 1}")
    return numbers


def look_up(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the rows with these indexes.

    On the CPU, the gradient is sparse. A GPU would add the gradients of equal indexes in any order,
    which must not affect the bits, so there it is dense.
    """
    return functions.embedding(numbers, rows, sparse=rows.device.type == "cpu")


class SparseLinear(nn.Module):
    """One weight per feature, and a bias. All start at zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, index: Tensor, value: Tensor) -> Tensor:
        """Return the sum of weight times value over each record's features, (n,)."""
        return (look_up(self.weight, index).squeeze(2) * value).sum(1) + self.bias


@dataclass(frozen=True, slots=True)
class SparseLogistic:
    """Logistic regression of two classes on records with few of very many features.

    A record has `entries` features. Missing ones have the value 0, which changes nothing.
    """

    features: int
    entries: int

    def build(self) -> nn.Module:
        """Make the network."""
        return SparseLinear(self.features)

    def inputs(self) -> Mapping[str, Input]:
        """Return the input fields: features, their values, and the class, 0 or 1."""
        return {
            "index": Input((self.entries,), INTEGERS),
            "value": Input((self.entries,), NUMBERS),
            "label": Input((), LABELS),
        }

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return logits of class 1, (n,).

        Raises:
            ValueError: If a feature does not exist.
        """
        index = check_inside("index", records["index"], self.features)
        outputs: Tensor = module(index, records["value"].float())
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy, (n,).

        Raises:
            ValueError: If a label is neither 0 nor 1.
        """
        labels = check_inside("label", records["label"], 2).float()
        return functions.binary_cross_entropy_with_logits(outputs, labels, reduction="none")

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return 1 for records whose more likely class is the label, otherwise 0, (n,)."""
        return {"accuracy": ((outputs > 0) == (records["label"] == 1)).float()}

    def binary_scores(
        self, outputs: Tensor, records: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return logits of class 1, (n,), and True for records of class 1, (n,)."""
        return outputs, records["label"] == 1


class Factors(nn.Module):
    """A row of numbers for each user and each item."""

    def __init__(self, users: int, items: int, rank: int) -> None:
        super().__init__()
        self.users = nn.Parameter(torch.empty(users, rank))
        self.items = nn.Parameter(torch.empty(items, rank))
        for rows in (self.users, self.items):
            # `normal_` takes a second on the device "meta".
            nn.init.trunc_normal_(rows, std=0.1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Return the product of the rows and the sum of their squares, (n, 2)."""
        rows, columns = look_up(self.users, user), look_up(self.items, item)
        return torch.stack([(rows * columns).sum(1), (rows**2 + columns**2).sum(1)], 1)


@dataclass(frozen=True, slots=True)
class MatrixFactorisation:
    """Ratings as products of a user's row and an item's row.

    The loss of a rating is half its squared error plus `regularisation` times half the squares of
    both rows. This is the maximum a posteriori of probabilistic matrix factorisation
    (Salakhutdinov, Mnih 2007).
    """

    users: int
    items: int
    rank: int
    regularisation: float

    def build(self) -> nn.Module:
        """Make the rows, small and random. Rows of zeros would never change."""
        return Factors(self.users, self.items, self.rank)

    def inputs(self) -> Mapping[str, Input]:
        """Return the input fields: user, item and rating."""
        return {
            "user": Input((), INTEGERS),
            "item": Input((), INTEGERS),
            "rating": Input((), NUMBERS),
        }

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n, 2). See `Factors`.

        Raises:
            ValueError: If a user or an item does not exist.
        """
        user = check_inside("user", records["user"], self.users)
        outputs: Tensor = module(user, check_inside("item", records["item"], self.items))
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return half the squared errors, regularised, (n,)."""
        errors = outputs[:, 0] - records["rating"].float()
        return (errors**2 + self.regularisation * outputs[:, 1]) / 2

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the squared errors, (n,). The root of their mean is the RMSE."""
        return {"squared_error": (outputs[:, 0] - records["rating"].float()) ** 2}
