"""What the user allows an elastic job: the fewest and the most workers, and how its hosts and their end are found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.registry import names_with, row_of
from tfdistkit.validation import require_positive

COOL_DOWN_S = 60.0
WAIT_S = 600.0


@dataclass(frozen=True)
class ElasticSpec:
    """The bounds of an elastic job.

    Args:
        least: The fewest workers.
        most: The most workers.
        discovery: A script that prints the hosts (`host:slots`); None for a fixed list, or this machine.
        remote: How to reach the hosts that the script prints, without hosts; None without a script.
        cool_down_s: The shortest time between the start of the workers and a growth, in seconds.
        wait_s: How long to wait while there is room for fewer than `least` workers, in seconds.
    """

    least: int
    most: int
    discovery: str | None = None
    remote: HostsSpec | None = None
    cool_down_s: float = COOL_DOWN_S
    wait_s: float = WAIT_S

    def __post_init__(self) -> None:
        if self.least < 1:
            raise OptionError(explain("MIN of `-np MIN:MAX` must be >= 1.", received=f"-np {self}"))
        if self.least > self.most:
            raise OptionError(explain("MIN of `-np MIN:MAX` must be at most MAX.", received=f"-np {self}"))
        require_positive("--cool-down", self.cool_down_s, "seconds")
        require_positive("--wait", self.wait_s, "seconds")

    def __str__(self) -> str:
        """Returns `MIN:MAX`."""
        return f"{self.least}:{self.most}"


@dataclass(frozen=True)
class PreemptionSpec:
    """How the end of hosts, or of the whole job, is announced.

    Args:
        file: A file that appears.
        command: A command line of the shell that ends with 0.
    """

    file: Path | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        if self.file is None:
            return
        what = "`--preemption-file` must be a file that does not exist yet, in a folder that does."
        if self.file.is_dir():
            raise OptionError(explain(what, received=f"{self.file}, which is a folder"))
        if self.file.exists():
            raise OptionError(explain(what, received=f"{self.file}, which exists", do="Remove it before the start."))
        if not self.file.parent.is_dir():
            raise OptionError(explain(what, received=f"{self.file}, whose folder does not exist"))


def check_elastic(elastic: ElasticSpec, backend: str, ps: int) -> None:
    """Checks that the number of workers of a job can change.

    Args:
        elastic: The bounds.
        backend: The name of the backend.
        ps: The number of parameter servers.

    Raises:
        OptionError: if the backend cannot change the number of its workers.
        UnsupportedError: with parameter servers.
    """
    if ps:
        raise UnsupportedError(
            explain(
                "`-np MIN:MAX` must be used without `--ps`: TensorFlow's coordinator knows a fixed list of workers.",
                received=f"-np {elastic} --ps {ps}",
                do=f"Use -np {elastic.most} --max-restarts N: a lost worker restarts alone, and without restarts left "
                "the job continues without it.",
            )
        )
    if not row_of(backend).is_elastic:
        raise OptionError(
            explain(
                f"`-np` must be one number with the backend {backend!r}, which starts a fixed number of workers.",
                received=f"-np {elastic}",
                do=f"Use -np {elastic.most}, or one of the backends: {', '.join(names_with('is_elastic'))}.",
            )
        )
