"""Lists the versions that tfdistkit is tested with, and the commands that install them.

The extras `cpu` and `gpu` in setup.cfg repeat them; a test compares both.
"""

from __future__ import annotations

# First version that is supported, and first one that is not.
PYTHON = ((3, 10), (3, 14))
TENSORFLOW = ((2, 18), (2, 22))
KERAS = ((3, 10), (3, 16))

_TENSORFLOW_RANGE = ">=2.18,<2.22"
_KERAS_REQUIREMENT = "'keras>=3.10,<3.16'"

# Commands that work in any environment: these packages are on the package index, tfdistkit is installed from a clone.
INSTALL_KERAS = f"pip install {_KERAS_REQUIREMENT}"
INSTALL_TENSORFLOW = f"pip install 'tensorflow-cpu{_TENSORFLOW_RANGE}' {_KERAS_REQUIREMENT}"
INSTALL_TENSORFLOW_CUDA = f"pip install 'tensorflow[and-cuda]{_TENSORFLOW_RANGE}' {_KERAS_REQUIREMENT}"
INSTALL_TFDS = "pip install 'tensorflow-datasets>=4.9' importlib_resources"


def numbers_of(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version.

    Args:
        version: A version such as `2.21.0-rc1`.
    """
    first, second, *_ = version.split(".")
    return int(first), int(second)


def range_text(supported: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """Returns a range of versions as text, such as `2.18 to 2.21`.

    Args:
        supported: First version that is supported, and first one that is not.
    """
    (major, minor), (last_major, before) = supported
    return f"{major}.{minor} to {last_major}.{before - 1}"
