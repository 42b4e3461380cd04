"""`from tfdistkit.compression import ...`: the public names of `tfdistkit.communication.compression`."""

from tfdistkit.communication.compression import *  # noqa: F403
from tfdistkit.communication.compression import __all__ as __all__


def __dir__() -> list[str]:
    return sorted(__all__)
