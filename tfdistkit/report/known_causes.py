"""Failures whose message is about something else than their cause, and the cause: one row each."""

from __future__ import annotations

from tfdistkit.report.failures import Failure

# The exception, what its message holds, and what it comes from.
_CAUSES = (
    (
        "ValueError",
        # Keras 3 builds the model with the first batch, and the batch of such a strategy is no tensor.
        ("Attempt to convert a value (PerReplica:", "tensorflow.python.distribute.values.PerReplica"),
        "Keras 3 cannot train in several processes under tf.distribute.MultiWorkerMirroredStrategy, whatever callbacks "
        'there are.\nMake the strategy by tfdistkit.strategy("multiworker"); the rest of the script can stay.',
    ),
)


def cause_of(failure: Failure) -> str:
    """Returns the cause of a failure and what to do, where the message does not tell; or an empty string.

    Args:
        failure: What happened.
    """
    for error_type, parts, cause in _CAUSES:
        if failure.error_type == error_type and all(part in failure.message for part in parts):
            return cause
    return ""
