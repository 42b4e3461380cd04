"""Check the Horovod of an environment, in a process of that environment: features, and whether it loads."""

from __future__ import annotations

from dataclasses import dataclass

from tfdistkit.errors import UnsupportedError
from tfdistkit.horovod_build.target import ask_python

INSTALL = "tfdistkit horovod install"

# Runs in the Python of the environment.
_QUESTION = """
import importlib.metadata, importlib.util, json, os, platform
facts = {"python": platform.python_version(), "horovod": "", "built_against": "", "tensorflow": "",
         "gloo": False, "mpi": False, "nccl": False, "problem": ""}
found = importlib.util.find_spec("horovod")
if found is not None:
    try:
        facts["horovod"] = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        facts["horovod"] = "of unknown version"
    for folder in found.submodule_search_locations or []:
        path = os.path.join(folder, "metadata.json")
        if os.path.exists(path):
            with open(path) as file:
                facts["built_against"] = json.load(file).get("tensorflow", "")
    try:
        import tensorflow as tf
        facts["tensorflow"] = tf.__version__
        import horovod.tensorflow as hvd
        facts["gloo"], facts["mpi"], facts["nccl"] = map(bool, (hvd.gloo_built(), hvd.mpi_built(), hvd.nccl_built()))
    except Exception as error:
        facts["problem"] = type(error).__name__ + ": " + str(error).strip()
"""


@dataclass(frozen=True)
class HorovodStatus:
    """The state of Horovod in one environment.

    Args:
        python: The version of Python.
        horovod: The version of Horovod; empty if it is not installed.
        built_against: The version of TensorFlow that Horovod was built against.
        tensorflow: The installed version of TensorFlow.
        gloo: Whether Horovod was built with Gloo.
        mpi: Whether Horovod was built with MPI.
        nccl: Whether Horovod was built with NCCL.
        problem: Why Horovod does not load; empty if it does.
    """

    python: str
    horovod: str
    built_against: str
    tensorflow: str
    gloo: bool
    mpi: bool
    nccl: bool
    problem: str

    @property
    def is_good(self) -> bool:
        """Whether it is installed and loads."""
        return bool(self.horovod) and not self.problem


def check_horovod(python: str) -> HorovodStatus:
    """Checks the Horovod of an environment.

    Args:
        python: The interpreter of the environment.

    Returns:
        Its status. A Horovod that crashes while it loads is reported as `problem`, not raised.

    Raises:
        UnsupportedError: if the interpreter cannot be run.
    """
    try:
        return HorovodStatus(**ask_python(python, _QUESTION))
    except UnsupportedError as error:
        # Raises if the interpreter itself does not work.
        version = ask_python(python, "import json, platform\nfacts = {'python': platform.python_version()}")["python"]
        return HorovodStatus(version, "that crashes", "", "", False, False, False, problem=str(error))


def status_text(status: HorovodStatus, python: str) -> str:
    """Describes a status in a few lines.

    Args:
        status: The status of Horovod.
        python: The interpreter of the environment.
    """
    if not status.horovod:
        return f"Horovod is not installed for {python} (Python {status.python}).\nBuild and install it: {INSTALL}"
    lines = [f"Horovod {status.horovod}, Python {status.python} ({python})"]
    built = status.built_against or "an unknown TensorFlow"
    installed = status.tensorflow or "none that loads"
    same = "the installed one" if built == status.tensorflow else f"installed is {installed}"
    lines.append(f"  built against  TensorFlow {built} ({same})")
    if status.problem:
        problem = status.problem.replace("\n", "\n    ")
        return "\n".join([*lines, f"  loads          no: {problem}", f"Build it again: {INSTALL}"])
    lines.append("  loads          yes")
    for name in ("gloo", "mpi", "nccl"):
        lines.append(f"  {name:<14} {'yes' if getattr(status, name) else 'no'}")
    return "\n".join(lines)
