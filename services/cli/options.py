"""Error messages that name a command's options instead of the request's fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from common.config.validation import complaint
from common.errors import GivenError, UserError


@contextmanager
def complaints_by(option_of: Callable[[str], str]) -> Iterator[None]:
    """Convert errors about fields to errors about options.

    Args:
        option_of: Returns the option that gave the field at a path.

    Raises:
        UserError: Instead of pydantic's error or `GivenError`.
    """
    try:
        yield
    except ValidationError as error:
        raise UserError(complaint(error, name=option_of)) from error
    except GivenError as error:
        options = ", ".join(map(option_of, error.fields))
        raise UserError(f"{options}: {error.problem}") from error
