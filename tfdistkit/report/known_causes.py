"""Lists known failures whose message does not name the cause, one row each."""

from __future__ import annotations

from tfdistkit.report.failures import Failure

_HOROVOD = (
    "The classes of Horovod for Keras cannot handle Keras 3 (horovod#4290).\n"
    "Remove hvd.DistributedOptimizer, hvd.DistributedGradientTape, hvd.broadcast_variables and hvd.callbacks:\n"
    'the strategy of tfdistkit.strategy("horovod") averages gradients and logs, and makes weights equal.'
)
# The exception, parts of its message or traceback, and the cause with the fix.
_CAUSES = (
    ("TypeError", ("'list' object is not callable", "/horovod/_keras/"), _HOROVOD),
    ("AttributeError", ("'Variable' object has no attribute 'ref'", "/horovod/"), _HOROVOD),
    ("AttributeError", ("module 'keras.backend' has no attribute", "/horovod/_keras/"), _HOROVOD),
    ("AttributeError", ("object has no attribute 'assign'", "/horovod/"), _HOROVOD),
    (
        "ValueError",
        # Keras 3 builds the model with the first batch, and a batch of such a strategy is not a tensor.
        ("Attempt to convert a value (PerReplica:", "tensorflow.python.distribute.values.PerReplica"),
        "Keras 3 cannot train in several processes under tf.distribute.MultiWorkerMirroredStrategy.\n"
        'Make the strategy by tfdistkit.strategy("multiworker"), and keep the rest of the script.',
    ),
)


def cause_of(failure: Failure) -> str:
    """Returns the known cause of a failure with the fix, or an empty string.

    Args:
        failure: The failure.
    """
    for error_type, parts, cause in _CAUSES:
        text = f"{failure.message}\n{failure.traceback}"
        if failure.error_type == error_type and all(part in text for part in parts):
            return cause
    return ""
