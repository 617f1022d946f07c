"""Whether PyTorch is installed here: services that train nothing do without it."""

from __future__ import annotations

from importlib.util import find_spec

from common.errors import UserError


def need_torch(what: str) -> None:
    """Refuse what cannot be done without PyTorch, before it is loaded, which takes seconds.

    Args:
        what: The beginning of a sentence that goes on with "needs PyTorch".

    Raises:
        UserError: If it is not installed; says how to have it.
    """
    if find_spec("torch") is None:
        raise UserError(
            f"{what} needs PyTorch, which is not installed here: `pip install 'doll[worker]'`, or"
            " do it in a container of the image doll-worker"
        )
