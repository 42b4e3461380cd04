"""What the user wants of a Ray cluster, as plain data, and whether Ray is installed. Imports no Ray."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfdistkit import env
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import MissingDependencyError, OptionError, explain
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.planning import available_cores

# Starts a cluster on this machine; the other word, `auto`, finds one that runs here. Both are Ray's.
LOCAL = "local"
_WORDS = (LOCAL, "auto")
_ADDRESS = re.compile(r"(ray://)?([^\s/:\[\]]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", re.ASCII)
_VARIABLE = "RAY_ADDRESS"

INSTALL = "pip install 'ray>=2.60,<3'"


@dataclass(frozen=True)
class RaySpec(HostsSpec):
    """A Ray cluster, and what each worker reserves of it; Ray chooses the nodes, so `slots` is empty.

    Args:
        ray_address: `HOST:PORT`, `ray://HOST:PORT`, `auto` or `local`, as `ray.init(address=...)` takes it.
        cpus: The CPUs that Ray reserves for each process; they also are its threads.
        gpus: The GPUs that Ray reserves for each worker, at most 1: a worker trains on one.
        nodes: The nodes that Ray may choose from (`driver.name_of`); None for all.
    """

    ray_address: str = LOCAL
    cpus: float = 1.0
    gpus: float = 0.0
    nodes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray_address not in _WORDS and not _ADDRESS.fullmatch(self.ray_address):
            raise OptionError(
                explain(
                    f"`--ray-address` (or {_VARIABLE}) must be the address of a Ray cluster.",
                    received=self.ray_address,
                    expected="HOST:PORT, ray://HOST:PORT, auto (a cluster that runs here) or local (start one here)",
                )
            )
        _require_amount("--cpus-per-worker", self.cpus, least=0.001)
        _require_amount("--gpus-per-worker", self.gpus, least=0.0)
        if self.gpus > 1:
            do = "Start one worker for each GPU: -np N --gpus-per-worker 1."
            what = "`--gpus-per-worker` must be at most 1, as each worker trains on one GPU."
            raise OptionError(explain(what, received=f"--gpus-per-worker {self.gpus:g}", do=do))

    @property
    def threads(self) -> int:
        """How many threads a worker has for its CPUs."""
        return max(1, int(self.cpus))

    @property
    def where(self) -> str:
        if self.ray_address == LOCAL:
            return "a Ray cluster on this machine"
        return f"the Ray cluster {self.ray_address}"

    @property
    def fixed_slots(self) -> tuple[HostSlots, ...]:
        return (HostSlots("localhost", int(available_cores() / self.cpus + 1e-4)),)

    @property
    def how_to_add_slots(self) -> str:
        return "Let each worker reserve less (--cpus-per-worker 0.5), or use a larger cluster: --ray-address."

    def limited_to(self, slots: Sequence[HostSlots], workers: int) -> RaySpec:
        is_own = self.ray_address == LOCAL
        return self if is_own else replace(self, nodes=tuple(one.host for one in slots))


def chosen_address(option: str | None) -> str:
    """Returns the address of the cluster: the option, else RAY_ADDRESS, else `local`.

    Args:
        option: The value of `--ray-address`.
    """
    return option or env.text(_VARIABLE) or LOCAL


def bundle_of(cluster: RaySpec, role: str) -> dict[str, float]:
    """Returns what Ray reserves for one process: GPUs are for workers.

    Args:
        cluster: The cluster.
        role: The role of the process.
    """
    gpus = {"GPU": cluster.gpus} if cluster.gpus and role == "worker" else {}
    return {"CPU": cluster.cpus, **gpus}


def group_of(job_id: str) -> str:
    """Returns the beginning of the names of a job's placement groups, one for each attempt.

    Args:
        job_id: The job's mark.
    """
    return f"tfdistkit-{job_id}-"


def require_ray() -> None:
    """Checks that Ray is installed, without importing it.

    Raises:
        MissingDependencyError: if it is not.
    """
    if importlib.util.find_spec("ray") is None:
        what = "`--backend ray` needs the package `ray`, which is not installed."
        raise MissingDependencyError(explain(what, do=f"Install it: {INSTALL}"))


def _require_amount(option: str, value: float, least: float) -> None:
    """Raises an error for an amount that Ray does not take: it counts whole units, or parts of one unit."""
    if math.isfinite(value) and value >= least and (value < 1 or value == int(value)):
        return
    do = "a whole number, or a part of one such as 0.5"
    raise OptionError(explain(f"`{option}` must be {do}.", received=f"{option} {value:g}"))
