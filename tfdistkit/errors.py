"""Every error that tfdistkit raises on purpose.

```
TfdistkitError
├── OptionError              (ValueError)    an invalid argument or flag
├── ClusterConfigError       (ValueError)    TF_CONFIG or a scheduler's variables are wrong
├── MissingDependencyError   (ImportError)   a package is not installed; names the command that installs it
├── TooLateError             (RuntimeError)  a strategy was requested after TensorFlow initialised its devices
├── UnsupportedError         (RuntimeError)  an unsupported combination, found before training starts
├── BuildFailedError         (RuntimeError)  a build failed on this machine; shows the first error
├── CheckpointError          (OSError)       a checkpoint is damaged or missing
├── DivergenceError          (RuntimeError)  replicas whose weights must be equal differ
├── RendezvousError          (TimeoutError)  the rendezvous did not complete before its timeout
└── WorkerFailedError        (RuntimeError)  a worker process of a job failed; carries the first failure
```

Each also derives from the built-in exception in parentheses, so `except ValueError` works as usual. Every message
states what must hold, what was received, and the fix: see `explain`.
"""

from __future__ import annotations


class TfdistkitError(Exception):
    """Base class of all exceptions of this package."""

    # Without this, AutoGraph replaces the error by its own `StagingError`.
    ag_pass_through = True


class OptionError(TfdistkitError, ValueError):
    """An argument or a flag is invalid."""


class ClusterConfigError(TfdistkitError, ValueError):
    """The description of the cluster (TF_CONFIG, a scheduler's variables) is wrong."""


class MissingDependencyError(TfdistkitError, ImportError):
    """A package that this call needs is not installed."""


class TooLateError(TfdistkitError, RuntimeError):
    """A strategy was requested after TensorFlow had initialised its devices."""


class UnsupportedError(TfdistkitError, RuntimeError):
    """A combination is unsupported; raised before training starts."""


class BuildFailedError(TfdistkitError, RuntimeError):
    """A download, a compilation or an installation failed on this machine."""


class CheckpointError(TfdistkitError, OSError):
    """A checkpoint is damaged or missing."""


class DivergenceError(TfdistkitError, RuntimeError):
    """Replicas whose weights must be equal differ."""


class RendezvousError(TfdistkitError, TimeoutError):
    """The rendezvous of the workers did not complete before its timeout."""


class WorkerFailedError(TfdistkitError, RuntimeError):
    """A worker process failed. `failure` is the first failure (`tfdistkit.report.Failure`)."""

    def __init__(self, message: str, failure: object | None = None):
        super().__init__(message)
        self.failure = failure


def explain(what: str, *, received: object = None, expected: str | None = None, do: str | None = None) -> str:
    """Formats an error message: what must hold, what was received, the fix.

    Args:
        what: What must hold, with the argument in backticks, ending in a full stop.
        received: The value, as the user would write it; left out when None.
        expected: A valid value, without a full stop at the end; left out when None.
        do: The fix, as an imperative sentence; left out when None.

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
    """Returns ` Did you mean 'x'?` for the closest match in `known`, or an empty string without one."""
    import difflib  # loaded only for an error

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
