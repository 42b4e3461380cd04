"""When replicas talk: `tfdistkit.strategy("multiworker", algorithm=tfdistkit.algorithms.LocalSGD(every=100))`."""

from tfdistkit.communication.algorithms.async_average import AsyncModelAverage
from tfdistkit.communication.algorithms.decentralized import Decentralized
from tfdistkit.communication.algorithms.diloco import DiLoCo
from tfdistkit.communication.algorithms.hierarchical import Hierarchical
from tfdistkit.communication.algorithms.local_sgd import LocalSGD

__all__ = ["AsyncModelAverage", "Decentralized", "DiLoCo", "Hierarchical", "LocalSGD"]


def __dir__() -> list[str]:
    return sorted(__all__)
