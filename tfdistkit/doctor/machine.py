"""Checks versions, devices, network and programs of this machine; loads TensorFlow in a separate process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tfdistkit import __version__, env, supported
from tfdistkit.cluster.ports import free_ports
from tfdistkit.doctor.exposure import check_exposure
from tfdistkit.doctor.findings import Finding, Level
from tfdistkit.errors import ClusterConfigError, UnsupportedError
from tfdistkit.horovod_build.checking import INSTALL, check_horovod
from tfdistkit.launcher.planning import available_cores
from tfdistkit.launcher.ssh.agent.host_info import list_interfaces

# Timeout in seconds to load TensorFlow; it takes long on a busy machine.
_LOAD_S = 120.0
# Free ports for a few jobs.
_WANTED_PORTS = 32

# Runs in a separate process.
_ASK_TENSORFLOW = """
import json, os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
from importlib import metadata
found = {"nccl": None, "horovod": None}
for package in metadata.distributions():
    name = (package.metadata["Name"] or "").lower()
    if name.startswith("nvidia-nccl"):
        found["nccl"] = package.version
    if name == "horovod":
        found["horovod"] = package.version
try:
    import tensorflow as tf
    found["tensorflow"] = tf.__version__
    build = tf.sysconfig.get_build_info()
    found["cuda"] = build.get("cuda_version") if build.get("is_cuda_build") else None
    found["cudnn"] = build.get("cudnn_version")
    found["gpus"] = [tf.config.experimental.get_device_details(one).get("device_name", one.name)
                     for one in tf.config.list_physical_devices("GPU")]
except Exception as error:
    found["problem"] = type(error).__name__ + ": " + str(error)
try:
    import keras
    found["keras"], found["backend"] = keras.__version__, keras.backend.backend()
except Exception as error:
    found["keras_problem"] = type(error).__name__ + ": " + str(error)
    if getattr(error, "name", None) in ("jax", "torch", "openvino"):
        found["backend"] = error.name
print("\\n" + json.dumps(found))
"""


def check_versions() -> tuple[list[Finding], Mapping[str, Any]]:
    """Checks Python, TensorFlow, Keras, CUDA and Horovod; returns findings and plain facts."""
    facts = _ask_tensorflow()
    python = ".".join(map(str, sys.version_info[:3]))
    findings = [
        _version(
            "Python",
            python,
            supported.PYTHON,
            "Create an environment with a supported Python: python3.12 -m venv .venv",
        ),
        Finding("versions", "tfdistkit", Level.GOOD, __version__),
    ]
    if "problem" in facts:
        do = f"Install it: {supported.INSTALL_TENSORFLOW}, or with CUDA: {supported.INSTALL_TENSORFLOW_CUDA}"
        findings.append(Finding("versions", "TensorFlow", Level.PROBLEM, f"cannot be loaded: {facts['problem']}", do))
    else:
        do = supported.INSTALL_TENSORFLOW
        findings.append(_version("TensorFlow", facts["tensorflow"], supported.TENSORFLOW, do))
        findings.append(_keras_finding(facts))
        findings += _gpu_findings(facts)
    findings.append(_horovod_finding(facts))
    return findings, facts


def check_network() -> list[Finding]:
    """Checks interfaces, ports, the host name, the exposure of ports, and proxies."""
    findings = []
    interfaces = list_interfaces()
    text = ", ".join(f"{name} {address}" for name, address in interfaces.items()) or "none"
    findings.append(Finding("network", "interfaces", Level.GOOD if interfaces else Level.PROBLEM, text))
    try:
        ports = free_ports(_WANTED_PORTS)
        text = f"{_WANTED_PORTS} free ports found, such as {ports[0]}"
        findings.append(Finding("network", "ports", Level.GOOD, text))
    except ClusterConfigError as error:
        do = "End the processes that hold them: ss -ltnp"
        findings.append(Finding("network", "ports", Level.PROBLEM, str(error), do))
    findings.append(_own_name(interfaces))
    findings.append(check_exposure(interfaces))
    proxies = [name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if env.text(name)]
    if proxies and not (env.text("no_proxy") or env.text("NO_PROXY")):
        text = f"{', '.join(proxies)} set without no_proxy: gRPC of TensorFlow connects to hosts through the proxy"
        do = "export no_proxy=127.0.0.1,localhost,<the hosts of your jobs>"
        findings.append(Finding("network", "proxy", Level.WARNING, text, do))
    return findings


def check_programs() -> list[Finding]:
    """Checks for the programs that start processes on other hosts."""
    programs = (
        ("ssh", "not installed; tfdistkit run -H requires it", "apt-get install openssh-client"),
        (
            "mpirun",
            "not installed; tfdistkit run --backend mpi requires it",
            "apt-get install openmpi-bin libopenmpi-dev",
        ),
        ("srun", "not installed: this is not a SLURM cluster", ""),
    )
    findings = []
    for name, missing, do in programs:
        path = shutil.which(name)
        if path is not None:
            findings.append(Finding("programs", name, Level.GOOD, path))
        else:
            findings.append(Finding("programs", name, Level.NOTE, missing, do))
    return findings


def _ask_tensorflow() -> Mapping[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TENSORFLOW],
            env=env.child_env({env.TF_CONFIG: None}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOAD_S,
        )
        facts: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"problem": f"it did not load within {_LOAD_S:g} s", "horovod": None}
    except (ValueError, IndexError):
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"problem": f"exit code {done.returncode} {' '.join(said)}".strip(), "horovod": None}
    return facts


def _keras_finding(facts: Mapping[str, Any]) -> Finding:
    backend, problem = facts.get("backend", "tensorflow"), facts.get("keras_problem")
    if backend != "tensorflow":
        do = "Set KERAS_BACKEND=tensorflow in the environment, or remove it there and in ~/.keras/keras.json."
        text = f"must run on TensorFlow, but its backend is {backend!r}"
        return Finding("versions", "Keras", Level.PROBLEM, text + (f": {problem}" if problem else ""), do)
    if problem:
        do = f"Install it: {supported.INSTALL_KERAS}"
        return Finding("versions", "Keras", Level.PROBLEM, f"cannot be loaded: {problem}", do)
    return _version("Keras", facts["keras"], supported.KERAS, supported.INSTALL_KERAS)


def _version(name: str, version: str, wanted: tuple[tuple[int, int], tuple[int, int]], do: str) -> Finding:
    numbers = supported.numbers_of(version)
    lowest, before = wanted
    if lowest <= numbers < before:
        return Finding("versions", name, Level.GOOD, version)
    text = f"{version}; supported are {supported.range_text(wanted)}"
    return Finding("versions", name, Level.PROBLEM if numbers < lowest else Level.WARNING, text, do)


def _gpu_findings(facts: Mapping[str, Any]) -> list[Finding]:
    cores = Finding("devices", "CPU", Level.GOOD, f"{available_cores()} cores for this process")
    has_gpu = os.path.exists("/dev/nvidia0")
    if facts["cuda"] is None:
        built = Finding("versions", "CUDA", Level.NOTE, "TensorFlow is built without")
        if not has_gpu:
            return [built, cores, Finding("devices", "GPU", Level.NOTE, "none")]
        do = supported.INSTALL_TENSORFLOW_CUDA
        text = "present, but this TensorFlow is built without CUDA"
        return [built, cores, Finding("devices", "GPU", Level.WARNING, text, do)]
    nccl = f", NCCL {facts['nccl']}" if facts["nccl"] else ""
    text = f"built with {facts['cuda']}, cuDNN {facts['cudnn']}{nccl}"
    built = Finding("versions", "CUDA", Level.GOOD, text)
    if facts["gpus"]:
        return [built, cores, Finding("devices", "GPU", Level.GOOD, ", ".join(facts["gpus"]))]
    if not has_gpu:
        return [built, cores, Finding("devices", "GPU", Level.NOTE, "none")]
    do = f"Check the driver: nvidia-smi; and CUDA's libraries: {supported.INSTALL_TENSORFLOW_CUDA}"
    return [built, cores, Finding("devices", "GPU", Level.WARNING, "present, but not visible to TensorFlow", do)]


def _horovod_finding(facts: Mapping[str, Any]) -> Finding:
    if facts["horovod"] is None:
        return Finding("versions", "Horovod", Level.NOTE, "not installed", INSTALL)
    try:
        status = check_horovod(sys.executable)
    except UnsupportedError as error:
        return Finding("versions", "Horovod", Level.PROBLEM, str(error), INSTALL)
    built = ", ".join(name for name in ("gloo", "mpi", "nccl") if getattr(status, name)) or "nothing"
    if not status.is_good:
        against = status.built_against or "?"
        text = f"{status.horovod}, built against TensorFlow {against}, does not load: {status.problem}"
        return Finding("versions", "Horovod", Level.PROBLEM, text, INSTALL)
    return Finding("versions", "Horovod", Level.GOOD, f"{status.horovod}, with {built}")


def _own_name(interfaces: Mapping[str, str]) -> Finding:
    """Checks that the host name resolves: Gloo looks it up on every host."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        own = next((address for interface, address in interfaces.items() if interface != "lo"), "127.0.0.1")
        do = f"echo '{own} {name}' >> /etc/hosts"
        return Finding("network", "own name", Level.WARNING, f"{name} does not resolve; Horovod needs its address", do)
    return Finding("network", "own name", Level.GOOD, f"{name}, {address}")
