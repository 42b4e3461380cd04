"""Every error that tfdistkit raises on purpose.

```
TfdistkitError
├── OptionError              (ValueError)    an argument or a flag that cannot be right
├── ClusterConfigError       (ValueError)    TF_CONFIG or a scheduler's variables are wrong
├── MissingDependencyError   (ImportError)   a package is not installed; names the command that installs it
├── TooLateError             (RuntimeError)  a strategy was asked for after TensorFlow took its devices
├── UnsupportedError         (RuntimeError)  a combination that cannot work, found before training starts
├── BuildFailedError         (RuntimeError)  something could not be built on this machine; shows the first error
├── CheckpointError          (OSError)       a checkpoint is damaged, or not there
├── DivergenceError          (RuntimeError)  replicas that have to hold the same weights do not
├── RendezvousError          (TimeoutError)  the workers did not find each other before the deadline
└── WorkerFailedError        (RuntimeError)  a worker process of a job failed; carries the first failure
```

Each is also the built-in that hands expect, so `except ValueError` goes on working. Every message
says what is wrong, what was received, what is expected, and the next step: see `explain`.
"""

from __future__ import annotations


class TfdistkitError(Exception):
    """The root of the tree: `except tfdistkit.errors.TfdistkitError` catches all of ours."""

    # AutoGraph raises a `StagingError` of its own in the place of errors that do not have this.
    ag_pass_through = True


class OptionError(TfdistkitError, ValueError):
    """An argument or a flag that cannot be right."""


class ClusterConfigError(TfdistkitError, ValueError):
    """The description of the cluster (TF_CONFIG, a scheduler's variables) is wrong."""


class MissingDependencyError(TfdistkitError, ImportError):
    """A package that this call needs is not installed."""


class TooLateError(TfdistkitError, RuntimeError):
    """A strategy was asked for after TensorFlow had already taken its devices."""


class UnsupportedError(TfdistkitError, RuntimeError):
    """A combination that cannot work, found before training starts."""


class BuildFailedError(TfdistkitError, RuntimeError):
    """Something could not be downloaded, compiled or installed on this machine."""


class CheckpointError(TfdistkitError, OSError):
    """A checkpoint is damaged, or not there."""


class DivergenceError(TfdistkitError, RuntimeError):
    """Replicas that have to hold the same weights do not."""


class RendezvousError(TfdistkitError, TimeoutError):
    """The workers did not find each other before the deadline."""


class WorkerFailedError(TfdistkitError, RuntimeError):
    """A worker process failed. `failure` describes the first one (`tfdistkit.report.Failure`)."""

    def __init__(self, message: str, failure: object | None = None):
        super().__init__(message)
        self.failure = failure


def explain(what: str, *, received: object = None, expected: str | None = None, do: str | None = None) -> str:
    """Puts an error message into the house's form.

    Args:
        what: What is wrong, with the argument in backticks, ending in a full stop.
        received: What was given, as the user would write it; left out when None.
        expected: What would have been right, without a full stop at the end.
        do: The next step, as an imperative sentence.

    Returns:
        `<what> Received: <received>. Expected: <expected>.` and, on a line of its own, `<do>`.
    """
    parts = [what]
    if received is not None:
        parts.append(f"Received: {received}.")
    if expected is not None:
        parts.append(f"Expected: {expected}.")
    message = " ".join(parts)
    return f"{message}\n{do}" if do else message


def nearest(word: str, known: list[str]) -> str:
    """Returns ` Did you mean 'x'?` for the closest of `known`, or an empty string when none is close."""
    import difflib  # only on the way to an error

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
