"""Reads Grid Engine's host list, the file that PE_HOSTFILE names.

Grid Engine (SGE, UGE, OCS) starts a parallel job as one process on the first host, and lists the hosts in a file, one
line each: host, slots, queue, processors (sge_pe(5)). These hosts are not a cluster until a launcher starts workers.
"""

from __future__ import annotations

import re
from pathlib import Path

from tfdistkit import env
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import ClusterConfigError, explain

VARIABLE = "PE_HOSTFILE"
_SLOTS = re.compile(r"[1-9][0-9]{0,8}")


def read_pe_hostfile() -> tuple[HostSlots, ...] | None:
    """Reads the hosts of a parallel job of Grid Engine.

    Returns:
        The hosts in the order of the file, each once: a host in several queues has a line for each, and its slots are
        added up. None outside of such a job.

    Raises:
        ClusterConfigError: if the file cannot be read or is invalid.
    """
    path = env.text(VARIABLE)
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ClusterConfigError(
            explain(
                f"`{VARIABLE}` must name a readable file ({error}).",
                received=f"{VARIABLE}={path}",
                expected="the host list of a parallel job of Grid Engine",
                do=f"Run this in the job script itself, as only the first host of the job has the file, "
                f"or unset {VARIABLE}.",
            )
        ) from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        if len(words) < 2 or not _SLOTS.fullmatch(words[1]):
            raise _error(path, f"line {number}: {line[:200]!r}")
        slots[words[0]] = slots.get(words[0], 0) + int(words[1])
    if not slots:
        raise _error(path, "no lines")
    return tuple(HostSlots(host, count) for host, count in slots.items())


def _error(path: str, received: str) -> ClusterConfigError:
    return ClusterConfigError(
        explain(
            f"`{VARIABLE}` must name a host list of Grid Engine.",
            received=f"{received} in {path}",
            expected="lines that begin with a host and its number of slots, such as 'node1 4 all.q@node1 UNDEFINED'",
        )
    )
