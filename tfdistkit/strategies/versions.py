"""What the processes of a job tell each other before they train."""

from __future__ import annotations

import platform
import random

import keras
import tensorflow as tf

import tfdistkit


def facts() -> dict[str, str | int]:
    """Returns this process's versions, which are compared, and its proposal for a common seed."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfdistkit": tfdistkit.__version__,
        "seed": random.SystemRandom().randrange(2**31),
    }
