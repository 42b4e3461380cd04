"""Checks before a strategy is made: tested versions of TensorFlow and Keras, one process where it trains in one."""

from __future__ import annotations

import sys
import warnings

from tfdistkit import env, supported
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import MissingDependencyError, OptionError, UnsupportedError, explain

_KERAS_BACKEND = "KERAS_BACKEND"
_BACKENDS = ("jax", "torch", "openvino")


def require_keras_on_tensorflow() -> bool:
    """Requires Keras 3 on TensorFlow, both in tested versions or newer ones.

    Returns:
        Whether both are tested versions; a newer one was warned of.

    Raises:
        MissingDependencyError: if one of them is not installed, or older than every tested version.
        OptionError: if Keras uses another backend.
    """
    backend = env.text(_KERAS_BACKEND)
    if backend is not None and backend != "tensorflow" and "keras" not in sys.modules:
        raise _other_backend(f"{_KERAS_BACKEND}={backend}")
    try:
        import tensorflow
    except ImportError as error:
        raise MissingDependencyError(
            explain(
                "TensorFlow is not installed, or cannot be loaded.",
                received=str(error),
                do=f"Install it: {supported.INSTALL_TENSORFLOW}\nFor GPUs: {supported.INSTALL_TENSORFLOW_CUDA}",
            )
        ) from error
    is_tested = _require_tested(
        "TensorFlow", tensorflow.__version__, supported.TENSORFLOW, supported.INSTALL_TENSORFLOW
    )
    try:
        import keras
    except ImportError as error:
        if error.name in _BACKENDS:
            raise _other_backend(f"Keras cannot be imported with the backend that is set: {error}") from error
        raise MissingDependencyError(
            explain(
                "Keras is not installed, or cannot be loaded.",
                received=str(error),
                do=f"Install it: {supported.INSTALL_KERAS}",
            )
        ) from error
    is_tested &= _require_tested("Keras", keras.__version__, supported.KERAS, supported.INSTALL_KERAS)
    if keras.backend.backend() != "tensorflow":
        raise _other_backend(f"the Keras backend {keras.backend.backend()!r}")
    return is_tested


def _require_tested(name: str, version: str, tested: tuple[tuple[int, int], tuple[int, int]], install: str) -> bool:
    """Refuses older versions, which lack private names we hook; warns of newer ones, and returns False for them."""
    numbers = supported.numbers_of(version)
    if numbers < tested[0]:
        raise MissingDependencyError(
            explain(
                f"This {name} is too old.",
                received=f"{name} {version}",
                expected=f"{name} {supported.range_text(tested)}",
                do=f"Install another: {install}",
            )
        )
    if numbers >= tested[1]:
        warnings.warn(
            explain(
                f"This {name} is newer than any that tfdistkit was tested with.",
                received=f"{name} {version}",
                expected=f"{name} {supported.range_text(tested)}",
                do="What tfdistkit relies on in it is checked now; whether results are right is not. Compare a short "
                f"run with a run of one process, or install a tested version: {install}",
            ),
            RuntimeWarning,
            stacklevel=5,  # the user's call of `tfdistkit.strategy`
        )
    return numbers < tested[1]


def _other_backend(received: str) -> OptionError:
    return OptionError(
        explain(
            "Keras must run on TensorFlow.",
            received=received,
            expected="the Keras backend 'tensorflow'",
            do="Set KERAS_BACKEND=tensorflow in the environment, or remove it there and in ~/.keras/keras.json.",
        )
    )


def require_single_process(name: str, cluster: ClusterSpec) -> None:
    """Checks that this process trains alone.

    Args:
        name: The name of the strategy, which trains in one process.
        cluster: Which process this is.

    Raises:
        UnsupportedError: if this process is one of several workers, which would each train a model of their own.
    """
    if cluster.is_training and cluster.world_size > 1:
        raise UnsupportedError(
            explain(
                f"The strategy {name!r} trains in one process, but this is one of several: each would train alone.",
                received=f"worker {cluster.rank} of {cluster.world_size} in {cluster.source}",
                expected='the strategy "multiworker", or one process',
                do='Ask for tfdistkit.strategy("multiworker"), or start one process; where several shall train alone, '
                f"set {env.CLUSTER}=single.",
            )
        )
