"""TF_CONFIG, with the local rank that `tfdistkit run` sets beside it."""

from __future__ import annotations

from dataclasses import replace

from tfdistkit import env
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.cluster.tf_config import from_tf_config
from tfdistkit.errors import ClusterConfigError, explain

VARIABLES = (env.TF_CONFIG, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE)


def read_tf_config() -> ClusterSpec | None:
    """Reads the cluster from TF_CONFIG.

    Returns:
        The cluster; None if TF_CONFIG is not set.

    Raises:
        ClusterConfigError: if a variable is invalid.
    """
    text = env.text(env.TF_CONFIG)
    return None if text is None else _with_local_rank(from_tf_config(text))


def _with_local_rank(spec: ClusterSpec) -> ClusterSpec:
    """Overrides the local rank that the address list implies with the launcher's variables."""
    local_rank = env.integer(env.LOCAL_RANK)
    size = env.integer(env.LOCAL_WORLD_SIZE)
    if local_rank is None and size is None or spec.is_coordinator or not spec.is_training:
        return spec
    received = f"{env.LOCAL_RANK}={local_rank}, {env.LOCAL_WORLD_SIZE}={size}, world size {spec.world_size}"
    if local_rank is None or size is None:
        what = f"`{env.LOCAL_RANK}` and `{env.LOCAL_WORLD_SIZE}` must be set together."
        raise ClusterConfigError(explain(what, received=received, expected="both of them, or neither"))
    if not 1 <= size <= spec.world_size:
        what = f"`{env.LOCAL_WORLD_SIZE}` must be from 1 to the world size in {spec.source}."
        raise ClusterConfigError(explain(what, received=received, expected=f"1 to {spec.world_size}"))
    if not 0 <= local_rank < size:
        what = f"`{env.LOCAL_RANK}` must be at least 0 and below `{env.LOCAL_WORLD_SIZE}`."
        raise ClusterConfigError(explain(what, received=received, expected=f"0 to {size - 1}"))
    return replace(spec, local_rank=local_rank, local_world_size=size)
