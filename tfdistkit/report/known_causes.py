"""Lists known failures whose message does not name the cause, one row each."""

from __future__ import annotations

from tfdistkit.report.failures import Failure

# The exception, parts of its message, and the cause with the fix.
_CAUSES = (
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
        if failure.error_type == error_type and all(part in failure.message for part in parts):
            return cause
    return ""
