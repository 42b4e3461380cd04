"""Collectives for user code: all-reduce, gather, broadcast, barrier; the same calls over TensorFlow and Horovod.

```python
from tfdistkit import collectives

of_all_ranks = collectives.all_gather(embeddings)
```

They work in eager mode and in `tf.function`: inside of `strategy.run` (and so in a `train_step`) between the
replicas, and outside of it between the processes of the last strategy that `tfdistkit.strategy` made. With one
process they return their input. All ranks make the same calls in the same order.
"""

from tfdistkit.collectives.mismatches import check
from tfdistkit.collectives.objects import barrier, broadcast_object
from tfdistkit.collectives.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    grouped_all_reduce,
    reduce_scatter,
)
from tfdistkit.collectives.process_sets import ProcessSet

__all__ = [
    "ProcessSet",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "check",
    "grouped_all_reduce",
    "reduce_scatter",
]


def __dir__() -> list[str]:
    return sorted(__all__)
