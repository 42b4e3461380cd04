"""How many processes this machine can take: a typing error must not start thousands."""

from __future__ import annotations

import resource

from tfdistkit.errors import OptionError, explain

# Tests start a dozen workers on a core, and nobody hundreds.
_MOST_PER_CORE = 256
# For each process two pipes and what tells of its end; and what the launcher itself has open.
_DESCRIPTORS, _OWN_DESCRIPTORS = 3, 64


def require_room(size: int, cores: int) -> None:
    """Checks that this machine can take so many processes, and lets this one open enough descriptors for them.

    Args:
        size: How many processes.
        cores: How many processor cores they share.

    Raises:
        OptionError: if there are far too many of them, or too few descriptors.
    """
    if size > _MOST_PER_CORE * cores:
        raise OptionError(
            explain(
                "So many processes cannot work on this machine.",
                received=f"{size} processes on {cores} {'core' if cores == 1 else 'cores'}",
                expected=f"at most {_MOST_PER_CORE * cores}",
                do="Say fewer (-np), or name hosts for them (-H).",
            )
        )
    wanted = _DESCRIPTORS * size + _OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OptionError(
            explain(
                "The launcher may not open enough files for so many processes (`ulimit -n`).",
                received=f"{size} processes, and a limit of {hard} files",
                expected=f"a limit of {wanted} or more",
                do="Raise it where the system sets it (/etc/security/limits.conf, or LimitNOFILE of a service), or "
                "start fewer processes.",
            )
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
