"""`from tfdistkit.algorithms import ...`: the public names of `tfdistkit.communication.algorithms`."""

from tfdistkit.communication.algorithms import *  # noqa: F403
from tfdistkit.communication.algorithms import __all__ as __all__


def __dir__() -> list[str]:
    return sorted(__all__)
