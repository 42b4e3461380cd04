"""The versions that tfdistkit is tested with, and how to install them: one place for the check, the doctor, the errors.

The extras `cpu` and `gpu` in setup.cfg say the same; a test compares them.
"""

from __future__ import annotations

# From, and before.
PYTHON = ((3, 10), (3, 14))
TENSORFLOW = ((2, 18), (2, 22))
KERAS = ((3, 10), (3, 16))

_TENSORFLOW_RANGE = ">=2.18,<2.22"
_KERAS_REQUIREMENT = "'keras>=3.10,<3.16'"

# What can be typed anywhere: these packages are on every index, tfdistkit comes as a clone.
INSTALL_KERAS = f"pip install {_KERAS_REQUIREMENT}"
INSTALL_TENSORFLOW = f"pip install 'tensorflow-cpu{_TENSORFLOW_RANGE}' {_KERAS_REQUIREMENT}"
INSTALL_TENSORFLOW_CUDA = f"pip install 'tensorflow[and-cuda]{_TENSORFLOW_RANGE}' {_KERAS_REQUIREMENT}"
INSTALL_TFDS = "pip install 'tensorflow-datasets>=4.9' importlib_resources"


def numbers_of(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version.

    Args:
        version: Such as `2.21.0-rc1`.
    """
    first, second, *_ = version.split(".")
    return int(first), int(second)


def told(supported: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """Returns a range as text, such as `2.18 to 2.21`.

    Args:
        supported: From, and before.
    """
    (major, minor), (last_major, before) = supported
    return f"{major}.{minor} to {last_major}.{before - 1}"
