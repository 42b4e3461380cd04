"""Ports for the tasks of a SLURM step: all tasks compute the same ones, and steps on one host get different ones."""

from __future__ import annotations

from tfdistkit import env
from tfdistkit.errors import ClusterConfigError, explain

# Above what people start by hand, below what Linux hands to outgoing connections (32768 and up). The number is prime,
# so that every job and step reaches every port.
_LOWEST = 10_000
_STARTS = 21_739
# Chosen by search: the first ports of two steps lie 135 or more apart when their jobs' numbers differ by 16 at most and
# their own by 8 at most, or when they are of one job and differ by 100 at most. So steps that share a host at the
# same time stay apart up to 135 tasks per host; steps further away meet by chance only.
_PER_JOB = 15_342
_PER_STEP = 10_802


def first_port(job: int, step: int, most_on_a_host: int) -> int:
    """Returns the port of the first task on each host; the others there have the following ones.

    Args:
        job: The number of the SLURM job.
        step: The number of the step in it.
        most_on_a_host: How many tasks there are on the host that has most.

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
                f"`{env.PORT}` is no first port for {most_on_a_host} tasks on one host.",
                received=f"{env.PORT}={wanted}",
                expected=f"a number from 1 to {highest}",
            )
        )
    return wanted
