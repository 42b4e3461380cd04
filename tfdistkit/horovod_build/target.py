"""The Python environment that Horovod is built for, queried in a separate process because it loads TensorFlow."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, fields
from typing import Any

from tfdistkit import env
from tfdistkit.errors import MissingDependencyError, UnsupportedError, explain
from tfdistkit.report.failures import signal_name
from tfdistkit.supported import INSTALL_TENSORFLOW

# Loading TensorFlow takes seconds, from a slow disk a minute.
_DEADLINE_S = 300.0
_MARK = "tfdistkit-answer:"

# Runs in the target's Python, which may be of any version: no annotations or new syntax.
_QUESTION = """
import importlib.metadata, importlib.util, json, os, platform, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
facts = {
    "executable": sys.executable,
    "version": platform.python_version(),
    "tag": "cp{}{}{}".format(*sys.version_info[:2], getattr(sys, "abiflags", "")),
    "platform": sysconfig.get_platform().replace("-", "_").replace(".", "_"),
    "libc": "-".join(platform.libc_ver()),
    "scripts": os.path.dirname(sys.executable),
    "has_pip": importlib.util.find_spec("pip") is not None,
    "packages": [name for name in {packages} if version(name)],
    "tensorflow": "", "compile_flags": [], "include": "", "problem": "",
}
try:
    import tensorflow as tf
    facts["tensorflow"] = tf.__version__
    facts["include"] = tf.sysconfig.get_include()
    facts["compile_flags"] = [flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith("-I")]
except Exception as error:
    facts["problem"] = type(error).__name__ + ": " + str(error)
"""


@dataclass(frozen=True)
class Target:
    """A Python environment.

    Args:
        executable: Its interpreter.
        version: The version of Python, such as `3.11.7`.
        tag: The tag of its ABI, such as `cp311`.
        platform: The platform, such as `linux_x86_64`.
        libc: The C library, such as `glibc-2.36`.
        scripts: The folder of its commands.
        has_pip: Whether it has pip.
        packages: The installed ones of the queried packages.
        tensorflow: The version of TensorFlow.
        compile_flags: The compile flags of TensorFlow that determine its ABI.
        include: The folder of TensorFlow's headers.
    """

    executable: str
    version: str
    tag: str
    platform: str
    libc: str
    scripts: str
    has_pip: bool
    packages: tuple[str, ...]
    tensorflow: str
    compile_flags: tuple[str, ...]
    include: str


def ask_target(python: str, packages: tuple[str, ...]) -> Target:
    """Queries a Python environment and its TensorFlow.

    Args:
        python: The interpreter.
        packages: The packages to search for.

    Returns:
        The environment.

    Raises:
        UnsupportedError: if the interpreter cannot be run.
        MissingDependencyError: if TensorFlow cannot be loaded in it.
    """
    facts = ask_python(python, _QUESTION.replace("{packages}", repr(packages)))
    problem = facts.pop("problem")
    if problem:
        raise MissingDependencyError(
            explain(
                "TensorFlow must be installed to build Horovod, but it cannot be loaded.",
                received=f"{problem} (in {python})",
                do=f"Install it first: {python} -m {INSTALL_TENSORFLOW}\nOr name another environment: --python PATH.",
            )
        )
    facts["compile_flags"], facts["packages"] = tuple(facts["compile_flags"]), tuple(facts["packages"])
    return Target(**{field.name: facts[field.name] for field in fields(Target)})


def ask_python(python: str, code: str) -> dict[str, Any]:
    """Runs code in another Python, and returns its variable `facts`.

    Args:
        python: The interpreter.
        code: The code, which assigns a dictionary to `facts`.

    Returns:
        The dictionary.

    Raises:
        UnsupportedError: if the process prints no answer.
    """
    said, code_text = "", f"{code}\nprint()\nprint({_MARK!r} + json.dumps(facts))\n"
    try:
        ended = subprocess.run(
            # Not `-I`: the environment may depend on PYTHONPATH.
            [python, "-c", code_text],
            env=env.child_env({"TF_CPP_MIN_LOG_LEVEL": "3", env.TF_CONFIG: None}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
        )
    except OSError as error:
        reason = str(error)
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_DEADLINE_S:g} s"
    else:
        for line in ended.stdout.splitlines():
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line[len(_MARK) :])
                return answer
        killed = f"killed by {signal_name(-ended.returncode)}" if ended.returncode < 0 else ""
        reason = killed or f"exit code {ended.returncode}"
        said = "\n".join(ended.stderr.strip().splitlines()[-5:])
    raise UnsupportedError(explain(f"{python} did not answer.", received=reason, do=said or None))
