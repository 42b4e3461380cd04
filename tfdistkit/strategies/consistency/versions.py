"""What the processes of a job tell each other before they train."""

from __future__ import annotations

import hashlib
import platform
import random

import keras
import tensorflow as tf

import tfdistkit
from tfdistkit import env


def facts() -> dict[str, str | int]:
    """Returns this process's versions, which are compared, and its proposal for a common seed."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfdistkit": tfdistkit.__version__,
        "seed": _seed(),
    }


def _seed() -> int:
    """A number of this job: the same in all of its attempts, so that one can go on where another broke off."""
    job = env.text(env.JOB_ID)
    if job is None:
        return random.SystemRandom().randrange(2**31)
    return int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") >> 1
