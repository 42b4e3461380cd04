"""The facts that the processes of a job exchange in the rendezvous: versions, and a seed."""

from __future__ import annotations

import hashlib
import platform
import random

import keras
import tensorflow as tf

import tfdistkit
from tfdistkit import env


def facts() -> dict[str, str | int]:
    """Returns the versions of this process, which are compared, and its proposal for a common seed."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfdistkit": tfdistkit.__version__,
        "seed": _seed(),
    }


def _seed() -> int:
    """Returns a seed that is the same in all attempts of the job, so that a restart keeps the shuffle order."""
    job = env.job()
    if job is None:
        return random.SystemRandom().randrange(2**31)
    return int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") >> 1
