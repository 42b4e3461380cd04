"""Limit the number of processes on this machine: a typing error must not start thousands."""

from __future__ import annotations

import resource

from tfdistkit.errors import OptionError, explain

# Far above real use: even tests start only a dozen workers per core.
_MOST_PER_CORE = 256
# Descriptors per process (two pipes and a pidfd), and of the launcher itself.
_DESCRIPTORS, _OWN_DESCRIPTORS = 3, 64


def require_room(size: int, cores: int) -> None:
    """Checks that this machine can run the processes, and raises the descriptor limit of this process for them.

    Args:
        size: The number of processes.
        cores: The number of processor cores that they share.

    Raises:
        OptionError: if there are too many processes, or too few descriptors.
    """
    if size > _MOST_PER_CORE * cores:
        raise OptionError(
            explain(
                f"The number of processes must be at most {_MOST_PER_CORE * cores} on this machine.",
                received=f"{size} processes on {cores} {'core' if cores == 1 else 'cores'}",
                do="Start fewer (-np), or name hosts for them (-H).",
            )
        )
    wanted = _DESCRIPTORS * size + _OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OptionError(
            explain(
                f"The limit of open files (`ulimit -n`) must be at least {wanted} for {size} processes.",
                received=f"a hard limit of {hard} files",
                do="Raise it in the system's configuration (/etc/security/limits.conf, or LimitNOFILE of a service), "
                "or start fewer processes.",
            )
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
