"""What the user wants of a Ray cluster, as plain data, and whether Ray is installed. Imports no Ray."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass

from tfdistkit import env
from tfdistkit.errors import MissingDependencyError, OptionError, explain
from tfdistkit.launcher.hosts import HostsSpec

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
    """

    ray_address: str = LOCAL
    cpus: float = 1.0
    gpus: float = 0.0

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


def chosen_address(option: str | None) -> str:
    """Returns the address of the cluster: the option, else RAY_ADDRESS, else `local`.

    Args:
        option: The value of `--ray-address`.
    """
    return option or env.text(_VARIABLE) or LOCAL


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
