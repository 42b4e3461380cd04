"""Backends by name: all that is known of one stands in ONE row. Others register theirs by an entry point.

A package adds a backend with `[options.entry_points]`, `tfdistkit.backends = <name> = <module>:<BackendRow>`; see
docs/extending.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdistkit.entry_points import entry_points, load
from tfdistkit.errors import OptionError, explain, nearest
from tfdistkit.launcher import rank_variables

if TYPE_CHECKING:
    from tfdistkit.cluster.spec import ClusterSpec
    from tfdistkit.launcher.backend import Backend

ENTRY_POINT_GROUP = "tfdistkit.backends"


@dataclass(frozen=True)
class BackendRow:
    """One backend.

    Args:
        launcher: `module:class` of the class that starts processes on this machine (see `backend.Backend`), made with
            the job's mark, the number of processes and, if it has `mpi_args`, those; empty if it only starts them
            elsewhere.
        variables: Takes the cluster as one process sees it, and returns the variables that tell that process its rank.
        on_hosts: `module:class` of the class that starts processes on other hosts, made with the JobSpec and a
            function that tells whether to stop connecting; it also has `places`, `table` and `python`, see
            `preparing`. None for a backend of one machine.
        has_roles: Whether processes can have roles (chief, worker, ps).
        takes_mpi_args: Whether `--mpi-args` are for it.
        needs_horovod: Whether its workers need Horovod.
        submit: `module:function` for a scheduler that starts the processes itself, later and elsewhere, and tells each
            its rank. `tfdistkit run` calls it with the JobSpec, the options of the command line and the list of
            received signals, and exits with what it returns; nothing else can start such a job. None for other
            backends.
        options: A module with `add_to(parser)`, which adds options to those of `tfdistkit run`, and `read(found,
            error)`, which returns what they say, or calls `error` with a message. A backend of another package gets it
            as the keyword argument `options`, unless it is None. None for a backend without options.
        watches_hosts: Whether the launcher sees the progress of workers on other hosts (`report.hangs.mirror`).
        is_elastic: Whether the number of its workers may change (`-np MIN:MAX`).
        capacity: `module:function` that makes what tells the room of a cluster for an elastic job, as
            `supervise.elastic.discovery.Discovery` does, of the JobSpec and a function that shows a message; the
            function returns None for a cluster without one. The class of `on_hosts` then has `nodes`, too: the name of
            the node of each process. None for a backend whose user names the hosts.
        suffix: What `tfdistkit: starting 2 workers` adds, such as ` by mpirun`.
        default_variables: Takes the network interface of a process, and returns variables for it that the user's win
            over.
    """

    launcher: str
    variables: Callable[[ClusterSpec], dict[str, str]]
    on_hosts: str | None = None
    has_roles: bool = False
    takes_mpi_args: bool = False
    needs_horovod: bool = False
    submit: str | None = None
    options: str | None = None
    watches_hosts: bool = False
    is_elastic: bool = False
    capacity: str | None = None
    suffix: str = ""
    default_variables: Callable[[str], dict[str, str]] = rank_variables.nccl_interface

    @property
    def is_submitted(self) -> bool:
        """Whether a scheduler starts the processes, later and elsewhere."""
        return self.submit is not None

    def require_start(self, name: str, *, has_hosts: bool) -> None:
        """Checks that the processes of a job can be started where it wants them.

        Args:
            name: The name of the backend.
            has_hosts: Whether the job has hosts, or a cluster.

        Raises:
            OptionError: if the backend starts no processes on this machine without `tfdistkit run`.
        """
        if not self.launcher and not self.is_submitted and not has_hosts:
            raise OptionError(
                explain(
                    f"`backend` must start processes on this machine: only `tfdistkit run` knows {name} clusters.",
                    received=f"backend={name!r}",
                    do=f"Start the script with `tfdistkit run --backend {name}`, or use another backend.",
                )
            )

    def load(self, where: str | None = None) -> Any:
        """Imports what a field names.

        Args:
            where: The value of `launcher`, `on_hosts`, `submit` or `capacity`. Default: that of `launcher`.
        """
        module, _, name = (where or self.launcher).partition(":")
        return getattr(importlib.import_module(module), name)


def _submitted(cluster: ClusterSpec) -> dict[str, str]:
    raise OptionError(
        explain(
            "`backend` must start processes here: only `tfdistkit run` submits jobs to SLURM.",
            received="backend='slurm'",
            do="Start the script with `tfdistkit run --backend slurm`, or use another backend.",
        )
    )


_BUILT_IN: Mapping[str, BackendRow] = {
    "local": BackendRow(
        launcher="tfdistkit.launcher.local.backend:Launcher",
        variables=rank_variables.tf_config,
        on_hosts="tfdistkit.launcher.ssh.backend:Launcher",
        has_roles=True,
        watches_hosts=True,
        is_elastic=True,
    ),
    "horovod": BackendRow(
        launcher="tfdistkit.launcher.local.horovod:Launcher",
        variables=rank_variables.gloo,
        on_hosts="tfdistkit.launcher.ssh.backend:Launcher",
        needs_horovod=True,
        watches_hosts=True,
        is_elastic=True,
        suffix=" for Horovod",
        default_variables=rank_variables.gloo_interface,
    ),
    "mpi": BackendRow(
        launcher="tfdistkit.launcher.mpi.backend:Launcher",
        variables=rank_variables.mpi,
        on_hosts="tfdistkit.launcher.mpi.hosts:Launcher",
        has_roles=True,
        takes_mpi_args=True,
        suffix=" by mpirun",
    ),
    "ray": BackendRow(
        launcher="",
        variables=rank_variables.tf_config,
        on_hosts="tfdistkit.launcher.ray.backend:Launcher",
        has_roles=True,
        options="tfdistkit.cli.run.ray_options",
        watches_hosts=True,
        is_elastic=True,
        capacity="tfdistkit.launcher.ray.capacity:capacity_of",
        suffix=" as Ray actors",
    ),
    "slurm": BackendRow(
        launcher="",
        variables=_submitted,
        has_roles=True,
        submit="tfdistkit.cli.run.slurm:run_in_slurm",
        options="tfdistkit.cli.run.slurm_options",
    ),
}


def names() -> list[str]:
    """Returns the names of all backends, tfdistkit's own first. Loads none of them."""
    return list(dict.fromkeys([*_BUILT_IN, *(entry.name for entry in entry_points(ENTRY_POINT_GROUP))]))


def row_of(name: str) -> BackendRow:
    """Returns the row of a backend.

    Args:
        name: One of `names()`.

    Raises:
        OptionError: (a ValueError) if there is no such backend, or its entry point is no `BackendRow`.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    for entry in entry_points(ENTRY_POINT_GROUP):
        if entry.name == name:
            return load(entry, BackendRow, OptionError)
    what = f"`backend` must be one of: {', '.join(names())}.{nearest(str(name), names())}"
    raise OptionError(explain(what, received=f"backend={name!r}"))


def names_with(attribute: str) -> list[str]:
    """Returns the names of tfdistkit's backends for this machine whose row has something, such as `has_roles`."""
    return [name for name, row in _BUILT_IN.items() if getattr(row, attribute) and row.launcher]


def own_options(name: str) -> list[Any]:
    """Returns the modules that define options of `tfdistkit run`: those of tfdistkit's backends, and of another one.

    Args:
        name: The backend of the command line. Others of other packages are not loaded.
    """
    rows = [*_BUILT_IN.values(), *([row_of(name)] if name in names() and name not in _BUILT_IN else [])]
    return [importlib.import_module(row.options) for row in rows if row.options is not None]


def load_backend(name: str, job_id: str, size: int, mpi_args: tuple[str, ...] = (), options: Any = None) -> Backend:
    """Makes what starts a job's processes on this machine.

    Args:
        name: One of `names()`.
        job_id: The job's mark.
        size: How many processes the job has.
        mpi_args: More options for mpirun, for the backend that takes them.
        options: What the backend's own options say (`BackendRow.options`); None for nothing.

    Raises:
        TfdistkitError: if this machine lacks what the backend needs.
    """
    more = (mpi_args,) if mpi_args else ()
    named = {} if options is None else {"options": options}
    backend: Backend = row_of(name).load()(job_id, size, *more, **named)
    return backend
