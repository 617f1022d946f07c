"""What is wrong with a request is told by the options of the command that made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from common.config.validation import complaint
from common.errors import GivenError, UserError


@contextmanager
def complaints_by(option_of: Callable[[str], str]) -> Iterator[None]:
    """Tell what is wrong with a field by what gave it.

    Args:
        option_of: The option that gave the field at a path.

    Raises:
        UserError: Instead of pydantic's error, and of `GivenError`.
    """
    try:
        yield
    except ValidationError as error:
        raise UserError(complaint(error, name=option_of)) from error
    except GivenError as error:
        options = ", ".join(map(option_of, error.fields))
        raise UserError(f"{options}: {error.problem}") from error
