"""Check that PyTorch is installed. Services that do not train run without it."""

from __future__ import annotations

from importlib.util import find_spec

from common.errors import UserError


def need_torch(what: str) -> None:
    """Raise if PyTorch is missing, without loading it, which takes seconds.

    Args:
        what: Beginning of a sentence that continues with "needs PyTorch".

    Raises:
        UserError: If it is not installed. The message says how to install it.
    """
    if find_spec("torch") is None:
        raise UserError(
            f"{what} needs PyTorch, which is not installed here; run `pip install 'doll[worker]'`,"
            " or use a container of the image doll-worker"
        )
