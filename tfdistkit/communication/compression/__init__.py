"""What gradients travel as: `tfdistkit.strategy("multiworker", compression=tfdistkit.compression.PowerSGD(rank=4))`."""

from tfdistkit.communication.compression.byte_grad import ByteGrad
from tfdistkit.communication.compression.choice import Chain, Where
from tfdistkit.communication.compression.frozen_adam import OneBitAdam, QAdam
from tfdistkit.communication.compression.int8 import Int8
from tfdistkit.communication.compression.power_sgd import PowerSGD
from tfdistkit.communication.compression.sign import Sign
from tfdistkit.communication.compression.top_k import TopK
from tfdistkit.communication.sums import BF16, FP16

__all__ = ["BF16", "FP16", "ByteGrad", "Chain", "Int8", "OneBitAdam", "PowerSGD", "QAdam", "Sign", "TopK", "Where"]


def __dir__() -> list[str]:
    return sorted(__all__)
