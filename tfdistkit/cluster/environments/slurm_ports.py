"""Computes the ports of the tasks of a SLURM step: equal in all tasks, and distinct for steps on one host."""

from __future__ import annotations

from tfdistkit import env
from tfdistkit.errors import ClusterConfigError, explain

# Above the ports of servers that users start by hand, below the ephemeral ports of Linux (32768 and up). The number of
# first ports is prime, so that all of them are used.
_LOWEST = 10_000
_STARTS = 21_739
# Chosen by search: the first ports of two steps are at least 135 apart if their job ids differ by at most 16 and their
# step ids by at most 8, or if they are of one job and their step ids differ by at most 100. So steps that share a host
# at the same time use distinct ports up to 135 tasks per host; other steps collide by chance only.
_PER_JOB = 15_342
_PER_STEP = 10_802


def first_port(job: int, step: int, most_on_a_host: int) -> int:
    """Returns the port of the first task on each host; further tasks there use the following ports.

    Args:
        job: The id of the SLURM job.
        step: The id of the step in it.
        most_on_a_host: The largest number of tasks on a host.

    Raises:
        ClusterConfigError: if `TFDISTKIT_PORT` is set and leaves too few ports.
    """
    wanted = env.integer(env.PORT)
    if wanted is None:
        return _LOWEST + (job * _PER_JOB + step * _PER_STEP) % _STARTS
    highest = 65_535 - (most_on_a_host - 1)
    if not 1 <= wanted <= highest:
        raise ClusterConfigError(
            explain(
                f"`{env.PORT}` must be from 1 to {highest}, for {most_on_a_host} tasks on one host.",
                received=f"{env.PORT}={wanted}",
            )
        )
    return wanted
