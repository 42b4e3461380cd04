"""Keys of collectives: whose they are, so that those of several strategies in one process never meet.

TensorFlow knows a collective by the key of its group and that of the instance. All of its own strategies begin at the
same numbers: two in one process take each other's collectives for theirs ("Shape mismatch in the collective
instance").
"""

from __future__ import annotations

import itertools

# Group keys of strategies whose replicas live in one process. A strategy takes one for each group of devices;
# TensorFlow's own strategies begin at 0.
_BASES = itertools.count(1 << 16, 1 << 8)

# Group keys of strategies of several processes: the same number in each, however many strategies one of them made.
BASE_OF_PROCESSES = 1 << 30


def next_base() -> int:
    """Returns where the group keys of a new strategy of this process begin."""
    return next(_BASES)
